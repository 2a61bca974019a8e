"""Test that damaged checkpoints are rejected with reasons, and that a kill between operations
leaves whole ones."""

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from clap_ds.checkpoint import checkpoint_files
from clap_ds.checkpoint.checkpoint_files import DamagedError, Manifest
from clap_ds.config.model import MOST
from clap_ds.config.schema import CheckpointSettings
from tests.weights.fake_checkpoints import CONTENTS, flip_bit, make_checkpoint


def test_what_is_written_is_found_and_read_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "notes").mkdir()
    assert (
        checkpoint_files.latest_valid(tmp_path)
        is checkpoint_files.latest_valid(tmp_path / "nowhere")
        is None
    )
    path = make_checkpoint(tmp_path, 7, metrics={"zero_shot_top1": 0.5}, tokenizer="roberta-base")
    assert (
        checkpoint_files.find_checkpoint(path)
        == checkpoint_files.latest_valid(tmp_path)
        == tmp_path / "step-00000007"
    )
    manifest = checkpoint_files.verify(path)
    assert (manifest.step, manifest.metrics, manifest.tokenizer) == (
        7,
        {"zero_shot_top1": 0.5},
        "roberta-base",
    )
    contents = {name: content + b"7" for name, content in CONTENTS.items()}
    assert {name: (path / name).read_bytes() for name in manifest.files} == contents
    # A step that is saved again is the newest and overwrites nothing.
    again = [make_checkpoint(tmp_path, 3), make_checkpoint(tmp_path, 3)]
    assert [path.name for path in again] == ["step-00000003", "step-00000003-2"]
    assert checkpoint_files.latest_valid(tmp_path) == again[1]
    assert capsys.readouterr().err == ""
    aside = checkpoint_files.archive(tmp_path, keep="notes")
    assert aside is not None
    assert {path.name for path in aside.iterdir()} == {path.name, *(path.name for path in again)}
    assert [path.name for path in tmp_path.iterdir()] == ["notes"]
    assert checkpoint_files.archive(tmp_path, keep="notes") is None


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


@pytest.mark.parametrize(
    ("damage", "name", "reason"),
    [
        (
            partial(flip_bit, position=3500),
            "weights.safetensors",
            r"weights\.safetensors has changed",
        ),
        (_cut, "state.safetensors", r"state\.safetensors has changed"),
        (Path.unlink, "weights.safetensors", r"weights\.safetensors: No such file"),
        (_cut, "manifest.json", "can't be read"),
        (Path.unlink, "manifest.json", "No such file"),
        (lambda path: path.write_text('{"hash": "", "format": 3}'), "manifest.json", "format is 3"),
    ],
)
def test_a_damaged_one_is_passed_over_and_refused_with_the_reason(
    tmp_path: Path,
    damage: Callable[[Path], None],
    name: str,
    reason: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    good = make_checkpoint(tmp_path, 1)
    bad = make_checkpoint(tmp_path, 2)
    damage(bad / name)
    assert checkpoint_files.latest_valid(tmp_path) == good
    (warning,) = capsys.readouterr().err.splitlines()
    assert str(bad) in warning
    with pytest.raises(DamagedError, match=reason) as refusal:
        checkpoint_files.verify(bad)
    assert str(refusal.value) in warning


def test_the_best_good_one_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def best(folder: str) -> str:
        return checkpoint_files.find_checkpoint(tmp_path / folder, best=True).name

    make_checkpoint(tmp_path / "top1", 1, best_metric="m")
    with pytest.raises(DamagedError, match="best_metric"):
        best("top1")
    for step, score in ((2, 0.2), (3, 0.3), (4, 0.1)):
        make_checkpoint(tmp_path / "top1", step, metrics={"m": score}, best_metric="m")
        make_checkpoint(
            tmp_path / "loss", step, metrics={"retrieval_loss": score}, best_metric="retrieval_loss"
        )
    assert (best("top1"), best("loss")) == ("step-00000003", "step-00000004")
    flip_bit(tmp_path / "top1" / "step-00000003" / "weights.safetensors", 99)
    assert best("top1") == "step-00000002"
    assert "skipped" in capsys.readouterr().err


def test_what_a_kill_leaves_is_no_checkpoint_and_is_cleared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = make_checkpoint(tmp_path, 1)
    doomed = make_checkpoint(tmp_path, 2)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_files.shutil, "rmtree", lambda *_, **__: None)
        checkpoint_files.remove(doomed)  # killed after renaming
        with suppress(KeyboardInterrupt), checkpoint_files.atomic_dir(tmp_path, 3) as draft:
            (draft / "weights.safetensors").write_bytes(b"half")
            raise KeyboardInterrupt
    assert checkpoint_files.latest_valid(tmp_path) == good
    checkpoint_files.clear_leftovers(tmp_path)
    assert [*tmp_path.iterdir()] == [good]


@pytest.mark.parametrize(
    ("scores", "keep_last", "keep_best", "kept"),
    [
        ([0.9, 0.8, 0.1, 0.2, None], 1, 1, "04"),
        ([0.9, 0.8, 0.1, 0.2, None], 2, 2, "0134"),
        ([None, 0.5, 0.5, 0.1], 1, 1, "23"),  # of equals, the newest
        ([None, None, None], 2, 3, "12"),
    ],
)
def test_the_last_and_the_best_stay(
    scores: list[float | None], keep_last: int, keep_best: int, kept: str
) -> None:
    told = [{} if score is None else {"m": score} for score in scores]
    made = [Manifest(at, 100 - at, {}, {}, None, each, {}) for at, each in enumerate(told)]
    manifests = {str(each.serial): each for each in reversed(made)}
    doomed = checkpoint_files.to_delete(
        manifests, CheckpointSettings(keep_last=keep_last, keep_best=keep_best, best_metric="m")
    )
    assert doomed == [name for name in "01234"[: len(scores)] if name not in kept]


@pytest.mark.parametrize("name", ["../weights.safetensors", "/etc/passwd", "tokenizer/../../x"])
def test_a_manifest_names_a_checkpoints_own_files_alone(tmp_path: Path, name: str) -> None:
    manifest = Manifest.read(make_checkpoint(tmp_path, 1))
    manifest.files[name] = manifest.files["weights.safetensors"]
    with pytest.raises(DamagedError, match="isn't a checkpoint file"):
        Manifest.from_json(manifest.to_json(), "there")


@pytest.mark.parametrize(
    "change",
    [{"serial": -1}, {"serial": 10**4299}, {"step": True}, {"step": 1.0}, {"serial": 2**53 + 1}],
)
def test_a_manifest_with_an_impossible_number_is_refused(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    manifest = replace(Manifest.read(make_checkpoint(tmp_path, 1)), **change)
    with pytest.raises(DamagedError, match="can't be read"):
        Manifest.from_json(manifest.to_json(), tmp_path)


def test_of_checkpoints_with_the_largest_serial_the_later_step_is_newer(tmp_path: Path) -> None:
    first = Manifest.read(make_checkpoint(tmp_path, 1))
    manifests = {f"step-{step:08d}": replace(first, serial=MOST, step=step) for step in (1, 3, 2)}
    newest_first = checkpoint_files.newest_first(manifests, manifests.__getitem__, {})
    assert [*newest_first] == sorted(manifests, reverse=True)
