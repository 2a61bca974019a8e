"""Times worked out by hand from rates, and what fusion leaves of a chain of operations."""

import torch

from clap_ds.flop_count.peaks import GPUS
from clap_ds.planning.roofline import CASES, DeviceRates, fused, rates_of, seconds_by_part
from clap_ds.planning.trace import Operation


def _operation(
    name: str = "aten.add", *, flops: int = 0, read: dict[int, int] | None = None, written: dict[int, int] | None = None,
    part: str = "audio", backward: bool = False, launches: bool = True,
) -> Operation:  # fmt: skip
    places = (tuple((each or {}).items()) for each in (read, written))
    return Operation(name, part, backward, flops, *places, launches, torch.bfloat16, ())


RATES = DeviceRates({torch.bfloat16: 100.0}, 10.0, 0.5, {"clap_ds.window_attention": 20.0})


def test_an_operation_takes_what_it_needs_most_of() -> None:
    assert RATES.seconds(_operation(flops=400, read={1: 20})) == 4
    assert RATES.seconds(_operation(flops=400, read={1: 50}, written={2: 50})) == 10
    assert RATES.seconds(_operation(read={1: 1})) == 0.5
    assert RATES.seconds(_operation("clap_ds.window_attention", flops=400)) == 20
    assert RATES.seconds(_operation(read={1: 100}, launches=False)) == 0
    assert RATES.seconds(_operation("c10d.allreduce_", read={1: 100})) == 0


def test_parts_add_up_to_the_step() -> None:
    operations = [(_operation(read={1: 10}), 3), (_operation(read={1: 20}, backward=True), 1)]
    operations += [(_operation(read={1: 30}, part="optimizer"), 1)]
    found = seconds_by_part(operations, RATES)
    assert found == {"audio forward": 3, "audio backward": 2, "optimizer": 3, "step": 8}


def test_a_gpus_cases_are_in_order_and_below_its_data_sheet() -> None:
    product, move = _operation(flops=10**13), _operation(read={1: 10**10})
    for gpu in GPUS.values():
        rates = rates_of(gpu)
        for operation, ideal in ((product, 10 / gpu.bf16_tflops), (move, 0.01 / gpu.memory_tbytes_per_s)):
            times = [rates[case].seconds(operation) for case in CASES]
            assert times[0] > times[1] > times[2] > ideal


def test_what_lies_between_products_becomes_one_kernel() -> None:
    chain = [
        _operation("aten.mm", flops=1, written={1: 100}),
        _operation("aten.add", read={1: 100, 9: 100}, written={2: 100}),
        _operation("aten.view", launches=False),
        _operation("aten.gelu", read={2: 100}, written={3: 50}),
        _operation("aten.mm", flops=1, read={3: 50}, written={4: 100}),
        _operation("aten.add", read={4: 100}, written={5: 100}, part="loss"),
        _operation("aten.mul", read={5: 100}, written={6: 100}, part="loss"),
    ]
    left = fused(chain)
    assert [operation.name for operation in left] == ["aten.mm", "fused", "aten.mm", "aten.add", "aten.mul"]
    assert dict(left[1].read) == {1: 100, 9: 100}
    assert dict(left[1].written) == {3: 50}  # 2 isn't read by anything later
    assert sum(operation.bytes_moved for operation in left) < sum(operation.bytes_moved for operation in chain)


def test_fusion_stops_where_the_direction_changes_and_spares_what_is_not_compiled() -> None:
    both = [_operation(read={1: 8}, written={2: 8}), _operation(read={2: 8}, written={3: 8}, backward=True)]
    left = fused(both)
    assert [operation.backward for operation in left] == [False, True]
    assert dict(left[0].written) == {2: 8}
    operations = [_operation(read={1: 8}), _operation(read={2: 8})]
    assert fused(operations, ()) == fused(operations, ("text",)) == operations
