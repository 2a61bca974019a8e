"""Locks on shared folders, such as a run's checkpoints, and the identity of processes in files.

A folder's writer is in `writer.json`. A killed process leaves the file. It is replaced in three
cases:

- The process was on this host and is gone.
- SLURM has ended its job.
- It was an earlier attempt of the same job.
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
# fields that messages show
_SHOWN = ("host", "pid", "user", "job", "slurm_job", "slurm_cluster")


def identify_process(job: Path | None = None) -> dict[str, Any]:
    """Return what identifies this process, in a job identified by its folder and by SLURM."""
    variables = os.environ
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "started": _start_time(os.getpid()),
        "kernel": _identify_kernel(),
        "user": variables.get("USER", ""),
        "job": str(job or ""),
        "slurm_job": identify_slurm_job(),
        "slurm_start": variables.get("SLURM_RESTART_COUNT", "0"),
        "slurm_cluster": variables.get("SLURM_CLUSTER_NAME", ""),
    }


def identify_slurm_job() -> str:
    """Return this process's SLURM job in the form that `squeue -j` and `sacct -j` take; empty
    outside of SLURM."""
    # An array task's SLURM_JOB_ID may be that of the whole array.
    if array := os.environ.get("SLURM_ARRAY_JOB_ID"):
        return f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    return os.environ.get("SLURM_JOB_ID", "")


def has_ended(process: Mapping[str, Any]) -> bool | None:
    """Return whether an identified process has ended; None if it isn't of this host, container and
    boot."""
    kernel = _identify_kernel()
    if not kernel or process.get("kernel") != kernel:
        return None
    return _start_time(process.get("pid")) != process.get("started")


def has_slurm_job_ended(process: Mapping[str, Any]) -> bool | None:
    """Return whether SLURM has ended this start of an identified process's job; None if this
    cluster's SLURM can't say."""
    job = str(process.get("slurm_job"))
    cluster = os.environ.get("SLURM_CLUSTER_NAME")
    if process.get("slurm_cluster") != cluster or not re.fullmatch(r"\d+(_\d+)?", job):
        return None
    # Without `-t`, squeue lists only jobs that haven't ended.
    command = ["squeue", "-h", "-j", job, "-O", "State:30,RestartCnt:10"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode:
        # SLURM forgets jobs some minutes after their end.
        return True if "Invalid job id" in done.stderr else None
    # A requeued job has another number of starts.
    restarts = done.stdout.split()[1:]
    return restarts != [process.get("slurm_start")]


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
                problem = self._describe("is locked by", holder)
                raise ValueError(f"{problem}. If that job is over, delete {self._path}")
            self._remove(holder)

    def check(self) -> None:
        """Raise ValueError if another run has taken the lock. Call before each write."""
        holder = _read(self._path)
        # It is empty if the file was deleted by hand.
        if holder not in ({}, self._own):
            raise ValueError(self._describe("was locked meanwhile by", holder))

    def release(self) -> None:
        """Unlock the folder if this process holds the lock."""
        with suppress(OSError):
            if _read(self._path) == self._own:
                self._path.unlink()

    def _is_over(self, holder: dict[str, Any]) -> bool:
        is_over = has_ended(holder)
        if is_over is None and holder.get("slurm_job") != self._own["slurm_job"]:
            is_over = has_slurm_job_ended(holder)
        if is_over is not None:
            return is_over
        # Neither this host nor SLURM can say. An earlier attempt or start of this job has ended.
        if holder.get("slurm_cluster", self._own["slurm_cluster"]) != self._own["slurm_cluster"]:
            return False
        return any(
            self._own[name] and holder.get(name) == self._own[name] for name in ("job", "slurm_job")
        )

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
                note = self._describe("had a stale lock of", holder)
                print(f"{note}; replaced", file=sys.stderr, flush=True)

    def _describe(self, verb: str, holder: dict[str, Any]) -> str:
        process = ", ".join(f"{name} {holder[name]}" for name in _SHOWN if holder.get(name))
        return printable(f"{self._path.parent} {verb} {process.replace('slurm_', 'SLURM ')}")


def _read(path: Path) -> dict[str, Any]:
    """Read a lock's file; empty if it is missing or damaged."""
    with suppress(OSError, ValueError, TypeError):
        return dict(read_json(path))
    return {}


def _identify_kernel() -> str:
    """Return this boot and container, within which process ids are unique; empty on other systems
    than Linux."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    return ""


def _start_time(pid: Any) -> int | None:
    """Return a process's start in ticks since boot, or None if it has ended."""
    with suppress(OSError, TypeError, ValueError):
        line = Path(f"/proc/{int(pid)}/stat").read_text()
        # The process's name, in parentheses, may contain spaces. Fields are numbered from 1 in
        # proc(5): the third is the state, the 22nd the start.
        fields = line.rpartition(")")[2].split()
        is_dead = fields[0] in "ZX"
        return None if is_dead else int(fields[19])
    return None
