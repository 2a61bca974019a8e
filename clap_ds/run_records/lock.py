"""Identify processes in files: the one that writes a shared folder, such as a run's checkpoints,
and the one of a run's rank 0.

A folder's writer is in `writer.json`. A killed process leaves the file, which is replaced if that
process was on this host and is gone, or SLURM says that its job is over, or it was of the same job.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from clap_ds.utils.errors import printable
from clap_ds.utils.files import create_atomically, read_json

FILE = "writer.json"
_SHOWN = ("host", "pid", "user", "job", "slurm_job", "slurm_cluster")


def identify_process(job: Path | None = None) -> dict[str, Any]:
    """Return what identifies this process, in a job identified by its folder and by SLURM."""
    return {
        "host": socket.gethostname(), "pid": os.getpid(), "started": _start_time(os.getpid()), "kernel": _identify_kernel(),
        "user": os.environ.get("USER", ""), "job": str(job or ""), "slurm_job": identify_slurm_job(),
        "slurm_start": os.environ.get("SLURM_RESTART_COUNT", "0"), "slurm_cluster": os.environ.get("SLURM_CLUSTER_NAME", ""),
    }  # fmt: skip


def identify_slurm_job() -> str:
    """Return this process's SLURM job in the form that `squeue -j` and `sacct -j` take; empty
    outside of SLURM."""
    if array := os.environ.get(
        "SLURM_ARRAY_JOB_ID"
    ):  # a task's SLURM_JOB_ID may be that of the whole array
        return f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    return os.environ.get("SLURM_JOB_ID", "")


def has_ended(process: Mapping[str, Any]) -> bool | None:
    """Return whether an identified process has ended; None if it isn't of this host, container and
    boot."""
    kernel = _identify_kernel()
    if not kernel or process.get("kernel") != kernel:
        return None
    return _start_time(process.get("pid")) != process.get("started")


def has_slurm_ended(process: Mapping[str, Any]) -> bool | None:
    """Return whether SLURM has ended this start of an identified process's job; None if this
    cluster's SLURM can't say."""
    job = str(process.get("slurm_job"))
    if not re.fullmatch(r"\d+(_\d+)?", job) or process.get("slurm_cluster") != os.environ.get(
        "SLURM_CLUSTER_NAME"
    ):
        return None
    command = [
        "squeue",
        "-h",
        "-j",
        job,
        "-O",
        "State:30,RestartCnt:10",
    ]  # without `-t`: only jobs that haven't ended
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode:
        return True if "Invalid job id" in done.stderr else None
    return done.stdout.split()[1:] != [process.get("slurm_start")]


class FolderLock:
    """This process's lock on a folder."""

    def __init__(self, folder: Path, job: Path | None = None) -> None:
        self._path = folder / FILE
        self._own = identify_process(job)

    def acquire(self) -> None:
        """Lock the folder, creating it if needed. Raises ValueError if it is locked, OSError if it
        can't be written."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        while True:
            try:
                return create_atomically(self._path, json.dumps(self._own))
            except FileExistsError:
                holder = _read(self._path)
            if holder and not self._is_over(holder):
                raise ValueError(
                    f"{self._describe('is locked by', holder)}. If that job is over, delete {self._path}"
                )
            self._remove(holder)

    def check(self) -> None:
        """Raise ValueError if another run has taken the lock. Call before each write."""
        holder = _read(self._path)
        if holder not in ({}, self._own):  # empty if deleted by hand
            raise ValueError(self._describe("was locked meanwhile by", holder))

    def release(self) -> None:
        """Unlock the folder if this process holds the lock."""
        with suppress(OSError):
            if _read(self._path) == self._own:
                self._path.unlink()

    def _is_over(self, holder: dict[str, Any]) -> bool:
        is_over = has_ended(holder)
        if is_over is None and holder.get("slurm_job") != self._own["slurm_job"]:
            is_over = has_slurm_ended(holder)
        if is_over is None:  # An earlier attempt or start of this job has ended.
            cluster = self._own["slurm_cluster"]
            is_own_job = any(
                holder.get(name) == self._own[name] != "" for name in ("job", "slurm_job")
            )
            is_over = is_own_job and holder.get("slurm_cluster", cluster) == cluster
        return is_over

    def _remove(self, holder: dict[str, Any]) -> None:
        """Remove a stale holder's file unless another process has replaced it since it was read."""
        aside = self._path.with_name(f".{FILE}.{os.urandom(8).hex()}")
        with suppress(FileNotFoundError):
            self._path.rename(aside)
            if _read(aside) != holder:
                aside.rename(self._path)
                return
            aside.unlink()
            if holder:
                print(
                    f"{self._describe('had a stale lock of', holder)}; replaced",
                    file=sys.stderr,
                    flush=True,
                )

    def _describe(self, what: str, holder: dict[str, Any]) -> str:
        shown = ", ".join(f"{name} {holder[name]}" for name in _SHOWN if holder.get(name))
        return printable(f"{self._path.parent} {what} {shown.replace('slurm_', 'SLURM ')}")


def _read(path: Path) -> dict[str, Any]:
    """Read a lock's file; empty if it is missing or damaged."""
    with suppress(OSError, ValueError, TypeError):
        return dict(read_json(path))
    return {}


def _identify_kernel() -> str:
    """Return this boot and container, within which process ids are unique; empty on other systems
    than Linux."""
    with suppress(OSError):
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    return ""


def _start_time(pid: Any) -> int | None:
    """Return a process's start in ticks since boot, or None if it has ended."""
    with suppress(OSError, TypeError, ValueError):
        state, *rest = Path(f"/proc/{int(pid)}/stat").read_text().rpartition(")")[2].split()
        return None if state in "ZX" else int(rest[18])
    return None
