"""A resumed run equals an uninterrupted one; changes of a run's settings are reported, and some
need acceptance."""

from pathlib import Path
from typing import Any

import pytest
import torch

from clap_ds.checkpoint.checkpoint_files import WEIGHTS, CheckpointFolder
from clap_ds.checkpoint.load_weights import load_weights
from clap_ds.checkpoint.manager import Checkpointer
from clap_ds.checkpoint.restore import compare, fp32_state
from clap_ds.checkpoint.train_state import TrainState
from clap_ds.config.model import load_preset
from clap_ds.engine import factory
from clap_ds.engine.engine import ClapEngine
from clap_ds.model.clap import ClapModel
from tests.checkpoint import trained_engines as engines
from tests.rank_pool import RankPool
from tests.training import reference_steps as reference
from tests.weights.fake_checkpoints import checkpoint_of

MICRO = load_preset("micro")


def interrupt_and_resume(
    folder: str, precision: str, frozen: tuple[str, ...]
) -> tuple[dict[str, Any], dict[str, Any], TrainState]:
    """Train three steps with dropout, save, and train three more in the same engine and in another
    that resumes. Return everything that the last steps gave in both, and the loaded progress."""
    train = {
        "freeze": list(frozen),
        "ema_decay": 0.9,
        "lr_scale": {"text": 0.5} if "audio" in frozen else {},
    }
    run = engines.settings(precision, scheduler=engines.SCHEDULER, clap={"train": train})

    def train_three_steps(engine: ClapEngine) -> dict[str, Any]:
        losses = engines.train(engine, 3, 3)
        assert engine.ema is not None
        deepspeed = engine.deepspeed
        return {
            "losses": losses,
            "random number": float(torch.rand(1)),
            "learning rates": deepspeed.get_lr(),
            "average": [tensor.tolist() for tensor in engine.ema.weights.values()],
            "steps": (engine.steps, deepspeed.global_steps, deepspeed.skipped_steps),
            "samples": deepspeed.global_samples,
        }

    engine = engines.build_engine(run, 1, noisy=True)
    engines.train(engine, 0, 3)
    Checkpointer(folder).save(engine, engines.progress(3))
    uninterrupted = train_three_steps(engine)
    other = engines.build_engine(run, 99, noisy=True)
    progress = engines.load(Checkpointer(folder), other)
    return uninterrupted, train_three_steps(other), progress


@pytest.mark.parametrize(("precision", "frozen"), [("bf16", ("audio",)), ("autocast", ())])
def test_resumed_run_equals_uninterrupted(two_ranks, tmp_path, precision, frozen):
    results = two_ranks.run(interrupt_and_resume, str(tmp_path), precision, frozen)
    for rank, (uninterrupted, resumed, progress) in enumerate(results):
        assert resumed == uninterrupted
        assert resumed["steps"] == (6, 6, 0)
        assert progress.data[rank] == {"rank": rank, "step": 3}
        assert (progress.samples, progress.train_s) == (18, 1.5)


def resume_in_another_order(
    folder: str, precision: str, optimizer: dict[str, Any], alignments: tuple[int, int]
) -> tuple[list[list[str]], list[list[float]]]:
    """Save a run with groups of one alignment, and resume it with another. Return both optimizers'
    orders of parameters, and the losses of further steps."""
    run = engines.settings(precision, optimizer=optimizer)
    saved_and_loaded = []
    for alignment in alignments:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(factory, "ALIGNED", alignment)
            saved_and_loaded.append(engines.build_engine(run, alignment))
    saved, loaded = saved_and_loaded
    engines.train(saved, 0, 3)
    Checkpointer(folder).save(saved, engines.progress(3))
    engines.load(Checkpointer(folder), loaded)
    orders = [[*saved.masters], [*loaded.masters]]
    return orders, [engines.train(saved, 3, 3), engines.train(loaded, 3, 3)]


ADAM = {"type": "AdamW", "params": {"lr": 5e-3}}
TORCH_ADAM = {"type": "AdamW", "params": {"lr": 5e-3, "torch_adam": True}}


@pytest.mark.parametrize(
    ("precision", "optimizer", "alignments"),
    # Alignment 1 is the model's order, which earlier versions had.
    [("bf16", ADAM, (8, 1)), ("bf16", TORCH_ADAM, (1, 8)), ("fp32", ADAM, (8, 1))],
    ids=["flat", "by parameter", "fp32"],
)
def test_checkpoint_in_another_order_of_parameters_resumes_exactly(
    one_rank, tmp_path, precision, optimizer, alignments
):
    ((orders, losses),) = one_rank.run(
        resume_in_another_order, str(tmp_path), precision, optimizer, alignments
    )
    assert orders[0] != orders[1]
    assert losses[0] == losses[1]


def save_after_two_steps(folder: str) -> None:
    Checkpointer(folder, config=engines.settings().resolved()).save(
        engines.trained_engine(2), engines.progress(2)
    )


@pytest.fixture(scope="module")
def saved(one_rank: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bf16 run's folder with a checkpoint after two steps."""
    folder = tmp_path_factory.mktemp("saved")
    one_rank.run(save_after_two_steps, str(folder))
    return folder


def resume_with(
    folder: str, precision: str, changes: dict[str, Any], accept: bool = False
) -> dict[str, Any]:
    """Resume a run whose settings differ from the checkpoint's."""
    run = engines.settings(precision, **changes)
    engine = engines.build_engine(run, 99)
    checkpointer = Checkpointer(folder, config=run.resolved())
    with engines.collect_warnings() as warnings:
        try:
            engines.load(checkpointer, engine, resume_weights_only=accept)
        except ValueError as error:
            return {"error": str(error)}
    path = checkpointer.find()
    assert path is not None
    weights = load_weights(path / WEIGHTS).state
    state = fp32_state(engine)
    trained = [name for name, p in engine.model.named_parameters() if p.requires_grad]
    # The bias of another loss isn't in the checkpoint.
    has_weights = all(
        torch.equal(state[name], weights[name]) for name in trained if name in weights
    )
    (rate,) = engine.deepspeed.get_lr()[:1]
    engines.train(engine, engine.steps, 1)
    return {
        "warning": "".join(warnings),
        "has weights": has_weights,
        "rates": [rate, engine.deepspeed.get_lr()[0]],
    }


@pytest.mark.parametrize(
    ("precision", "clap", "reason"),
    [
        ("fp32", {}, "the precision is bf16 there, fp32 here"),
        (
            "bf16",
            {"train": {"lr_scale": {"text": 0.1}}},
            "clap.train.lr_scale is {} there, {'text': 0.1} here",
        ),
        ("bf16", {"loss": {"kind": "sigmoid"}}, "loss is 'SoftmaxLoss' there, 'SigmoidLoss' here"),
    ],
)
def test_changed_training_continues_from_weights_if_accepted(
    one_rank, saved, precision, clap, reason
):
    (refused,) = one_rank.run(resume_with, str(saved), precision, {"clap": clap})
    assert reason in refused["error"]
    assert "--resume_weights_only" in refused["error"]
    (accepted,) = one_rank.run(resume_with, str(saved), precision, {"clap": clap}, True)
    assert "only its weights and step are restored" in accepted["warning"]
    assert accepted["has weights"]


def test_changed_settings_are_warned_of_and_used(one_rank, saved):
    optimizer = {"type": "AdamW", "params": {"lr": 1e-4}}
    (result,) = one_rank.run(resume_with, str(saved), "bf16", {"optimizer": optimizer})
    assert "optimizer.params.lr: 0.005 there, 0.0001 here" in result["warning"]
    assert result["rates"][0] == 1e-4
    (unchanged,) = one_rank.run(resume_with, str(saved), "bf16", {})
    assert unchanged["warning"] == ""


def test_new_schedule_continues_at_the_step(one_rank, saved):
    changes = {"scheduler": engines.SCHEDULER}
    (result,) = one_rank.run(resume_with, str(saved), "bf16", changes)
    assert "scheduler is None there, 'WarmupCosineLR' here" in result["warning"]
    # The second and third of four warm-up steps.
    assert result["rates"] == pytest.approx([5e-3 / 4, 5e-3 / 2])


def test_changed_tokenizer_needs_acceptance(tmp_path):
    # A setting of an earlier version isn't reported.
    settings = {"clap": {"train": {"shuffle_captions": True}}}
    path = checkpoint_of(ClapModel(MICRO), tmp_path, tokenizer="roberta-base", settings=settings)
    checkpoint = CheckpointFolder.read(path)
    config = reference.settings().resolved()
    to_accept, harmless = compare(checkpoint, MICRO, {}, config, "roberta-base")
    assert to_accept == []
    assert not any("shuffle_captions" in change for change in harmless)
    (change,), _ = compare(checkpoint, MICRO, {}, config, "no/such-tokenizer")
    assert change.startswith("the tokenizer: roberta-base there and no/such-tokenizer here")
