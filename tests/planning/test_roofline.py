"""Test times against hand calculations."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from clap_ds.flop_count.device_specs import GPUS
from clap_ds.planning.roofline import CASES, DeviceRates, fused, rates_of, seconds_by_part
from clap_ds.planning.roofline_shares import PROCESSORS, TABLE, efficiencies_of
from clap_ds.planning.tracing import Operation

RATES = DeviceRates({torch.bfloat16: 100.0}, 10.0, 0.5, share_of={"triton mlp": 0.2})


def _operation(
    name: str = "aten.add", flops: int = 0, read: int = 0, written: int = 0, *, part: str = "audio",
    backward: bool = False, launches: bool = True,
) -> Operation:  # fmt: skip
    return Operation(name, part, backward, flops, ((1, read),), ((2, written),), launches, torch.bfloat16)


def test_an_operation_takes_what_it_needs_most_of() -> None:
    assert RATES.seconds(_operation(flops=400, read=20)) == 4
    assert RATES.seconds(_operation(flops=400, read=50, written=50)) == 10
    assert RATES.seconds(_operation(read=1)) == 0.5
    assert RATES.seconds(_operation("clap_ds.mlp", 400)) == 20
    assert RATES.ideal_s(_operation("clap_ds.mlp", 400)) == 4
    assert RATES.seconds(_operation(read=100, launches=False)) == 0
    assert RATES.seconds(_operation("c10d.allreduce_", read=100)) == 0


def test_the_gpu_waits_for_the_host_where_kernels_are_short() -> None:
    """Ten launches take the host 2 s each; those during a long kernel cause no wait."""
    rates = DeviceRates({}, 10.0, host_s=2.0)
    short, long = _operation(read=10), _operation(read=120)
    assert seconds_by_part([(short, 10)], rates)["step"] == 2 * 10 + 10
    assert seconds_by_part([(short, 1)] * 10, rates)["step"] == pytest.approx(2 * 10 + 1)
    # Launched at 2 s, done at 14; three more are launched meanwhile, at 4, 6 and 8 s.
    assert seconds_by_part([(long, 1), *[(short, 1)] * 3], rates) == {"audio forward": 17, "step": 2 + 12 + 3}


def test_a_gpus_times_are_its_data_sheets_and_what_its_processors_take_besides() -> None:
    """Overheads take as long as on an H100 with the same number of processors."""
    besides = []
    for gpu in GPUS.values():
        if "measured" in efficiencies_of(gpu)["element-wise"].source:  # of a record in results/
            continue
        ideal_s = 0.01 / gpu.memory_tbytes_per_s
        times = [rates_of(gpu, case).seconds(_operation(read=10**10)) for case in CASES]
        assert times[0] > times[1] > times[2] > ideal_s
        besides.append((times[1] - ideal_s) * PROCESSORS[gpu.name])
    assert besides == pytest.approx([besides[0]] * len(besides))
    h100_s = rates_of(GPUS["h100-sxm"], "middle").seconds(_operation(read=335 * 10**10))
    assert h100_s == pytest.approx(1 / TABLE["element-wise"].middle)


def _moving(name: str, read: dict[int, int], written: dict[int, int], **its: Any) -> Operation:
    launches = bool(read or written)
    return replace(_operation(name, launches=launches, **its), read=(*read.items(),), written=(*written.items(),))


def test_what_lies_between_products_becomes_one_kernel() -> None:
    chain = [
        _moving("aten.mm", {}, {1: 100}, flops=1),
        _moving("aten.add", {1: 100, 9: 100}, {2: 100}),
        _moving("aten.view", {}, {}),
        _moving("aten.gelu", {2: 100}, {3: 50}),
        _moving("aten.mm", {3: 50}, {4: 100}, flops=1),
        _moving("aten.add", {4: 100}, {5: 100}, part="loss"),
        _moving("aten.gelu_backward", {1: 100}, {6: 100}, backward=True),
        _moving("aten.sum", {6: 100}, {7: 1}, backward=True),
    ]
    left = fused(chain)
    names = ["aten.mm", "fused", "aten.mm", "aten.add", "fused", "fused"]
    assert [operation.name for operation in left] == names  # a sum over rows reads again
    assert dict(left[1].read) == {1: 100, 9: 100}
    assert dict(left[1].written) == {3: 50}  # 2 isn't read by anything later
    assert (dict(left[4].read), dict(left[5].read)) == ({1: 100}, {6: 100})
