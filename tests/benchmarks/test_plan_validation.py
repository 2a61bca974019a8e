"""Peaks of the allocator, known and predicted."""

from collections.abc import Callable
from functools import partial

import pytest
import torch

from benchmarks import plan_validation
from benchmarks.common import allocated_peak
from clap_ds.config.settings import RunSettings
from clap_ds.planning.step import trace_step
from tests.rank_pool import RankPool


def test_the_allocators_peak_is_of_the_window_alone() -> None:
    def prepare() -> Callable[[], object]:
        kept = torch.zeros(1 << 20)
        torch.zeros(1 << 22)  # gone before the window
        return lambda: kept + torch.zeros(1 << 20)

    assert allocated_peak(prepare) == pytest.approx(3 * 4 << 20, rel=1e-3)


def _engines_peak(*case: str) -> int:
    return allocated_peak(partial(plan_validation.second_step, _run(*case)))


def _run(preset: str, precision: str, way: str) -> RunSettings:
    return plan_validation.make_run(preset, "matmul", precision, **plan_validation.WAYS[way])


@pytest.mark.parametrize(
    "case", [("micro", "bf16", "padded"), ("demo", "autocast", "recomputed"), ("demo", "bf16", "packed")]
)
def test_a_steps_planned_memory_is_the_allocators(one_rank: RankPool, case: tuple[str, str, str]) -> None:
    (allocated,) = one_rank.run(_engines_peak, *case)
    planned = trace_step(_run(*case), plan_validation.SIZES[case[0]][0], cuda=False).recorded.peak_bytes
    assert planned == pytest.approx(allocated, rel=0.005)
