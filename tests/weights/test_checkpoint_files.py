"""What is damaged is refused with its reason, and a process stopped between any two operations leaves whole checkpoints."""

import contextlib
import json
import os
from collections.abc import Callable
from contextlib import suppress
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
    assert (
        checkpoint_files.find_checkpoint(path) == checkpoint_files.newest_good(tmp_path) == tmp_path / "step-00000007"
    )
    manifest = checkpoint_files.verify(path)
    assert (manifest.step, manifest.metrics, manifest.tokenizer) == (7, {"zero_shot_top1": 0.5}, "roberta-base")
    contents = {name: content + b"7" for name, content in CONTENTS.items()}
    assert {name: (path / name).read_bytes() for name in manifest.files} == contents
    # A step saved anew is the newest and overwrites nothing.
    again = [make_checkpoint(tmp_path, 3), make_checkpoint(tmp_path, 3)]
    assert [path.name for path in again] == ["step-00000003", "step-00000003-2"]
    assert checkpoint_files.newest_good(tmp_path) == again[1]
    assert capsys.readouterr().err == ""
    aside = checkpoint_files.move_aside(tmp_path, but="notes")
    assert aside is not None
    assert {path.name for path in aside.iterdir()} == {path.name, *(path.name for path in again)}
    assert [path.name for path in tmp_path.iterdir()] == ["notes"]
    assert checkpoint_files.move_aside(tmp_path, but="notes") is None


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


@pytest.mark.parametrize(
    ("damage", "name", "reason"),
    [
        (
            partial(flip_bit, position=3500),
            "weights.safetensors",
            r"weights\.safetensors has changed since it was written",
        ),
        (_cut, "state.safetensors", "has 18,000 bytes, 18,001 were written"),
        (Path.unlink, "weights.safetensors", r"weights\.safetensors: No such file"),
        (_cut, "manifest.json", r"manifest\.json can't be read"),
        (Path.unlink, "manifest.json", r"manifest\.json: No such file"),
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
    with pytest.raises(DamagedError, match=reason) as refusal:
        checkpoint_files.verify(bad)
    assert str(refusal.value) in warning


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
    with pytest.raises(DamagedError, match=r"progress\.json has changed"):
        checkpoint_files.publish(draft, Manifest(1, 1, {}, {}, None, {}, {"progress.json": record}))
    assert not checkpoint_files.read_all(tmp_path)


def test_the_best_good_one_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def best(folder: str) -> str:
        return checkpoint_files.find_checkpoint(tmp_path / folder, best=True).name

    make_checkpoint(tmp_path / "top1", 1, best_by="m")
    for folder in ("nowhere", "top1"):
        with pytest.raises(DamagedError, match="no good checkpoint here that was evaluated by its run's best_by"):
            best(folder)
    for step, score in ((2, 0.2), (3, 0.3), (4, 0.1)):
        make_checkpoint(tmp_path / "top1", step, metrics={"m": score}, best_by="m")
        make_checkpoint(tmp_path / "loss", step, metrics={"retrieval_loss": score}, best_by="retrieval_loss")
    assert (best("top1"), best("loss")) == ("step-00000003", "step-00000004")
    flip_bit(tmp_path / "top1" / "step-00000003" / "weights.safetensors", 99)
    assert best("top1") == "step-00000002"
    assert "passed over" in capsys.readouterr().err


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


HIGH, LOW = (1.0,), (0.4,)


@pytest.mark.parametrize(
    ("found", "resumed_from", "kept"),
    [
        ([HIGH, LOW, HIGH, HIGH, HIGH], None, "14"),  # the lowest loss, whatever was resumed from since
        ([(), HIGH, HIGH, HIGH, HIGH], 0, "04"),  # of an earlier version
        ([HIGH, (0.5,), LOW, (1.0, 0.1), HIGH], 1, "1234"),  # evaluated, but no better
        ([HIGH, LOW, HIGH, (0.3, 0.1), HIGH], 1, "34"),
        ([HIGH, (0.4, 0.2), HIGH, (1.0, 0.1), HIGH], 1, "14"),
        ([HIGH, (0.4, 0.1), HIGH, (1.0, 0.2), HIGH], 1, "34"),
    ],
)
def test_what_was_resumed_from_and_the_lowest_loss_stay_until_one_evaluated_is_better(
    found: list[tuple[float, ...]], resumed_from: int | None, kept: str
) -> None:
    metrics = [dict(zip(("train_loss", "m"), each, strict=False)) for each in found]
    made = [Manifest(at, at, {}, {}, None, each, {}, resumed_from=resumed_from) for at, each in enumerate(metrics)]
    manifests = {str(each.serial): each for each in reversed(made)}
    rule = CheckpointSettings(keep_last=1, keep_best=1, best_by="m")
    assert {*manifests} - {*checkpoint_files.superfluous(manifests, rule)} == {*kept}


@pytest.mark.parametrize(
    "name",
    [*("../weights.safetensors", "/etc/passwd", "file:///etc/passwd", "tokenizer/../../x", "tokenizer/.ssh", "..", ""),
     *("Weights.safetensors", "tokenizer/a/b", "s3://bucket/x", "weights.safetensors\n")],
)  # fmt: skip
def test_a_manifest_names_a_checkpoints_own_files_alone(tmp_path: Path, name: str) -> None:
    path = make_checkpoint(tmp_path, 1)
    manifest = Manifest.read(path)
    manifest.files[name] = manifest.files["weights.safetensors"]
    with pytest.raises(DamagedError, match="no file of a checkpoint"):
        Manifest.from_json(manifest.to_json(), "there")


def test_other_types_links_and_names_that_differ_by_case_are_refused(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, 1)
    content = json.loads((path / "manifest.json").read_text())
    record = content["files"]["weights.safetensors"]
    for changes in ({"serial": "x"}, {"metrics": []}, {"files": {"tokenizer/a": record, "tokenizer/A": record}}):
        changed = {name: each for name, each in (content | changes).items() if name != "hash"}
        with pytest.raises(DamagedError, match=r"other fields than one|no file of a checkpoint"):
            Manifest.from_json(json.dumps({**changed, "hash": checkpoint_files._hash(changed)}), "there")
    secret = tmp_path / "secret"
    (path / "weights.safetensors").rename(secret)
    (path / "weights.safetensors").symlink_to(secret)
    with pytest.raises(DamagedError, match=r"weights\.safetensors is a link to elsewhere"):
        checkpoint_files.verify(path)


@given(st.recursive(st.none() | st.integers() | st.text(max_size=5), lambda each: st.lists(each) | st.dictionaries(
    st.sampled_from(["files", "format", "serial", "step", "weights.safetensors", "bytes", "hash"]), each)))  # fmt: skip
def test_whatever_a_manifest_holds_it_is_read_or_refused(content: object) -> None:
    told = {"format": 2, **content} if isinstance(content, dict) else content
    told = {**told, "hash": checkpoint_files._hash(told)} if isinstance(told, dict) else told
    with suppress(DamagedError):
        Manifest.from_json(json.dumps(told), "there")
