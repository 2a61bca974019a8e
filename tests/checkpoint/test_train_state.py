"""The progress of a run keeps the best metrics and the time to a target, and survives restarts."""

import math

import pytest

from clap_ds.checkpoint.train_state import TrainState


def test_best_metrics_and_time_to_target_are_kept():
    targets = {"top1": 0.5, "retrieval_loss": 0.2}
    state = TrainState()
    for step, values in enumerate([(0.6, 0.4), (0.4, 0.1), (0.55, math.nan), (0.5, 0.2)], start=1):
        assert "target" not in state.extra
        state.step = step
        state.update_best(dict(zip(targets, values, strict=True)), targets, train_s=float(step))
        # As in another start.
        state = TrainState.from_json(state.to_json())
        assert state.saved_step == step
    # Of losses, the smallest is the best.
    assert state.best == {"top1": 0.6, "retrieval_loss": 0.1}
    assert state.extra == {"target": targets, "time_to_target_s": 4.0, "target_step": 4}


@pytest.mark.parametrize("text", ["{}", "[]", '{"step": 1e999}'])
def test_nonsensical_progress_is_rejected(text):
    with pytest.raises(ValueError):  # noqa: PT011  (each has a message of its own)
        TrainState.from_json(text)
