"""The weights' EMA is torch's, and it is what a run evaluates and saves."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.accelerator import get_accelerator
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from clap_ds.checkpoint.load_weights import load_weights
from clap_ds.checkpoint.manager import Checkpointer
from clap_ds.checkpoint.restore import fp32_state
from clap_ds.checkpoint.train_state import TrainState
from clap_ds.engine.engine import ClapEngine
from clap_ds.engine.factory import freeze
from clap_ds.evaluation.evaluator import Evaluator
from tests.engine.test_engine import PRECISIONS, batches_of, model_of, settings
from tests.rank_pool import RankPool
from tests.training.reference_steps import engine_of

DECAY = 0.75


def _train(precision: str, accumulation: str) -> ClapEngine:
    """Take three steps, and compare the EMA with torch's after each."""
    train = {"ema_decay": DECAY, "accumulation": accumulation, "freeze": ["text"]}
    run = settings(precision if precision in PRECISIONS else "fp32", 2, clap={"train": train})
    run.deepspeed["fp16"] = {"enabled": precision == "fp16", "initial_scale_power": 8}
    model = model_of(run)
    freeze(model, ["text"])
    with pytest.MonkeyPatch.context() as patch:
        # True on every CPU, but slow.
        patch.setattr(get_accelerator(), "is_fp16_supported", lambda: True)
        engine = engine_of(run, model)
    assert engine.ema is not None
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert engine.ema.weights.keys() == trained

    weights = torch.nn.ParameterList(fp32_state(engine)[name].clone() for name in sorted(trained))
    reference = AveragedModel(weights, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    # The first update copies the weights.
    reference.update_parameters(weights)
    batches = batches_of(run)
    for _ in range(3):
        engine.step(batches)
        for weight, name in zip(weights, sorted(trained), strict=True):
            weight.data.copy_(fp32_state(engine)[name])
        reference.update_parameters(weights)
        for name, average in zip(sorted(trained), reference.module, strict=True):
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
        return SimpleNamespace(metrics={"evaluated": 1.0}, chances={})

    evaluator: Any = SimpleNamespace(evaluate=evaluate_model, _is_eager=False)
    evaluated = Evaluator.evaluate_engine(evaluator, engine)
    assert evaluated.metrics == {"evaluated": 1.0}
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
    assert averaged.reached.endswith("moving average of the weights")
    raw = load_weights(saved.path, raw=True)
    for name, tensor in raw.state.items():
        assert torch.equal(tensor, weights[name]), name
    assert raw.reached == "step 3"


def _run(precision: str, accumulation: str, folder: str) -> bytes:
    """Return the average, which must be the same on all ranks."""
    engine = _train(precision, accumulation)
    _check_evaluation(engine)
    _check_checkpoint(engine, folder)
    assert engine.ema is not None
    averages = [average.flatten() for average in engine.ema.weights.values()]
    return torch.cat(averages).numpy().tobytes()


@pytest.mark.parametrize(
    ("precision", "accumulation"),
    [("fp32", "plain"), ("bf16", "gradcache"), ("autocast", "gradcache"), ("fp16", "plain")],
)
def test_ema_is_torchs_and_is_evaluated_and_saved(
    two_ranks: RankPool, tmp_path: Path, precision: str, accumulation: str
) -> None:
    first, second = two_ranks.run(_run, precision, accumulation, str(tmp_path))
    assert first == second
