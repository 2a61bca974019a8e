"""Steps and micro-batches of a run, against counting them one by one."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from clap_ds.training.schedule import Schedule
from tests.training.reference_steps import settings


def _count(schedule: Schedule, samples: int) -> int:
    steps = 0
    while samples < schedule.samples:
        samples += schedule.accumulation_at(samples) * schedule.samples_per_micro_step
        steps += 1
    return steps


@examples(deadline=None)
@given(
    total=st.integers(1, 5000),
    micro=st.integers(1, 64),
    ramp=st.dictionaries(st.integers(1, 4000), st.integers(1, 9), max_size=4),
    done=st.integers(0, 5000),
)
def test_steps_are_those_a_run_takes(total: int, micro: int, ramp: dict[int, int], done: int) -> None:
    schedule = Schedule(total, micro, tuple(sorted({0: 2, **ramp}.items())))
    assert schedule.steps_from(done) == _count(schedule, done)


def test_ramp_begins_with_the_sections_own_accumulation() -> None:
    run = settings(gradient_accumulation_steps=2, train={"samples": 100, "batch_ramp": {"30": 4, "60": 8}})
    schedule = Schedule.of(run, world_size=2, epoch_samples=None)
    assert [schedule.accumulation_at(samples) for samples in (0, 29, 30, 59, 60, 99)] == [2, 2, 4, 4, 8, 8]
    assert schedule.samples_per_micro_step == 6
    assert schedule.epoch(50) == 0


def test_epochs_are_counted_in_samples() -> None:
    run = settings(train={"epochs": 2.5})
    schedule = Schedule.of(run, world_size=2, epoch_samples=101)
    assert schedule.samples == 253
    assert schedule.epoch(202) == 2
    with pytest.raises(ValueError, match=r"clap\.train\.epochs"):
        Schedule.of(run, world_size=2, epoch_samples=None)


@pytest.mark.parametrize(
    ("scheduler", "said"),
    [
        ({}, None),
        ({"params": {"total_num_steps": 15}}, None),
        (
            {"params": {"total_num_steps": 20}},
            "scheduler.params.total_num_steps is 20, but the run ends after 15 steps",
        ),
    ],
)
def test_a_scheduler_with_another_end_is_noticed(scheduler: dict[str, Any], said: str | None) -> None:
    schedule = Schedule(100, 10, ((0, 1),))
    found = schedule.mismatch(scheduler, step=5, samples=0)
    assert found == said
