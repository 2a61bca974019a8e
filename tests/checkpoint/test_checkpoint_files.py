"""Damaged checkpoints are rejected with reasons, and a kill between operations leaves whole ones."""

import re
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from clap_ds.checkpoint import checkpoint_files
from clap_ds.checkpoint.checkpoint_files import (
    WEIGHTS,
    CheckpointFolder,
    DamagedError,
    Manifest,
    find_checkpoint,
    latest_valid,
)
from tests.weights.fake_checkpoints import flip_bit, make_checkpoint


def test_step_saved_again_is_newest_and_overwrites_nothing(tmp_path):
    paths = [make_checkpoint(tmp_path, step) for step in (7, 3, 3)]
    assert [path.name for path in paths[1:]] == ["step-00000003", "step-00000003-2"]
    assert latest_valid(tmp_path) == CheckpointFolder.read(paths[2])


@pytest.mark.parametrize(
    ("damage", "name", "reason"),
    [
        (partial(flip_bit, position=3500), WEIGHTS, r"weights\.safetensors has changed"),
        (Path.unlink, WEIGHTS, r"weights\.safetensors: No such file"),
        (partial(flip_bit, position=9), "manifest.json", "can't be read"),
        (Path.unlink, "manifest.json", "No such file"),
        (lambda path: path.write_text('{"hash": "", "format": 3}'), "manifest.json", "format is 3"),
    ],
)
def test_damaged_checkpoint_is_skipped_and_refused_with_reason(
    tmp_path, damage, name, reason, capsys
):
    good = make_checkpoint(tmp_path, 1)
    bad = make_checkpoint(tmp_path, 2)
    damage(bad / name)
    assert latest_valid(tmp_path) == CheckpointFolder.read(good)
    (warning,) = capsys.readouterr().err.splitlines()
    assert str(bad) in warning
    assert re.search(reason, warning)


def test_best_valid_checkpoint_is_found(tmp_path):
    # Of losses, the smallest is the best.
    metric = "retrieval_loss"
    make_checkpoint(tmp_path, 1, best_metric=metric)
    with pytest.raises(DamagedError, match="best_metric"):
        find_checkpoint(tmp_path, best=True)
    for step, score in ((2, 0.2), (3, 0.3), (4, 0.1)):
        make_checkpoint(tmp_path, step, metrics={metric: score}, best_metric=metric)
    path, _ = find_checkpoint(tmp_path, best=True)
    assert path.name == "step-00000004"
    flip_bit(path / WEIGHTS, 99)
    assert find_checkpoint(tmp_path, best=True).manifest.step == 2


def test_leftovers_of_kill_are_no_checkpoints_and_are_cleared(tmp_path, monkeypatch):
    good = make_checkpoint(tmp_path, 1)
    old = make_checkpoint(tmp_path, 2)
    with monkeypatch.context() as patch:
        # Killed after renaming.
        patch.setattr(checkpoint_files.shutil, "rmtree", lambda *_, **__: None)
        checkpoint_files.remove(old)
        with suppress(KeyboardInterrupt), checkpoint_files.atomic_dir(tmp_path, 3) as draft:
            (draft / WEIGHTS).write_bytes(b"half")
            raise KeyboardInterrupt
    assert latest_valid(tmp_path) == CheckpointFolder.read(good)
    checkpoint_files.clear_leftovers(tmp_path)
    assert [*tmp_path.iterdir()] == [good]


@pytest.mark.parametrize("name", ["../weights.safetensors", "tokenizer/../../x"])
def test_manifest_with_outside_file_is_refused(tmp_path, name):
    manifest = Manifest.read(make_checkpoint(tmp_path, 1))
    manifest.files[name] = manifest.files[WEIGHTS]
    with pytest.raises(DamagedError, match="isn't a checkpoint file"):
        Manifest.from_json(manifest.to_json(), "source")


@pytest.mark.parametrize(
    "change",
    [{"serial": -1}, {"step": True}, {"serial": 2**53 + 1}],
)
def test_manifest_with_impossible_number_is_refused(tmp_path, change):
    manifest = replace(Manifest.read(make_checkpoint(tmp_path, 1)), **change)
    with pytest.raises(DamagedError, match="can't be read"):
        Manifest.from_json(manifest.to_json(), tmp_path)
