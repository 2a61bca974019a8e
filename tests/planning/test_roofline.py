"""Test times against hand calculations."""

from pathlib import Path

import pytest
import torch

from clap_ds.flop_count.device_specs import GPUS
from clap_ds.planning import roofline_shares
from clap_ds.planning.roofline import CASES, DeviceRates, rates_of, seconds_by_part
from clap_ds.planning.roofline_shares import PROCESSORS, TABLE
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


def test_a_gpus_times_are_its_data_sheets_and_what_its_processors_take_besides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Overheads take as long as on an H100 with the same number of processors."""
    monkeypatch.setattr(roofline_shares, "work_folder", lambda: tmp_path)  # without measurements
    besides = []
    for gpu in GPUS.values():
        ideal_s = 0.01 / gpu.memory_tbytes_per_s
        times = [rates_of(gpu, case).seconds(_operation(read=10**10)) for case in CASES]
        assert times[0] > times[1] > times[2] > ideal_s
        besides.append((times[1] - ideal_s) * PROCESSORS[gpu.name])
    assert besides == pytest.approx([besides[0]] * len(besides))
    h100_s = rates_of(GPUS["h100-sxm"], "middle").seconds(_operation(read=335 * 10**10))
    assert h100_s == pytest.approx(1 / TABLE["element-wise"].middle)
