"""What is damaged is refused with its reason, and a process stopped between any two operations leaves whole checkpoints."""

import contextlib
import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clap_ds.config.sections import CheckpointSettings
from clap_ds.weights import checkpoint_files
from clap_ds.weights.checkpoint_files import DamagedError, Manifest
from tests.weights.fake_checkpoints import CONTENTS, flip_bit, make_checkpoint


def test_what_is_written_is_found_and_read_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "notes").mkdir()
    assert checkpoint_files.newest_good(tmp_path) is checkpoint_files.newest_good(tmp_path / "nowhere") is None
    with pytest.raises(DamagedError, match="no good checkpoint here"):
        checkpoint_files.find_checkpoint(tmp_path)
    path = make_checkpoint(tmp_path, 7, metrics={"zero_shot_top1": 0.5}, tokenizer="roberta-base")
    assert checkpoint_files.newest_good(tmp_path) == path == tmp_path / "step-00000007"
    manifest = checkpoint_files.verify(path)
    assert (manifest.step, manifest.metrics, manifest.tokenizer) == (7, {"zero_shot_top1": 0.5}, "roberta-base")
    contents = {name: content + b"7" for name, content in CONTENTS.items()}
    assert {name: (path / name).read_bytes() for name in manifest.files} == contents
    # A step saved anew is the newest and overwrites nothing.
    again = [make_checkpoint(tmp_path, 3), make_checkpoint(tmp_path, 3)]
    assert [path.name for path in again] == ["step-00000003", "step-00000003-2"]
    assert checkpoint_files.newest_good(tmp_path) == again[1]
    assert path.exists()
    assert capsys.readouterr().err == ""


OLD_MANIFEST = """{"format": 1, "serial": 1760000000000, "step": 1, "model": {"name": "micro"},
"engine": {"loss": "SoftmaxLoss"}, "tokenizer": null, "metrics": {},
"files": {"a": {"bytes": 7, "hash": "c681ff421fbd7af6dc373a7ced20fbeb"}}, "hash": "dc88ea81b682394eb7eafe6d94477ed3"}"""


def test_a_checkpoint_saved_by_an_earlier_version_is_read(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"content")
    (tmp_path / "manifest.json").write_text(OLD_MANIFEST)
    manifest = checkpoint_files.verify(tmp_path)
    assert (manifest.serial, manifest.step, manifest.model) == (1760000000000, 1, {"name": "micro"})
    content = {**json.loads(OLD_MANIFEST), "kernels": {"device": "NVIDIA H200", "sites": {}}}  # as some versions wrote
    del content["hash"]
    (tmp_path / "manifest.json").write_text(json.dumps({**content, "hash": checkpoint_files._hash(content)}))
    assert checkpoint_files.verify(tmp_path) == manifest


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


@pytest.mark.parametrize(
    ("damage", "name", "reason"),
    [
        (
            lambda path: flip_bit(path, 3500),
            "weights.safetensors",
            "weights.safetensors has changed since it was written",
        ),
        (_cut, "state.safetensors", "has 18,000 bytes, 18,001 were written"),
        (Path.unlink, "weights.safetensors", "weights.safetensors: No such file"),
        (_cut, "manifest.json", "manifest.json can't be read"),
        (Path.unlink, "manifest.json", "manifest.json: No such file"),
        (lambda path: path.write_text('{"hash": "", "format": 3}'), "manifest.json", "of format 3, this version reads"),
    ],
)
def test_a_damaged_one_is_passed_over_and_refused_with_the_reason(
    tmp_path: Path, damage: Callable[[Path], None], name: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad = make_checkpoint(tmp_path, 1), make_checkpoint(tmp_path, 2)
    damage(bad / name)
    assert checkpoint_files.newest_good(tmp_path) == good
    (warning,) = capsys.readouterr().err.splitlines()
    assert str(bad) in warning
    assert reason in warning
    with pytest.raises(DamagedError, match=reason.replace(".", r"\.")):
        checkpoint_files.verify(bad)


def test_no_bit_of_a_manifest_can_change_unnoticed(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, 1, metrics={"zero_shot_top1": 0.25})
    before = Manifest.read(path)
    for position in range(0, (path / "manifest.json").stat().st_size, 7):
        flip_bit(path / "manifest.json", position)
        with contextlib.suppress(DamagedError):
            assert Manifest.read(path) == before  # a space that became another kind of space at most
        flip_bit(path / "manifest.json", position)


def test_a_file_that_changes_between_writing_and_reading_back_is_never_published(tmp_path: Path) -> None:
    draft = checkpoint_files.begin(tmp_path, 1)
    record = checkpoint_files.write_file(draft / "progress.json", b"as it was meant")
    flip_bit(draft / "progress.json", 3)
    with pytest.raises(DamagedError, match="progress.json has changed"):
        checkpoint_files.publish(draft, Manifest(1, 1, {}, {}, None, {}, {"progress.json": record}))
    assert not checkpoint_files.read_all(tmp_path)


def test_weights_of_a_step_are_found_though_other_files_are_damaged_and_all_can_be_moved_aside(tmp_path: Path) -> None:
    first, again, other = (make_checkpoint(tmp_path, step) for step in (1, 1, 2))
    (again / "state.safetensors").unlink()
    assert [checkpoint_files.seems_whole(path) for path in (first, again, tmp_path)] == [True, False, False]
    assert checkpoint_files.find_weights(tmp_path, 1) == again
    flip_bit(again / "weights.safetensors", 3)
    assert checkpoint_files.find_weights(tmp_path, 1) == first
    (other / "weights.safetensors").unlink()
    with pytest.raises(
        DamagedError, match=r"no checkpoint of step 2 whose weights\.safetensors is whole; of steps 1 they"
    ):
        checkpoint_files.find_weights(tmp_path, 2)
    (tmp_path / "writer.json").touch()
    aside = checkpoint_files.move_aside(tmp_path, but="writer.json")
    assert aside is not None
    assert {path.name for path in aside.iterdir()} == {path.name for path in (first, again, other)}
    assert [path.name for path in tmp_path.iterdir()] == ["writer.json"]
    assert checkpoint_files.move_aside(tmp_path, but="writer.json") is None


class Killed(BaseException):
    """Stands for the end of the process: nothing is cleaned up after it."""


def _save_and_rotate(folder: Path, step: int) -> None:
    checkpoint_files.clear_leftovers(folder)
    make_checkpoint(folder, step)
    rule = CheckpointSettings(keep_last=2, keep_best=0)
    for name in checkpoint_files.superfluous(checkpoint_files.read_all(folder), rule):
        checkpoint_files.remove(folder / name)


def test_killed_before_any_operation_on_the_disk_the_last_good_one_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    left = 0

    def counted(operation: Callable[..., None], *args: object, **kwargs: object) -> None:
        nonlocal left
        if left == 0:
            raise Killed
        left -= 1
        operation(*args, **kwargs)

    num_killed, finished = 0, False
    while not finished:
        folder = tmp_path / str(num_killed)
        for step in (1, 2):
            make_checkpoint(folder, step)
        left = num_killed
        with monkeypatch.context() as patch, contextlib.suppress(Killed):
            for name in ("fsync", "mkdir", "rename", "unlink", "rmdir"):
                patch.setattr(os, name, partial(counted, getattr(os, name)))
            _save_and_rotate(folder, 3)
            finished = True
        newest = checkpoint_files.newest_good(folder)
        assert newest is not None
        assert Manifest.read(newest).step in ((3,) if finished else (2, 3))
        _save_and_rotate(folder, 4)
        assert sorted(path.name for path in folder.iterdir())[-1] == "step-00000004"
        assert not list(folder.glob(".*"))
        num_killed += 1
    assert num_killed > 10
    assert capsys.readouterr().err == ""  # none had to be passed over


@settings(deadline=None)
@given(st.lists(st.none() | st.floats(0, 1), min_size=1, max_size=8), st.integers(1, 4), st.integers(0, 3))
def test_the_last_and_the_best_stay(scores: list[float | None], keep_last: int, keep_best: int) -> None:
    found = {f"step-{serial:08d}": score for serial, score in enumerate(scores)}
    manifests = {
        name: Manifest(serial, 100 - serial, {}, {}, None, {} if score is None else {"m": score}, {})
        for serial, (name, score) in reversed(list(enumerate(found.items())))
    }
    rule = CheckpointSettings(keep_last=keep_last, keep_best=keep_best, best_by="m")
    doomed = checkpoint_files.superfluous(manifests, rule)
    kept = set(found) - set(doomed)
    assert doomed == sorted(doomed)
    assert set(list(found)[-keep_last:]) <= kept
    assert len(kept) <= keep_last + keep_best
    lost = [score for name in doomed if (score := found[name]) is not None]
    if keep_best and lost:
        stay = [score for name in kept if (score := found[name]) is not None]
        assert sum(score >= max(lost) for score in stay) >= keep_best
