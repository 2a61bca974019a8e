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
    left = (
        FolderLock(folder)._own | {"host": "tux7", "kernel": "another", "job": "/jobs/9"} | changes
    )
    (folder / "writer.json").write_text(json.dumps(left))
    return left


def test_a_holder_is_named_with_what_to_do_and_leaves_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "not" / "there"
    (first := FolderLock(folder, JOB)).acquire()
    with pytest.raises(ValueError, match="is locked by") as refusal:
        FolderLock(folder, JOB).acquire()
    for part in (
        os.uname().nodename,
        str(os.getpid()),
        str(JOB),
        f"delete {folder / 'writer.json'}",
    ):
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
    os.waitid(
        os.P_PID, process.pid, os.WEXITED | os.WNOWAIT
    )  # a zombie, as in a container without an init process
    lock = FolderLock(tmp_path, JOB)
    known = {"pid": process.pid, "kernel": lock._own["kernel"]}
    left = _left_behind(
        tmp_path, **{name: known.get(name, value) for name, value in changes.items()}
    )
    if is_over:
        lock.acquire()
        lock.check()
        assert "tux7" in capfd.readouterr().err
    else:
        with pytest.raises(ValueError, match="tux7"):
            lock.acquire()
        assert json.loads((tmp_path / "writer.json").read_text()) == left
    process.wait()


SQUEUE = {
    "running": "echo 'RUNNING 1'",
    "started again": "echo 'RUNNING 2'",
    "over": "true",
    "forgotten": "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1",
    "controller down": "echo 'Unable to contact slurm controller' >&2; exit 1",
    "no SLURM": "exit 127",
}


@pytest.mark.parametrize(
    ("answer", "changes", "is_over"),
    [
        ("started again", {}, True),
        ("over", {}, True),
        ("forgotten", {}, True),
        ("controller down", {}, False),
        (
            "controller down",
            {"job": str(JOB)},
            True,
        ),  # another SLURM job in the same folder of a job
        ("running", {"job": str(JOB)}, False),
        ("no SLURM", {}, False),
        ("over", {"slurm_cluster": "another", "slurm_job": "12", "job": str(JOB)}, False),
        ("running", {"slurm_job": "12"}, True),  # requeued
        ("over", {"slurm_job": "-h"}, False),
    ],
)
def test_slurm_says_whether_a_holder_on_another_host_is_over(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    answer: str,
    changes: dict[str, Any],
    is_over: bool,
) -> None:
    squeue = tmp_path / "squeue"
    squeue.write_text(f"#!/bin/sh\n[ $3 = 9_4 ] || exit 3\n{SQUEUE[answer]}\n")
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    for name, value in {"JOB_ID": "12", "CLUSTER_NAME": "test", "RESTART_COUNT": "3"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    lock = FolderLock(tmp_path / "folder", JOB)
    (tmp_path / "folder").mkdir()
    _left_behind(
        tmp_path / "folder", **{"user": "", "slurm_job": "9_4", "slurm_start": "1"} | changes
    )
    if is_over:
        lock.acquire()
        lock.check()
    else:
        with pytest.raises(
            ValueError, match=f"tux7.*SLURM job {changes.get('slurm_job', '9_4')}, "
        ):
            lock.acquire()
    assert len([*(tmp_path / "folder").iterdir()]) == 1


def test_of_two_that_find_a_stale_lock_at_once_one_gets_it(tmp_path: Path) -> None:
    stale = _left_behind(tmp_path)
    slow = FolderLock(tmp_path, Path("/jobs/1"))
    fast = FolderLock(tmp_path, Path("/jobs/2"))
    fast._remove(stale)
    fast.acquire()
    slow._remove(stale)
    with pytest.raises(ValueError, match=r"is locked by .*/jobs/2"):
        slow.acquire()
    fast.check()
    assert len([*tmp_path.iterdir()]) == 1


def test_one_taken_over_meanwhile_is_told_and_leaves_the_other_alone(tmp_path: Path) -> None:
    (suspended := FolderLock(tmp_path)).acquire()
    other = _left_behind(tmp_path)
    with pytest.raises(ValueError, match="was locked meanwhile by host tux7"):
        suspended.check()
    suspended.release()
    assert json.loads((tmp_path / "writer.json").read_text()) == other
