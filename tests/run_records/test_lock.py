"""A folder's lock: a live holder is named, a dead one replaced."""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clap_ds.run_records.lock import FolderLock

JOB = Path("/jobs/12")


def write_holder(folder: Path, **changes: Any) -> dict[str, Any]:
    """Write a holder's file, by default of another host and job."""
    holder = {**FolderLock(folder)._own, "host": "tux7", "kernel": "another", "job": "/jobs/9"}
    holder |= changes
    (folder / "writer.json").write_text(json.dumps(holder))
    return holder


def test_lock_of_running_process_is_refused_with_its_name(tmp_path):
    folder = tmp_path / "new" / "folder"
    FolderLock(folder, JOB).acquire()
    with pytest.raises(ValueError, match="is locked by") as refusal:
        FolderLock(folder, JOB).acquire()
    for part in (str(os.getpid()), str(JOB), f"delete {folder / 'writer.json'}"):
        assert part in str(refusal.value)


@pytest.fixture
def ended_pid() -> Iterator[int]:
    process = subprocess.Popen(["true"])
    # It stays a zombie, as in a container without an init process.
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    yield process.pid
    process.wait()


@pytest.mark.parametrize(
    "is_pid_reused", [pytest.param(False, id="ended"), pytest.param(True, id="pid reused")]
)
def test_lock_of_ended_process_on_this_host_is_replaced(is_pid_reused, tmp_path, ended_pid, capfd):
    lock = FolderLock(tmp_path, JOB)
    changes = {"started": 1} if is_pid_reused else {"pid": ended_pid}
    write_holder(tmp_path, kernel=lock._own["kernel"], **changes)
    lock.acquire()
    lock.check()
    assert "stale lock of host tux7" in capfd.readouterr().err


SQUEUE = {
    "running": "echo 'RUNNING 1'",
    "started again": "echo 'RUNNING 2'",
    "over": "true",
    "forgotten": "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1",
    "controller down": "echo 'Unable to contact slurm controller' >&2; exit 1",
}


@pytest.mark.parametrize(
    ("squeue_result", "changes", "is_over"),
    [
        ("started again", {}, True),
        ("forgotten", {}, True),
        ("controller down", {}, False),
        # another SLURM job in the same folder of a job
        ("controller down", {"job": str(JOB)}, True),
        ("over", {"slurm_cluster": "another", "slurm_job": "12", "job": str(JOB)}, False),
        # requeued
        ("running", {"slurm_job": "12"}, True),
        ("over", {"slurm_job": "-h"}, False),
    ],
)
def test_lock_on_another_host_is_replaced_if_slurm_has_ended_its_job(
    tmp_path, monkeypatch, squeue_result, changes, is_over
):
    squeue = tmp_path / "squeue"
    squeue.write_text(f"#!/bin/sh\n[ $3 = 9_4 ] || exit 3\n{SQUEUE[squeue_result]}\n")
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    for name, value in {"JOB_ID": "12", "CLUSTER_NAME": "test", "RESTART_COUNT": "3"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    lock = FolderLock(tmp_path / "folder", JOB)
    (tmp_path / "folder").mkdir()
    process = {"user": "", "slurm_job": "9_4", "slurm_start": "1", **changes}
    write_holder(tmp_path / "folder", **process)
    if is_over:
        lock.acquire()
        lock.check()
    else:
        with pytest.raises(ValueError, match=f"tux7.*SLURM job {process['slurm_job']}, "):
            lock.acquire()


def test_stale_lock_that_two_find_at_once_is_acquired_by_one(tmp_path):
    holder = write_holder(tmp_path)
    slow = FolderLock(tmp_path, Path("/jobs/1"))
    fast = FolderLock(tmp_path, Path("/jobs/2"))
    fast._remove(holder)
    fast.acquire()
    slow._remove(holder)
    with pytest.raises(ValueError, match=r"is locked by .*/jobs/2"):
        slow.acquire()
    fast.check()
    assert len([*tmp_path.iterdir()]) == 1


def test_lock_taken_by_another_is_reported_and_kept(tmp_path):
    suspended = FolderLock(tmp_path)
    suspended.acquire()
    holder = write_holder(tmp_path)
    with pytest.raises(ValueError, match="was locked meanwhile by host tux7"):
        suspended.check()
    suspended.release()
    assert json.loads((tmp_path / "writer.json").read_text()) == holder
