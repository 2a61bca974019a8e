"""Compare window attention kernels with PyTorch's on CPUs in fp64: outputs and gradients, with and
without shift."""

import pytest
import torch

from clap_ds.model import window_attention
from tests.model.kernel_cases import (
    CASES,
    TOLERANCE,
    Case,
    by,
    draw,
    errors,
    largest_error,
    results,
)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_matmul_equals_sdpa(dtype, case):
    error = largest_error(by("matmul", case), by("sdpa", case), draw(case), dtype)
    assert error < TOLERANCE[dtype]


def test_sdpa_with_too_large_batch_splits_it(monkeypatch):
    # 3 clips of 4 windows.
    case = Case(16, 4, 24, 0)
    inputs = draw(case)
    whole = results(by("sdpa", case), inputs, torch.float64)
    monkeypatch.setattr(window_attention, "MAX_BATCH", 11)
    with torch.profiler.profile() as profile:
        parts = results(by("sdpa", case), inputs, torch.float64)
    assert max(errors(parts, whole)) < TOLERANCE[torch.float64]
    names = [event.name for event in profile.events()]
    assert names.count("aten::scaled_dot_product_attention") == 2
