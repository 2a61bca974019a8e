"""Compare the weights' average with torch's `AveragedModel` on two ranks; check what is evaluated
and saved."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from deepspeed.accelerator import get_accelerator
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from clap_ds.checkpoint.load_weights import load_weights
from clap_ds.checkpoint.manager import Checkpointer
from clap_ds.checkpoint.restore import fp32_state
from clap_ds.checkpoint.train_state import TrainState
from clap_ds.engine.factory import freeze
from clap_ds.evaluation.evaluator import Evaluator
from tests.engine.test_engine import PRECISIONS, batches_of, model_of, settings
from tests.rank_pool import RankPool
from tests.training.reference_steps import engine_of


def _average(precision: str, accumulation: str, folder: str) -> tuple[bytes, dict[str, bool]]:
    """Return the average after three steps, and the results of checks."""
    train = {"ema_decay": 0.75, "accumulation": accumulation, "freeze": ["text"]}
    run = settings(precision if precision in PRECISIONS else "fp32", 2, clap={"train": train})
    run.deepspeed |= {"fp16": {"enabled": precision == "fp16", "initial_scale_power": 8}}
    model = model_of(run)
    freeze(model, ["text"])
    with mock.patch.object(
        get_accelerator(), "is_fp16_supported", return_value=True
    ):  # true, but slow, on every CPU
        engine = engine_of(run, model)
        batches = batches_of(run)
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    masters = torch.nn.ParameterList(fp32_state(engine)[name].clone() for name in names)
    torchs = AveragedModel(masters, multi_avg_fn=get_ema_multi_avg_fn(0.75))
    torchs.update_parameters(masters)  # the first is a copy
    for _ in range(3):
        engine.step(batches)
        for kept, name in zip(masters, names, strict=True):
            kept.data.copy_(fp32_state(engine)[name])
        torchs.update_parameters(masters)
    assert engine.average is not None
    assert engine.average.weights.keys() == {*names}
    state = {name: engine.average.weights[name] for name in names}
    before = {name: p.detach().clone() for name, p in model.named_parameters()}

    def compare(model: Any) -> Any:
        same = all(
            torch.equal(p, state.get(name, p).to(p.dtype)) for name, p in model.named_parameters()
        )
        return SimpleNamespace(
            metrics=same, chances=not torch.equal(model.logit_scale, before["logit_scale"])
        )

    stand_in: Any = SimpleNamespace(evaluate=compare)
    evaluated: Any = Evaluator.evaluate_engine(stand_in, engine)
    (path,) = (each.path for each in Checkpointer(folder).save(engine, TrainState(3)))
    assert path is not None
    saved = load_weights(path)
    raw = load_weights(path, raw=True)
    weights = fp32_state(engine)
    found = {
        "torch's": all(map(torch.equal, state.values(), torchs.module)),
        "evaluated": (evaluated.metrics, evaluated.chances) == (True, True),
        "put back": all(torch.equal(p, before[name]) for name, p in model.named_parameters()),
        "saved": all(
            torch.equal(tensor, state.get(name, weights[name]))
            for name, tensor in saved.state.items()
        ),
        "raw": all(torch.equal(tensor, weights[name]) for name, tensor in raw.state.items()),
        "said": saved.reached.endswith("moving average of the weights") and raw.reached == "step 3",
    }
    return torch.cat([each.flatten() for each in state.values()]).numpy().tobytes(), found


KINDS = [("fp32", "plain"), ("bf16", "gradcache"), ("autocast", "gradcache"), ("fp16", "plain")]


@pytest.mark.parametrize(("precision", "accumulation"), KINDS)
def test_it_is_torchs_and_what_is_evaluated_and_saved(
    two_ranks: RankPool, tmp_path: Path, precision: str, accumulation: str
) -> None:
    (one, found), (other, there) = two_ranks.run(_average, precision, accumulation, str(tmp_path))
    assert one == other
    assert {*found.values(), *there.values()} == {True}, (found, there)
