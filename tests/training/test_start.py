"""What training starts from: frozen towers stay as they are, other weights are taken over, a folder has one writer."""

import copy
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from clap_ds.config.model import load_preset
from clap_ds.config.settings import RunSettings, load_run
from clap_ds.engine.building import build_model
from clap_ds.engine.engine import ClapEngine
from clap_ds.model.clap import ClapModel
from clap_ds.model.tokenizer import train_tokenizer
from clap_ds.record.lock import FolderLock
from clap_ds.training.restoring import compare, tokenizer_problem
from clap_ds.training.start import take_initial_weights
from clap_ds.weights.formats import save_safetensors
from tests.rank_pool import RankPool
from tests.training import reference_steps as reference
from tests.training import training_commands as commands
from tests.weights.fake_checkpoints import checkpoint_of

MICRO = load_preset("micro")


def _weights_before_and_after(tower: str, precision: str, sync: str) -> list[dict[str, Tensor]]:
    adam = {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.2, "torch_adam": True}}
    noise = {"text_dropout": 0.1, "drop_path": 0.1, "spec_augment": True}
    bf16 = {"enabled": precision == "bf16"}
    run = reference.settings(train={"freeze": [tower]}, optimizer=adam, bf16=bf16, model=noise)
    run.clap = run.clap.model_copy(update={"gradient_sync": sync})
    torch.manual_seed(3)
    engine = ClapEngine(run, build_model(run, reference.CPU), reference.CPU)
    batches = iter(reference.micro_batches(run, dist.get_rank(), dist.get_world_size(), 4))
    before = copy.deepcopy(engine.model.state_dict())
    for _ in range(4):
        engine.step(batches, reference.TIMER)
    engine.check_loss()
    assert engine.model.training
    assert all(p.grad is None and not p.requires_grad for p in engine.model.get_submodule(tower).parameters())
    return [before, copy.deepcopy(engine.model.state_dict())]


@pytest.mark.parametrize(
    ("tower", "precision", "sync"), [("audio", "bf16", "overlapped"), ("text", "fp32", "deepspeed")]
)
def test_a_frozen_tower_stays_as_it_is(two_ranks: RankPool, tower: str, precision: str, sync: str) -> None:
    ranks = two_ranks.run(_weights_before_and_after, tower, precision, sync)
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


def _taken(run: RunSettings, **options: Any) -> ClapModel:
    model = ClapModel(run.clap.preset())
    take_initial_weights(run, model, **options)
    return model


def test_initial_weights_are_taken_over(tmp_path: Path) -> None:
    torch.manual_seed(9)
    model, path = ClapModel(MICRO), tmp_path / "weights.safetensors"
    save_safetensors(model, path)
    run = reference.settings(train={"initial_weights": str(path)})
    taken = _taken(run).state_dict()
    assert all(torch.equal(value, taken[name]) for name, value in model.state_dict().items())
    other = reference.settings(train={"initial_weights": str(path)}, model={"preset": "demo"})
    with pytest.raises(ValueError, match=r"clap\.train\.initial_weights: .* holds model micro, this run has demo"):
        _taken(other)


def test_weights_go_with_the_tokenizer_they_were_trained_with(tmp_path: Path) -> None:
    for name, words in (("one", "a dog barks"), ("copy", "a dog barks"), ("other", "rain on a roof")):
        train_tokenizer([words] * 3, tmp_path / name, vocab_size=280)
    one, copied, other = (str(tmp_path / name) for name in ("one", "copy", "other"))
    assert tokenizer_problem(one, copied, vocab_size=512) is None
    assert tokenizer_problem(None, other, vocab_size=512) is tokenizer_problem(one, None, vocab_size=512) is None
    unknown = str(tokenizer_problem("no/such-tokenizer", one, vocab_size=512))
    assert "no/such-tokenizer there" in unknown
    assert "can't be compared: " in unknown
    checkpoint = checkpoint_of(ClapModel(MICRO), tmp_path / "saved", tokenizer=tmp_path / "one")

    def run(tokenizer: str) -> RunSettings:
        data = {"source": "shards", "shards": "a.tar", "tokenizer": tokenizer}
        return reference.settings(data=data, train={"initial_weights": str(checkpoint)})

    said = f"{other} gives captions other token ids than {checkpoint / 'tokenizer'}"
    assert compare(checkpoint, MICRO, {}, run(one)) == ([], [])
    (change,), _ = compare(checkpoint, MICRO, {}, run(other))
    assert change.startswith(f"the tokenizer: {said}")
    assert _taken(run(one)).config == _taken(run(other), accept_changes=True).config == MICRO
    with pytest.raises(ValueError, match=rf"clap\.train\.initial_weights: {said}.* by --accept_changes"):
        _taken(run(other))
    higher = MICRO.model_copy(update={"audio": MICRO.audio.model_copy(update={"fmax": 9000})})
    (change,), _ = compare(checkpoint, higher, {}, None)
    assert "audio.fmax is " in change
