"""Steps and micro-batches of a run, against counting them one by one; how far a run has come."""

import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from clap_ds.training.schedule import Schedule, TrainingProgress
from tests.training.reference_steps import settings

RAMPS = st.dictionaries(st.integers(1, 4000), st.integers(1, 9), max_size=4)


@examples(deadline=None)
@given(st.integers(1, 5000), st.integers(1, 64), RAMPS, st.integers(0, 5000))
def test_steps_are_those_a_run_takes(total: int, micro: int, ramp: dict[int, int], done: int) -> None:
    schedule = Schedule(total, micro, tuple(sorted({0: 2, **ramp}.items())))
    steps, samples = 0, done
    while not schedule.is_done(samples):
        samples += schedule.accumulation_at(samples) * micro
        steps += 1
    assert schedule.steps_from(done) == steps


def test_ramp_begins_with_the_sections_own_accumulation_and_epochs_are_counted_in_samples() -> None:
    run = settings(gradient_accumulation_steps=2, train={"samples": 100, "batch_ramp": {"30": 4, "60": 8}})
    schedule = Schedule.of(run, world_size=2, epoch_samples=None)
    assert [schedule.accumulation_at(samples) for samples in (0, 29, 30, 59, 60, 99)] == [2, 2, 4, 4, 8, 8]
    assert schedule.samples_per_micro_step == 6
    assert schedule.epoch(50) == 0
    run = settings(train={"epochs": 2.5})
    schedule = Schedule.of(run, world_size=2, epoch_samples=101)
    assert (schedule.samples, schedule.epoch(202)) == (253, 2)
    with pytest.raises(ValueError, match=r"clap\.train\.epochs"):
        Schedule.of(run, world_size=2, epoch_samples=None)


def test_a_scheduler_with_another_end_is_noticed() -> None:
    said = "scheduler.params.total_num_steps is 20, but the run ends after 15 steps"
    for params, expected in (({}, None), ({"total_num_steps": 15}, None), ({"total_num_steps": 20}, said)):
        assert Schedule(100, 10, ((0, 1),)).mismatch({"params": params}, step=5, samples=0) == expected


def test_the_best_metrics_and_the_time_to_a_target_are_kept() -> None:
    wanted, progress = {"top1": 0.5, "map": 0.2}, TrainingProgress()
    for top1, seconds in ((0.6, 1.0), (0.4, 2.0)):
        progress.note({"top1": top1, "map": 0.1}, wanted, seconds)
        assert progress.time_to(wanted) is None
    progress.note({"top1": 0.5, "map": 0.2}, wanted, 3.0)
    again = TrainingProgress.from_json(progress.to_json())
    assert (again, again.best) == (progress, {"top1": 0.6, "map": 0.2})
    assert (again.time_to(wanted), again.time_to({}), again.time_to({"top1": 0.5})) == (3.0, None, None)
