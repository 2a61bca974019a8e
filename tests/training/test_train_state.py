"""Steps of a run equal a count one by one; progress of a run."""

import math

import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from clap_ds.training.train_state import Schedule, TrainingProgress
from tests.training.reference_steps import settings


@examples(deadline=None)
@given(st.integers(1, 5000), st.integers(1, 500), st.integers(0, 5000))
def test_steps_are_those_a_run_takes(total: int, per_step: int, done: int) -> None:
    schedule = Schedule(total, per_step)
    steps, samples = 0, done
    while not schedule.is_done(samples):
        samples += per_step
        steps += 1
    assert schedule.ahead(done) == (steps, samples)


def test_steps_are_global_batches_and_epochs_are_counted_in_samples() -> None:
    run = settings(gradient_accumulation_steps=2, train={"max_samples": 100})
    schedule = Schedule.of(run, world_size=2, epoch_samples=None)
    assert (schedule.samples, schedule.samples_per_step, schedule.epoch(50)) == (100, 12, None)
    run = settings(train={"epochs": 2.5})
    schedule = Schedule.of(run, world_size=2, epoch_samples=101)
    assert (schedule.samples, schedule.epoch(202), schedule.epoch(0)) == (253, 2, 0)
    with pytest.raises(ValueError, match=r"clap\.train\.epochs"):
        Schedule.of(run, world_size=2, epoch_samples=None)


def test_the_best_metrics_and_the_time_to_a_target_are_kept() -> None:
    wanted, progress = {"top1": 0.5, "retrieval_loss": 0.2}, TrainingProgress()
    for step, values in enumerate([(0.6, 0.4), (0.4, 0.1), (0.55, math.nan), (0.5, 0.2)], start=1):
        assert (progress.time_to(wanted), progress.reached(wanted)) == (None, None)
        progress.step = step
        progress.note(dict(zip(wanted, values, strict=True)), wanted, float(step))
        progress = TrainingProgress.from_json(progress.to_json())  # another start
    assert progress.best == {"top1": 0.6, "retrieval_loss": 0.1}
    assert (progress.time_to(wanted), progress.time_to({}), progress.time_to({"top1": 0.5})) == (4.0, None, None)
    assert progress.reached(wanted) == "target reached at step 4, after 4 s: top1 0.5, retrieval_loss 0.2"
    assert progress.reached({}) is None
