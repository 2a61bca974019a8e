"""Damaged checkpoints are rejected with reasons, and a kill between operations leaves whole ones."""

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from clap_ds.checkpoint import checkpoint_files
from clap_ds.checkpoint.checkpoint_files import (
    STATE,
    WEIGHTS,
    DamagedError,
    Manifest,
    find_checkpoint,
    latest_valid,
)
from clap_ds.config.model import MOST
from clap_ds.config.schema import CheckpointSettings
from tests.weights.fake_checkpoints import CONTENTS, flip_bit, make_checkpoint


def test_written_checkpoint_is_found_and_read_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "notes").mkdir()
    assert latest_valid(tmp_path) is None
    assert latest_valid(tmp_path / "nowhere") is None
    path = make_checkpoint(tmp_path, 7, metrics={"zero_shot_top1": 0.5}, tokenizer="roberta-base")
    assert path == tmp_path / "step-00000007"
    assert find_checkpoint(path) == latest_valid(tmp_path) == path
    manifest = checkpoint_files.verify(path)
    assert (manifest.step, manifest.tokenizer) == (7, "roberta-base")
    assert manifest.metrics == {"zero_shot_top1": 0.5}
    for name, content in CONTENTS.items():
        assert (path / name).read_bytes() == content + b"7"
    assert capsys.readouterr().err == ""


def test_step_saved_again_is_newest_and_overwrites_nothing(tmp_path: Path) -> None:
    paths = [make_checkpoint(tmp_path, step) for step in (7, 3, 3)]
    assert [path.name for path in paths[1:]] == ["step-00000003", "step-00000003-2"]
    assert latest_valid(tmp_path) == paths[2]


def test_archive_keeps_lock(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    make_checkpoint(folder, 1)
    (folder / "lock").touch()
    archive = checkpoint_files.archive(folder, keep="lock")
    assert archive is not None
    assert [path.name for path in archive.iterdir()] == ["step-00000001"]
    assert [path.name for path in folder.iterdir()] == ["lock"]
    assert checkpoint_files.archive(folder, keep="lock") is None


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


@pytest.mark.parametrize(
    ("damage", "name", "reason"),
    [
        (partial(flip_bit, position=3500), WEIGHTS, r"weights\.safetensors has changed"),
        (cut, STATE, r"state\.safetensors has changed"),
        (Path.unlink, WEIGHTS, r"weights\.safetensors: No such file"),
        (cut, "manifest.json", "can't be read"),
        (Path.unlink, "manifest.json", "No such file"),
        (lambda path: path.write_text('{"hash": "", "format": 3}'), "manifest.json", "format is 3"),
    ],
)
def test_damaged_checkpoint_is_skipped_and_refused_with_reason(
    tmp_path: Path,
    damage: Callable[[Path], None],
    name: str,
    reason: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    good = make_checkpoint(tmp_path, 1)
    bad = make_checkpoint(tmp_path, 2)
    damage(bad / name)
    assert latest_valid(tmp_path) == good
    (warning,) = capsys.readouterr().err.splitlines()
    assert str(bad) in warning
    with pytest.raises(DamagedError, match=reason) as refusal:
        checkpoint_files.verify(bad)
    assert str(refusal.value) in warning


@pytest.mark.parametrize(
    ("metric", "best", "second_best"),
    [("top1", 3, 2), ("retrieval_loss", 4, 2)],
)
def test_best_valid_checkpoint_is_found(
    tmp_path: Path, metric: str, best: int, second_best: int
) -> None:
    make_checkpoint(tmp_path, 1, best_metric=metric)
    with pytest.raises(DamagedError, match="best_metric"):
        find_checkpoint(tmp_path, best=True)
    for step, score in ((2, 0.2), (3, 0.3), (4, 0.1)):
        make_checkpoint(tmp_path, step, metrics={metric: score}, best_metric=metric)
    path = find_checkpoint(tmp_path, best=True)
    assert path.name == f"step-0000000{best}"
    flip_bit(path / WEIGHTS, 99)
    assert find_checkpoint(tmp_path, best=True).name == f"step-0000000{second_best}"


def test_leftovers_of_kill_are_no_checkpoints_and_are_cleared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = make_checkpoint(tmp_path, 1)
    old = make_checkpoint(tmp_path, 2)
    with monkeypatch.context() as patch:
        # Killed after renaming.
        patch.setattr(checkpoint_files.shutil, "rmtree", lambda *_, **__: None)
        checkpoint_files.remove(old)
        with suppress(KeyboardInterrupt), checkpoint_files.atomic_dir(tmp_path, 3) as draft:
            (draft / WEIGHTS).write_bytes(b"half")
            raise KeyboardInterrupt
    assert latest_valid(tmp_path) == good
    checkpoint_files.clear_leftovers(tmp_path)
    assert [*tmp_path.iterdir()] == [good]


@pytest.mark.parametrize(
    ("scores", "keep_last", "keep_best", "deleted"),
    [
        ([0.9, 0.8, 0.1, 0.2, None], 1, 1, "123"),
        ([0.9, 0.8, 0.1, 0.2, None], 2, 2, "2"),
        # Of equals, the newest is kept.
        ([None, 0.5, 0.5, 0.1], 1, 1, "01"),
        ([None, None, None], 2, 3, "0"),
    ],
)
def test_all_but_last_and_best_are_deleted(
    scores: list[float | None], keep_last: int, keep_best: int, deleted: str
) -> None:
    manifests = {}
    for number, score in enumerate(scores):
        metrics = {} if score is None else {"m": score}
        manifests[str(number)] = Manifest(number, 100 - number, {}, {}, None, metrics, {})
    newest_first = dict(reversed(manifests.items()))
    settings = CheckpointSettings(keep_last=keep_last, keep_best=keep_best, best_metric="m")
    assert checkpoint_files.to_delete(newest_first, settings) == [*deleted]


@pytest.mark.parametrize("name", ["../weights.safetensors", "/etc/passwd", "tokenizer/../../x"])
def test_manifest_with_outside_file_is_refused(tmp_path: Path, name: str) -> None:
    manifest = Manifest.read(make_checkpoint(tmp_path, 1))
    manifest.files[name] = manifest.files[WEIGHTS]
    with pytest.raises(DamagedError, match="isn't a checkpoint file"):
        Manifest.from_json(manifest.to_json(), "source")


@pytest.mark.parametrize(
    "change",
    [{"serial": -1}, {"serial": 10**4299}, {"step": True}, {"step": 1.0}, {"serial": 2**53 + 1}],
)
def test_manifest_with_impossible_number_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    manifest = replace(Manifest.read(make_checkpoint(tmp_path, 1)), **change)
    with pytest.raises(DamagedError, match="can't be read"):
        Manifest.from_json(manifest.to_json(), tmp_path)


def test_later_step_is_newer_among_largest_serials(tmp_path: Path) -> None:
    manifest = Manifest.read(make_checkpoint(tmp_path, 1))
    names = {f"step-{step:08d}": replace(manifest, serial=MOST, step=step) for step in (1, 3, 2)}
    newest_first = checkpoint_files.newest_first(names, names.__getitem__, {})
    assert [*newest_first] == sorted(names, reverse=True)
