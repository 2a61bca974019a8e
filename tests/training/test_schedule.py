"""Steps and micro-batches of a run, against counting them one by one; how far a run has come."""

import math

import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from clap_ds.config.settings import RunSettings
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
    assert schedule.ahead(done) == (steps, samples)


def test_ramp_begins_with_the_sections_own_accumulation_and_epochs_are_counted_in_samples() -> None:
    run = settings(gradient_accumulation_steps=2, train={"samples": 100, "batch_ramp": {"30": 4, "60": 8}})
    schedule = Schedule.of(run, world_size=2, epoch_samples=None)
    assert [schedule.accumulation_at(samples) for samples in (0, 29, 30, 59, 60, 99)] == [2, 2, 4, 4, 8, 8]
    assert schedule.samples_per_micro_step == 6
    assert schedule.epoch(50) is None
    run = settings(train={"epochs": 2.5})
    schedule = Schedule.of(run, world_size=2, epoch_samples=101)
    assert (schedule.samples, schedule.epoch(202), schedule.epoch(0)) == (253, 2, 0)
    with pytest.raises(ValueError, match=r"clap\.train\.epochs"):
        Schedule.of(run, world_size=2, epoch_samples=None)


def noted(run: RunSettings, *evaluations: dict[str, float]) -> TrainingProgress:
    """After these, one a step and a second, each in a start of its own."""
    progress = TrainingProgress()
    for step, metrics in enumerate(evaluations, 1):
        progress = TrainingProgress.from_json(progress.to_json())
        progress.step = step
        progress.note(metrics, run, float(step))
    return progress


def test_the_best_metrics_and_the_time_to_a_target_are_kept() -> None:
    wanted = {"top1": 0.5, "retrieval_loss": 0.2}
    run = settings(train={"samples": 9, "stop_at": wanted})
    values = [(0.6, 0.4), (0.4, 0.1), (0.55, math.nan), (0.5, 0.2)]
    evaluations = [dict(zip(wanted, pair, strict=True)) for pair in values]
    progress = noted(run, *evaluations[:3])
    assert (progress.time_to(wanted), progress.why_over(run)) == (None, None)
    progress = noted(run, *evaluations)
    assert progress.best == {"top1": 0.6, "retrieval_loss": 0.1}
    assert (progress.time_to(wanted), progress.time_to({}), progress.time_to({"top1": 0.5})) == (4.0, None, None)
    assert progress.why_over(run) == "target reached at step 4, after 4 s: top1 0.5, retrieval_loss 0.2"
    assert progress.why_over(settings(train={"samples": 9})) is None


@pytest.mark.parametrize(
    ("metric", "least_gain", "values", "best"),
    [
        ("retrieval_loss", 0.0, [4.0, 3.0, 2.0, 2.5], None),
        ("retrieval_loss", 0.0, [4.0, 2.0, 2.5, 2.0], "step 2, where it was 2"),
        ("retrieval_loss", 0.0, [4.0, 2.0, math.nan, math.nan], "step 2, where it was 2"),
        ("retrieval_loss", 0.5, [4.0, 2.0, 1.75, 1.4], None),  # held against the best gain, not the last value
        ("retrieval_loss", 0.5, [4.0, 2.0, 1.75, 1.6], "step 2, where it was 2"),
        (None, 0.0, [0.1, 0.2, 0.2, 0.15], "step 2, where it was 0.2"),  # what tells the best
        (None, 0.0, [0.1, 0.2, 0.1, 0.3], None),
    ],
)
def test_a_plateau_is_so_many_evaluations_without_a_gain(
    metric: str | None, least_gain: float, values: list[float], best: str | None
) -> None:
    plateau = {"metric": metric, "evaluations": 2, "least_gain": least_gain}
    evaluation = {"retrieval": {"shards": "x.tar"}, "every_steps": 1}
    run = settings(train={"samples": 9, "stop_on_plateau": plateau}, evaluation=evaluation)
    name = metric or "retrieval_audio_to_text_r1"
    progress = noted(run, *({name: value} for value in values))
    expected = f"no gain in {name} for 2 evaluations, since {best}"
    assert progress.why_over(run) == (expected if best else None)
    patient = settings(train={"samples": 9, "stop_on_plateau": plateau | {"evaluations": 3}}, evaluation=evaluation)
    assert progress.why_over(patient) is None
