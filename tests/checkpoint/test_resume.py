"""Initial weights are loaded if their tokenizer matches; a folder has one writer."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from clap_ds.checkpoint.manager import Checkpointer
from clap_ds.checkpoint.restore import compare, restore, tokenizer_problem
from clap_ds.checkpoint.resume import load_pretrained
from clap_ds.checkpoint.train_state import ResumeOptions
from clap_ds.config.model import load_preset
from clap_ds.model.clap import ClapModel
from clap_ds.run_records.lock import FolderLock
from clap_ds.utils.errors import UserError
from clap_ds.weights.hub import train_tokenizer
from tests.training import reference_steps as reference
from tests.weights.fake_checkpoints import checkpoint_of, save_safetensors

MICRO = load_preset("micro")


def test_a_folder_that_another_run_writes_is_left_alone(tmp_path: Path) -> None:
    other = FolderLock(tmp_path)
    other.acquire()
    with pytest.raises(UserError, match="is locked by"), Checkpointer(tmp_path):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["writer.json"]
    other.release()
    with Checkpointer(tmp_path):
        assert (tmp_path / "writer.json").exists()
    assert not tmp_path.exists(), "nothing was saved"


def _taken(
    path: Path, tokenizer: str | None = None, preset: str = "micro", **options: Any
) -> ClapModel:
    model = ClapModel(load_preset(preset))
    load_pretrained(str(path), model, tokenizer, ResumeOptions(**options))
    return model


def test_pretrained_weights_are_taken_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(9)
    model = ClapModel(MICRO)
    path = tmp_path / "weights.safetensors"
    save_safetensors(model, path)
    taken = _taken(path).state_dict()
    assert all(torch.equal(value, taken[name]) for name, value in model.state_dict().items())
    assert f"initial weights: {path}\n" in capsys.readouterr().out
    with pytest.raises(
        ValueError, match=r"clap\.train\.pretrained: .* contains model micro, .* demo"
    ):
        _taken(path, preset="demo")


def test_weights_go_with_the_tokenizer_they_were_trained_with(tmp_path: Path) -> None:
    for name, words in (
        ("one", "a dog barks"),
        ("copy", "a dog barks"),
        ("other", "rain on a roof"),
    ):
        train_tokenizer([words] * 3, tmp_path / name, vocab_size=280)
    one, copied, other = (str(tmp_path / name) for name in ("one", "copy", "other"))
    assert tokenizer_problem(one, copied, MICRO.text) is None
    assert (
        tokenizer_problem(None, other, MICRO.text)
        is tokenizer_problem(one, None, MICRO.text)
        is None
    )
    assert "can't be compared" in str(tokenizer_problem("no/such-tokenizer", one, MICRO.text))
    gone = {"clap": {"train": {"shuffle_captions": True}}}
    checkpoint = checkpoint_of(
        ClapModel(MICRO), tmp_path / "saved", tokenizer=tmp_path / "one", settings=gone
    )

    def compared(tokenizer: str) -> tuple[list[str], list[str]]:
        return compare(checkpoint, MICRO, {}, reference.settings().resolved(), tokenizer)

    said = f"{other} gives captions other token ids than {checkpoint / 'tokenizer'}"
    to_accept, others = compared(one)
    assert (to_accept, [each for each in others if "shuffle_captions" in each]) == ([], [])
    (change,), _ = compared(other)
    assert change.startswith(f"the tokenizer: {said}")
    deepspeed = SimpleNamespace(optimizer=SimpleNamespace(param_groups=[]), lr_scheduler=None)
    engine: Any = SimpleNamespace(model=ClapModel(MICRO), loss=None, deepspeed=deepspeed)
    with pytest.raises(
        ValueError, match=r"can't be resumed: the tokenizer.* Set clap\.data\.tokenizer"
    ) as refusal:
        restore(checkpoint, engine, {}, other, resume_weights_only=False)
    assert "--resume_weights_only" not in str(refusal.value)
    assert (
        _taken(checkpoint, one).config
        == _taken(checkpoint, other, resume_weights_only=True).config
        == MICRO
    )
    with pytest.raises(
        ValueError, match=rf"clap\.train\.pretrained: {said}.* Set clap\.data\.tokenizer to"
    ) as refusal:
        _taken(checkpoint, other)
    assert "--resume_weights_only" not in str(refusal.value)


def test_the_default_folder_of_a_run_keeps_its_name() -> None:
    """If the name differed between versions, `resume: auto` would find no checkpoint and start from
    scratch."""
    freeze = {"train": {"max_samples": 8, "freeze": ["text"]}}
    for changes, digest in (({}, "ffb28286"), (freeze, "7fc3ca81")):
        folder = reference.settings(**changes).checkpoint_folder
        assert folder.name.endswith(f"-{digest}-checkpoints")
