"""Steps of a run equal a count one by one; what is due after each; state of a run."""

import math

import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from clap_ds.checkpoint.train_state import TrainState
from clap_ds.config.batch_sizes import BatchSizes
from clap_ds.config.schema import CheckpointSettings, EvaluationSettings, TrainSettings
from clap_ds.training.plan import Due, TrainPlan


@examples(deadline=None)
@given(
    st.integers(1, 5000),
    st.integers(1, 500),
    st.integers(0, 5000),
    st.lists(st.integers(1, 3000), max_size=3),
)
def test_steps_are_those_a_run_takes(
    total: int, per_step: int, done: int, starts: list[int]
) -> None:
    batches = [per_step + number for number in range(len(starts))]
    ramp = [[start, batch] for start, batch in zip(sorted({0, *starts}), batches, strict=False)]
    plan = TrainPlan(total, ramp[-1][1] if ramp else per_step, ramp=ramp)
    state = TrainState(samples=done)
    last = plan.last_step(state)
    taken = list[int]()
    while not plan.is_done(state):
        taken.append(plan.batch(state.samples))
        plan.advance(state)
    assert (state.step, state.samples) == (last, done + sum(taken))
    assert taken == sorted(taken)


def test_a_ramp_is_of_samples() -> None:
    plan = TrainPlan(100, 32, ramp=[[0, 8], [20, 16], [50, 32]])
    state = TrainState()
    seen = list[int]()
    while not plan.is_done(state):
        plan.advance(state)
        seen.append(state.samples)
    assert seen == [8, 16, 24, 40, 56, 88, 120]


def test_epochs_are_counted_in_samples() -> None:
    rest = EvaluationSettings(), CheckpointSettings()
    train = TrainSettings(epochs=2.5)
    sizes = BatchSizes(3, 2, 12)
    plan = TrainPlan.of(train, *rest, sizes, 101)
    state = TrainState(samples=190)
    plan.advance(state)
    assert (plan.samples, state.samples, state.epoch) == (253, 202, 2)
    with pytest.raises(ValueError, match=r"clap\.train\.epochs"):
        TrainPlan.of(train, *rest, sizes, None)


NOTHING = Due(False, False, False, False)
TARGET = {"top1": 0.5}
PLAN = TrainPlan(100, 10, log_every=3, evaluate_every=4, save_every=5, target_metrics=TARGET)
REACHED = {"target": TARGET, "time_to_target_s": 1.0}


@pytest.mark.parametrize(
    ("state", "signal", "expected"),
    [
        (TrainState(1, 10), 0, NOTHING),
        (TrainState(3, 30), 0, NOTHING._replace(log=True)),
        (TrainState(4, 40), 0, NOTHING._replace(log=True, evaluate=True)),
        (TrainState(5, 50), 0, NOTHING._replace(log=True, save=True)),
        (TrainState(7, 70), 0, NOTHING._replace(log=True, save=True)),  # wasn't saved after step 5
        (TrainState(7, 70, saved_step=5), 0, NOTHING),
        (TrainState(1, 10), 15, Due(log=True, evaluate=False, save=True, stop=True)),
        (TrainState(4, 40), 15, Due(log=True, evaluate=False, save=True, stop=True)),
        (TrainState(10, 100, saved_step=5), 0, Due(log=True, evaluate=True, save=True, stop=True)),
        (TrainState(4, 40, extra=REACHED), 0, Due(log=True, evaluate=True, save=True, stop=True)),
    ],
)
def test_what_is_due_after_a_step(state: TrainState, signal: int, expected: Due) -> None:
    assert PLAN.due(state, signal) == expected
    assert PLAN.due(state, signal, is_late=True) == expected._replace(log=True, save=True)


def test_the_best_metrics_and_the_time_to_a_target_are_kept() -> None:
    wanted = {"top1": 0.5, "retrieval_loss": 0.2}
    state = TrainState()
    for step, values in enumerate([(0.6, 0.4), (0.4, 0.1), (0.55, math.nan), (0.5, 0.2)], start=1):
        assert (state.time_to(wanted), state.reached(wanted)) == (None, None)
        state.step = step
        state.note(dict(zip(wanted, values, strict=True)), wanted, float(step))
        state = TrainState.from_json(state.to_json())  # another start
        assert state.saved_step == step
    assert state.best == {"top1": 0.6, "retrieval_loss": 0.1}
    assert (state.time_to(wanted), state.time_to({}), state.time_to({"top1": 0.5})) == (
        4.0,
        None,
        None,
    )
    assert (
        state.reached(wanted) == "target reached at step 4, after 4 s: top1 0.5, retrieval_loss 0.2"
    )
    assert state.reached({}) is None


@pytest.mark.parametrize("text", ["{}", "[]", '{"step": -1}', '{"step": 1e999}'])
def test_a_progress_of_others_that_makes_no_sense_is_a_message(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  (each of its own words)
        TrainState.from_json(text)
