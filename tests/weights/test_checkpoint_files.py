"""What is damaged is refused with its reason, and a process stopped between any two operations leaves whole checkpoints."""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clap_ds.config.sections import CheckpointSettings
from clap_ds.weights import checkpoint_files
from clap_ds.weights.checkpoint_files import DamagedError, Manifest
from tests.weights.fake_checkpoints import CONTENTS, flip_bit, make_checkpoint


def test_what_is_written_is_found_and_read_back(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, 7, metrics={"zero_shot_top1": 0.5}, tokenizer="roberta-base")
    assert checkpoint_files.newest_good(tmp_path, pytest.fail) == path == tmp_path / "step-00000007"
    manifest = checkpoint_files.verify(path)
    assert (manifest.step, manifest.metrics, manifest.tokenizer) == (7, {"zero_shot_top1": 0.5}, "roberta-base")
    assert {name: (path / name).read_bytes() for name in manifest.files} == {
        name: content + b"7" for name, content in CONTENTS.items()
    }


def test_nothing_there_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    assert checkpoint_files.newest_good(tmp_path, pytest.fail) is None
    assert checkpoint_files.newest_good(tmp_path / "nowhere", pytest.fail) is None
    with pytest.raises(DamagedError, match="no good checkpoint here"):
        checkpoint_files.find_checkpoint(tmp_path, pytest.fail)


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def _flip(path: Path) -> None:
    flip_bit(path, path.stat().st_size // 2)


def _of_another_format(path: Path) -> None:
    path.write_text(path.read_text().replace('"format": 1', '"format": 2'))


@pytest.mark.parametrize(
    ("damage", "name", "reason"),
    [
        (_flip, "weights.safetensors", "weights.safetensors has changed since it was written"),
        (_flip, "deepspeed/mp_rank_00_model_states.pt", "model_states.pt has changed"),
        (_cut, "deepspeed/mp_rank_00_model_states.pt", "has 18,000 bytes, 18,001 were written"),
        (Path.unlink, "weights.safetensors", "weights.safetensors: No such file"),
        (_flip, "manifest.json", "manifest.json"),
        (_cut, "manifest.json", "manifest.json can't be read"),
        (Path.unlink, "manifest.json", "manifest.json: No such file"),
        (_of_another_format, "manifest.json", "a checkpoint of format 2, this version reads 1"),
    ],
)
def test_a_damaged_one_is_passed_over_and_refused_with_the_reason(
    tmp_path: Path, damage: Callable[[Path], None], name: str, reason: str
) -> None:
    good, bad = make_checkpoint(tmp_path, 1), make_checkpoint(tmp_path, 2)
    damage(bad / name)
    warnings: list[str] = []
    assert checkpoint_files.newest_good(tmp_path, warnings.append) == good
    (warning,) = warnings
    assert str(bad) in warning
    assert reason in warning
    with pytest.raises(DamagedError, match=reason.replace(".", r"\.")):
        checkpoint_files.verify(bad)


@pytest.mark.parametrize("position", range(0, 900, 61))
def test_no_bit_of_a_manifest_can_change_unnoticed(tmp_path: Path, position: int) -> None:
    path = make_checkpoint(tmp_path, 1, metrics={"zero_shot_top1": 0.25})
    before = Manifest.read(path)
    size = (path / "manifest.json").stat().st_size
    flip_bit(path / "manifest.json", position % size)
    with contextlib.suppress(DamagedError):
        assert Manifest.read(path) == before  # a space that became another kind of space at most


def test_a_file_that_changes_between_writing_and_reading_back_is_never_published(tmp_path: Path) -> None:
    draft = checkpoint_files.begin(tmp_path, 1)
    record = checkpoint_files.write_file(draft / "a", b"as it was meant")
    flip_bit(draft / "a", 3)
    with pytest.raises(DamagedError, match="a has changed"):
        checkpoint_files.publish(draft, Manifest(1, 1, {}, {}, None, {}, {"a": record}))
    assert checkpoint_files.read_all(tmp_path) == {}


class Killed(BaseException):
    """Stands for the end of the process: nothing is cleaned up after it."""


def _save_and_rotate(folder: Path, step: int) -> None:
    checkpoint_files.clear_leftovers(folder)
    make_checkpoint(folder, step)
    rule = CheckpointSettings(keep_last=2, keep_best=0)
    for name in checkpoint_files.superfluous(checkpoint_files.read_all(folder), rule):
        checkpoint_files.remove(folder / name)


def test_killed_before_any_operation_on_the_disk_the_last_good_one_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    operations = {"fsync": os.fsync, "mkdir": os.mkdir, "rename": os.rename, "unlink": os.unlink, "rmdir": os.rmdir}
    left = 0

    def counted(operation: Callable[..., None]) -> Callable[..., None]:
        def count(*args: object, **kwargs: object) -> None:
            nonlocal left
            if left == 0:
                raise Killed
            left -= 1
            operation(*args, **kwargs)

        return count

    num_killed, finished = 0, False
    while not finished:
        folder = tmp_path / str(num_killed)
        folder.mkdir()
        for step in (1, 2):
            make_checkpoint(folder, step)
        left = num_killed
        with monkeypatch.context() as patch, contextlib.suppress(Killed):
            for name, operation in operations.items():
                patch.setattr(os, name, counted(operation))
            _save_and_rotate(folder, 3)
            finished = True
        newest = checkpoint_files.newest_good(folder, pytest.fail)  # not one that has to be passed over
        assert newest is not None
        assert Manifest.read(newest).step in ((3,) if finished else (2, 3))
        _save_and_rotate(folder, 4)
        assert sorted(path.name for path in folder.iterdir())[-1] == "step-00000004"
        assert not [path for path in folder.iterdir() if path.name.startswith(".")]
        num_killed += 1
    assert num_killed > 10


def test_a_full_disk_is_an_error() -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full")
    with pytest.raises(OSError, match="No space left"):
        checkpoint_files.write_file(Path("/dev/full"), b"x")


@settings(deadline=None)
@given(
    scores=st.lists(st.none() | st.floats(0, 1), min_size=1, max_size=8),
    keep_last=st.integers(1, 4),
    keep_best=st.integers(0, 3),
)
def test_the_last_and_the_best_stay(scores: list[float | None], keep_last: int, keep_best: int) -> None:
    names = [f"step-{serial:08d}" for serial in range(len(scores))]
    manifests = {
        name: Manifest(serial, 100 - serial, {}, {}, None, {} if score is None else {"m": score}, {})
        for serial, (name, score) in reversed(list(enumerate(zip(names, scores, strict=True))))
    }
    rule = CheckpointSettings(keep_last=keep_last, keep_best=keep_best, best_by="m")
    doomed = checkpoint_files.superfluous(manifests, rule)
    kept = set(names) - set(doomed)
    assert doomed == sorted(doomed)
    assert set(names[-keep_last:]) <= kept
    assert len(kept) <= keep_last + keep_best
    kept_scores = [score for name, score in zip(names, scores, strict=True) if name in kept and score is not None]
    lost_scores = [score for name, score in zip(names, scores, strict=True) if name in doomed and score is not None]
    if keep_best and lost_scores:
        assert sum(score >= max(lost_scores) for score in kept_scores) >= keep_best


def test_a_step_saved_anew_is_the_newest_and_overwrites_nothing(tmp_path: Path) -> None:
    first = make_checkpoint(tmp_path, 500)
    again = [make_checkpoint(tmp_path, 3), make_checkpoint(tmp_path, 3)]
    assert [path.name for path in again] == ["step-00000003", "step-00000003-2"]
    assert checkpoint_files.newest_good(tmp_path, pytest.fail) == again[1]
    assert first.exists()
