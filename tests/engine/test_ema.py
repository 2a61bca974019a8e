"""The weights' EMA is what a run evaluates and saves."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from clap_ds.checkpoint.load_weights import load_weights
from clap_ds.checkpoint.manager import Checkpointer
from clap_ds.checkpoint.restore import fp32_state
from clap_ds.checkpoint.train_state import TrainState
from clap_ds.engine.engine import ClapEngine
from clap_ds.engine.factory import freeze
from clap_ds.evaluation.evaluator import Evaluator
from tests.engine.test_engine import batches_of, model_of, settings
from tests.training.reference_steps import engine_of

DECAY = 0.75


def _train(precision: str, accumulation: str) -> ClapEngine:
    """Take three steps, and compare the EMA with its formula after each."""
    train = {"ema_decay": DECAY, "accumulation": accumulation, "freeze": ["text"]}
    run = settings(precision, 2, clap={"train": train})
    model = model_of(run)
    freeze(model, ["text"])
    engine = engine_of(run, model)
    assert engine.ema is not None
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert engine.ema.weights.keys() == trained

    expected = {name: fp32_state(engine)[name].clone() for name in trained}
    batches = batches_of(run)
    for _ in range(3):
        engine.step(batches)
        weights = fp32_state(engine)
        for name, average in expected.items():
            average.lerp_(weights[name], 1 - DECAY)
            assert torch.equal(engine.ema.weights[name], average), name
    return engine


def _check_evaluation(engine: ClapEngine) -> None:
    """Check that the average, in the model's dtypes, is evaluated, and the weights restored."""
    assert engine.ema is not None
    average = engine.ema.weights
    initial = {name: p.detach().clone() for name, p in engine.model.named_parameters()}

    def evaluate_model(model: Any) -> Any:
        for name, parameter in model.named_parameters():
            expected = average.get(name, initial[name]).to(parameter.dtype)
            assert torch.equal(parameter, expected), name
        return SimpleNamespace(metrics={}, chances={})

    evaluator: Any = SimpleNamespace(evaluate=evaluate_model, _runs_uncompiled=False)
    Evaluator.evaluate_engine(evaluator, engine)
    for name, parameter in engine.model.named_parameters():
        assert torch.equal(parameter, initial[name]), name


def _check_checkpoint(engine: ClapEngine, folder: str) -> None:
    """Check that a checkpoint's weights are the average, and that the others are beside it."""
    assert engine.ema is not None
    (saved,) = Checkpointer(folder).save(engine, TrainState(3))
    assert saved.path is not None
    weights = fp32_state(engine)
    averaged = load_weights(saved.path)
    for name, tensor in averaged.state.items():
        assert torch.equal(tensor, engine.ema.weights.get(name, weights[name])), name
    raw = load_weights(saved.path, raw=True)
    for name, tensor in raw.state.items():
        assert torch.equal(tensor, weights[name]), name


def _run(precision: str, accumulation: str, folder: str) -> None:
    engine = _train(precision, accumulation)
    _check_evaluation(engine)
    _check_checkpoint(engine, folder)


@pytest.mark.parametrize(
    ("precision", "accumulation"),
    [("fp32", "gradcache"), ("bf16", "plain")],
)
def test_ema_follows_its_formula_and_is_evaluated_and_saved(
    two_ranks, tmp_path, precision, accumulation
):
    two_ranks.run(_run, precision, accumulation, str(tmp_path))
