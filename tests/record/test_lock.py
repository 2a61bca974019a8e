"""A folder has one writer: a living one is named, and one that is known to be gone is replaced."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from clap_ds.record.lock import FolderLock, HeldError

ATTEMPT = Path("/jobs/12/1")


@pytest.fixture(autouse=True)
def in_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "12")


def _left_behind(folder: Path, **changes: Any) -> dict[str, Any]:
    """A holder's file; unless changed, of another host and job."""
    other = {"token": "t", "host": "tux7", "kernel": "another", "job": "/jobs/9/0", "slurm_job": "9"}
    left = FolderLock(folder)._own | other | changes
    (folder / "writer.json").write_text(json.dumps(left))
    return left


def test_a_holder_is_named_with_what_to_do_and_leaves_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "not" / "there"
    (first := FolderLock(folder, ATTEMPT)).acquire()
    with pytest.raises(HeldError) as refusal:
        FolderLock(folder).acquire()
    for part in (os.uname().nodename, str(os.getpid()), "12", str(ATTEMPT), f"delete {folder / 'writer.json'}"):
        assert part in str(refusal.value)
    first.check()
    (folder / "writer.json").unlink()  # somebody has tidied up
    first.check()
    first.release()
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    ("changes", "attempt", "is_over"),
    [
        ({}, ATTEMPT, False),
        ({"job": "/jobs/12/0"}, ATTEMPT, True),  # an earlier attempt of this job
        ({"job": "SLURM/12/1"}, None, True),  # before SLURM started this job anew
        ({"job": "SLURM/12/0"}, None, False),  # another run in this allocation
        ({"pid": "ended", "kernel": "this"}, ATTEMPT, True),
        ({"pid": "ended", "kernel": "this", "user": "another"}, ATTEMPT, False),  # whose processes may be hidden
        ({"started": 1, "kernel": "this"}, ATTEMPT, True),  # another process has got its number
    ],
)
def test_a_holder_that_is_known_to_be_gone_is_replaced(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], changes: dict[str, Any], attempt: Path | None, is_over: bool
) -> None:
    process = subprocess.Popen(["true"])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # a zombie, as in a container that reaps none
    known = {"pid": process.pid} if "pid" in changes else {}
    lock = FolderLock(tmp_path, attempt)
    known |= {"kernel": lock._own["kernel"]} if "kernel" in changes else {}
    left = _left_behind(tmp_path, **changes | known)
    if is_over:
        lock.acquire()
        lock.check()
        assert "tux7" in capfd.readouterr().err
        lock.release()
        assert list(tmp_path.iterdir()) == []
    else:
        with pytest.raises(HeldError, match="tux7"):
            lock.acquire()
        assert json.loads((tmp_path / "writer.json").read_text()) == left
    process.wait()


def test_one_taken_over_meanwhile_is_told_and_leaves_the_other_alone(tmp_path: Path) -> None:
    (suspended := FolderLock(tmp_path)).acquire()
    other = _left_behind(tmp_path)
    with pytest.raises(HeldError, match="tux7"):
        suspended.check()
    suspended.release()
    assert json.loads((tmp_path / "writer.json").read_text()) == other


def test_a_folder_that_cant_be_written_is_left_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clap_ds.record.lock.json.dump", Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space left"):
        FolderLock(tmp_path).acquire()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(NotADirectoryError):
        FolderLock(Path(sys.executable) / "folder").acquire()
