"""Triton kernels compiled ahead of time, as the stages of tiny and base launch them: they compile for every architecture, and
take no more registers than let enough programs be resident."""

import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

import pytest

pytest.importorskip("triton", reason="Triton is installed with torch on Linux")

from benchmarks.triton_resources import Case, Resources, cases_of, resources
from clap_ds.config.model import load_preset
from clap_ds.model import mlp_triton

MOST_SPILLED = 64
TINY, BASE = (list(cases_of(load_preset(f"htsat_{name}_roberta_base").audio)) for name in ("tiny", "base"))


def check(case: Case, architecture: int, found: Resources) -> None:
    assert found.spilled <= MOST_SPILLED, (case, architecture, found)
    least_warps = 8
    if case.kernel == "attention":
        assert found.registers <= {"forward": 80, "backward": 168}[case.way], (case, architecture, found)
        # On sm_100 the tensor memory of accumulators is enough for two.
        least_warps = {"forward": 28, "backward": 8 if architecture == 100 else 12}[case.way]
    elif case.shape[0] <= 128:
        least_warps = 8 if architecture == 100 else {"forward": 16, "backward": 12}[case.way]
    assert found.resident * case.launch.num_warps >= least_warps, (case, architecture, found)


def job(case: Case, architecture: int) -> tuple[Case, int, Resources]:
    return case, architecture, resources(case, architecture)


@pytest.mark.parametrize("case", TINY[2:4] + TINY[6:8], ids=lambda case: f"{case.kernel}-{case.way}")
def test_kernels_of_the_first_stage_on_hopper(case: Case) -> None:
    check(*job(case, 90))


@pytest.mark.end_to_end
def test_kernels_of_every_stage_and_architecture() -> None:
    """Tiny's and base's on Hopper, base's alone, which are wider, on the others; on sm_80 the fused MLP as launched there, and
    no wider than it pays."""
    jobs = [*((case, 90) for case in TINY + BASE), *((case, 100) for case in BASE)]
    jobs += [(case, 80) for case in BASE if case.kernel == "attention"]
    narrow = [case for case in BASE if case.kernel == "mlp" and case.shape[0] <= 128]
    jobs += [(replace(case, launch=getattr(mlp_triton.LAUNCHES[2], case.way)), 80) for case in narrow]
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        for found in pool.map(job, *zip(*jobs, strict=True)):
            check(*found)
