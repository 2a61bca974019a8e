"""Times worked out by hand from rates."""

import pytest
import torch

from clap_ds.flop_count.peaks import GPUS
from clap_ds.planning.roofline import CASES, DeviceRates, fused, rates_of, seconds_by_part
from clap_ds.planning.trace import Operation

RATES = DeviceRates({torch.bfloat16: 100.0}, 10.0, 0.5, {"clap_ds.window_attention": 20.0})


def _operation(
    name: str = "aten.add", flops: int = 0, read: int = 0, written: int = 0, *, part: str = "audio",
    backward: bool = False, launches: bool = True,
) -> Operation:  # fmt: skip
    return Operation(name, part, backward, flops, ((1, read),), ((2, written),), launches, torch.bfloat16)


def test_an_operation_takes_what_it_needs_most_of() -> None:
    assert RATES.seconds(_operation(flops=400, read=20)) == 4
    assert RATES.seconds(_operation(flops=400, read=50, written=50)) == 10
    assert RATES.seconds(_operation(read=1)) == 0.5
    assert RATES.seconds(_operation("clap_ds.window_attention", 400)) == 20
    assert RATES.seconds(_operation(read=100, launches=False)) == 0
    assert RATES.seconds(_operation("c10d.allreduce_", read=100)) == 0


def test_parts_add_up_to_the_step() -> None:
    once = [_operation(read=20, backward=True), _operation(read=30, part="optimizer")]
    found = seconds_by_part([(_operation(read=10), 3), *((each, 1) for each in once)], RATES)
    assert found == {"audio forward": 3, "audio backward": 2, "optimizer": 3, "step": 8}


def test_a_gpus_cases_are_in_order_and_shares_of_its_data_sheet() -> None:
    product, move = _operation(flops=10**13), _operation(read=10**10)
    attention = _operation("aten._scaled_dot_product_efficient_attention_backward", 10**13)
    for gpu in GPUS.values():
        compute_s = 10 / gpu.bf16_tflops
        ideal = ((product, 0.6, compute_s), (attention, 0.25, compute_s), (move, 0.8, 0.01 / gpu.memory_tbytes_per_s))
        for operation, middle, least in ideal:
            times = [rates_of(gpu, case).seconds(operation) for case in CASES]
            assert times[0] > times[1] > times[2] > least
            assert times[1] == pytest.approx(least / middle)


def _moving(
    name: str,
    read: dict[int, int],
    written: dict[int, int],
    flops: int = 0,
    *,
    part: str = "audio",
    backward: bool = False,
) -> Operation:
    places = (tuple(each.items()) for each in (read, written))
    return Operation(name, part, backward, flops, *places, bool(read or written), torch.bfloat16)


def test_what_lies_between_products_becomes_one_kernel() -> None:
    chain = [
        _moving("aten.mm", {}, {1: 100}, flops=1),
        _moving("aten.add", {1: 100, 9: 100}, {2: 100}),
        _moving("aten.view", {}, {}),
        _moving("aten.gelu", {2: 100}, {3: 50}),
        _moving("aten.mm", {3: 50}, {4: 100}, flops=1),
        _moving("aten.add", {4: 100}, {5: 100}, part="loss"),
        _moving("aten.mul", {5: 100}, {6: 100}, part="loss"),
    ]
    left = fused(chain)
    assert [operation.name for operation in left] == ["aten.mm", "fused", "aten.mm", "aten.add", "aten.mul"]
    assert dict(left[1].read) == {1: 100, 9: 100}
    assert dict(left[1].written) == {3: 50}  # 2 isn't read by anything later


def test_fusion_stops_where_the_direction_changes_and_spares_what_is_not_compiled() -> None:
    both = [_moving("aten.add", {1: 8}, {2: 8}), _moving("aten.add", {2: 8}, {3: 8}, backward=True)]
    left = fused(both)
    assert [operation.backward for operation in left] == [False, True]
    assert dict(left[0].written) == {2: 8}
    operations = [_moving("aten.add", {1: 8}, {}), _moving("aten.add", {2: 8}, {})]
    assert fused(operations, ()) == fused(operations, ("text",)) == operations
