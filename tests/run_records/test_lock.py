"""A folder's lock: a live holder is named, a dead one replaced."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from clap_ds.run_records.lock import FolderLock

JOB = Path("/jobs/12")


def _left_behind(folder: Path, **changes: Any) -> dict[str, Any]:
    """Write a holder's file, by default of another host and job."""
    left = FolderLock(folder)._own | {"host": "tux7", "kernel": "another", "job": "/jobs/9"} | changes
    (folder / "writer.json").write_text(json.dumps(left))
    return left


def test_a_holder_is_named_with_what_to_do_and_leaves_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "not" / "there"
    (first := FolderLock(folder, JOB)).acquire()
    with pytest.raises(ValueError, match="is locked by") as refusal:
        FolderLock(folder, JOB).acquire()
    for part in (os.uname().nodename, str(os.getpid()), str(JOB), f"delete {folder / 'writer.json'}"):
        assert part in str(refusal.value)
    (folder / "writer.json").unlink()  # deleted by hand
    first.check()
    first.release()
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    ("changes", "is_over"),
    [
        ({}, False),
        ({"job": str(JOB)}, True),  # an earlier attempt
        ({"job": ""}, False),
        ({"pid": "ended", "kernel": "this"}, True),
        ({"started": 1, "kernel": "this"}, True),  # its process id is reused
    ],
)
def test_a_holder_that_is_known_to_be_gone_is_replaced(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], changes: dict[str, Any], is_over: bool
) -> None:
    process = subprocess.Popen(["true"])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # a zombie, as in a container without an init process
    lock = FolderLock(tmp_path, JOB)
    known = {"pid": process.pid, "kernel": lock._own["kernel"]}
    left = _left_behind(tmp_path, **{name: known.get(name, value) for name, value in changes.items()})
    if is_over:
        lock.acquire()
        lock.check()
        assert "tux7" in capfd.readouterr().err
    else:
        with pytest.raises(ValueError, match="tux7"):
            lock.acquire()
        assert json.loads((tmp_path / "writer.json").read_text()) == left
    process.wait()


def test_one_taken_over_meanwhile_is_told_and_leaves_the_other_alone(tmp_path: Path) -> None:
    (suspended := FolderLock(tmp_path)).acquire()
    other = _left_behind(tmp_path)
    with pytest.raises(ValueError, match="was locked meanwhile by host tux7"):
        suspended.check()
    suspended.release()
    assert json.loads((tmp_path / "writer.json").read_text()) == other
