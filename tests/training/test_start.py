"""What training starts from: frozen towers stay as they are, other weights are taken over."""

import copy
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from clap_ds.config.model import load_preset
from clap_ds.config.settings import load_run
from clap_ds.engine import session
from clap_ds.engine.engine import ClapEngine
from clap_ds.model.clap import ClapModel
from clap_ds.ranks.distributed import Ranks
from clap_ds.record.lock import FolderLock
from clap_ds.training.start import TrainingStart
from clap_ds.weights.formats import save_safetensors
from tests.rank_pool import RankPool
from tests.training import reference_steps as reference
from tests.training import training_commands as commands

ALONE = Ranks(0, 1, 0, 1)


def _weights_before_and_after(towers: list[str], precision: str, sync: str) -> list[dict[str, Tensor]]:
    adam = {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.2, "torch_adam": True}}
    noise = {"text_dropout": 0.1, "drop_path": 0.1, "spec_augment": True}
    bf16 = {"enabled": precision == "bf16"}
    run = reference.settings(train={"freeze": towers}, optimizer=adam, bf16=bf16, model=noise)
    run.clap = run.clap.model_copy(update={"gradient_sync": sync})
    torch.manual_seed(3)
    # As training and, the other time, as bench builds it.
    build = session.build_model if sync == "overlapped" else TrainingStart(run, ALONE).build_model
    engine = ClapEngine(run, build(run, reference.CPU), reference.CPU)
    batches = iter(reference.micro_batches(run, dist.get_rank(), dist.get_world_size(), 4))
    before = copy.deepcopy(engine.model.state_dict())
    for _ in range(4):
        engine.step(batches, reference.TIMER)
    engine.check_loss()
    assert engine.model.training
    frozen = [p for tower in towers for p in engine.model.get_submodule(tower).parameters()]
    assert frozen
    assert all(p.grad is None and not p.requires_grad for p in frozen)
    return [before, copy.deepcopy(engine.model.state_dict())]


@pytest.mark.parametrize(
    ("tower", "precision", "sync"),
    [
        *(("audio", "bf16", "overlapped"), ("audio", "fp32", "deepspeed")),
        *(("text", "fp32", "overlapped"), ("text", "bf16", "deepspeed")),
    ],
)
def test_a_frozen_tower_stays_as_it_is(two_ranks: RankPool, tower: str, precision: str, sync: str) -> None:
    ranks = two_ranks.run(_weights_before_and_after, [tower], precision, sync)
    other = "text" if tower == "audio" else "audio"
    for before, after in ranks:
        changed = {name for name in before if not torch.equal(before[name], after[name])}
        frozen = {name for name in before if name.startswith((f"{tower}.", f"{tower}_projection."))}
        assert not changed & frozen - {"audio.batch_norm.num_batches_tracked"}
        assert {"logit_scale", f"{other}_projection.linear1.weight"} <= changed
    trained = [name for name in ranks[0][1] if "running_" not in name]
    assert all(torch.equal(ranks[0][1][name], ranks[1][1][name]) for name in trained)


@pytest.mark.end_to_end
def test_a_folder_that_another_run_writes_is_left_alone(tmp_path: Path) -> None:
    config = commands.write_training(tmp_path, clap={"train": {"samples": 16}})
    folder = load_run(config).checkpoint_folder
    other = FolderLock(folder)
    other.acquire()
    try:
        ranks = commands.RunningRanks(config, 2)
        assert ranks.wait() == [2, 2], ranks.outputs
        assert [path.name for path in folder.iterdir()] == ["writer.json"]
    finally:
        other.release()
    who = f"{folder} is held by host {os.uname().nodename}, pid {os.getpid()}, "
    assert f"error: {config}: clap.checkpoint.folder: {who}" in ranks.outputs[0]
    assert "Wait until that run is over, or name another folder" in ranks.outputs[0]
    assert commands.summaries(config)[-1]["state"] == "failed"
    commands.train(config)
    assert [path.name for path in folder.glob("step-*")] == ["step-00000002"]


def test_a_sync_target_that_cannot_be_written_is_found_before_the_model_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    run = reference.settings(checkpoint={"sync_to": str(tmp_path / "file" / "run")})
    monkeypatch.setattr(session, "build_model", lambda run, device: pytest.fail("a model was built"))
    with pytest.raises(ValueError, match=r"clap\.checkpoint\.sync_to: .*can't be written"):
        TrainingStart(run, ALONE).build_model(run, reference.CPU)


def test_initial_weights_are_taken_over(tmp_path: Path) -> None:
    torch.manual_seed(9)
    model, path = ClapModel(load_preset("micro")), tmp_path / "weights.safetensors"
    save_safetensors(model, path)
    run = reference.settings(train={"initial_weights": str(path)})
    taken = TrainingStart(run, ALONE).build_model(run, reference.CPU).state_dict()
    assert all(torch.equal(value, taken[name]) for name, value in model.state_dict().items())
    other = reference.settings(train={"initial_weights": str(path)}, model={"preset": "demo"})
    with pytest.raises(ValueError, match=r"clap\.train\.initial_weights: .* holds model micro, this run has demo"):
        TrainingStart(other, ALONE).build_model(other, reference.CPU)
    path.unlink()
    with pytest.raises(ValueError, match=r"clap\.train\.initial_weights: .*weights\.safetensors: no such file"):
        TrainingStart(run, ALONE).build_model(run, reference.CPU)
