"""Identify processes in files: the one that writes a shared folder, such as a run's checkpoints, and the one of a run's rank 0.

A folder's writer is in `writer.json`. A killed process leaves the file, which is replaced if that process was on this host and
is gone, or was of the same job.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from clap_ds.config.errors import printable
from clap_ds.config.files import read_json, write_atomically

FILE = "writer.json"


def identify_process(job: Path | None = None) -> dict[str, Any]:
    """Return what identifies this process, in a job identified by its folder or by SLURM."""
    return {
        "host": socket.gethostname(), "pid": os.getpid(), "started": _start_time(os.getpid()), "kernel": _identify_kernel(),
        "user": os.environ.get("USER", ""), "job": str(job or os.environ.get("SLURM_JOB_ID", "")),
    }  # fmt: skip


def has_ended(process: Mapping[str, Any]) -> bool | None:
    """Return whether an identified process has ended; None if it isn't of this host, container and boot."""
    kernel = _identify_kernel()
    if not kernel or process.get("kernel") != kernel:
        return None
    return _start_time(process.get("pid")) != process.get("started")


class FolderLock:
    """This process's lock on a folder."""

    def __init__(self, folder: Path, job: Path | None = None) -> None:
        self._path = folder / FILE
        self._own = identify_process(job)

    def acquire(self) -> None:
        """Lock the folder, creating it if needed. Raises ValueError if it is locked, OSError if it can't be written."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if found := self._read():
            is_over = has_ended(found)
            if is_over is None:
                is_over = self._own["job"] != "" and found.get("job") == self._own["job"]
            if not is_over:
                raise ValueError(f"{self._said('is locked by')}. If that job is over, delete {self._path}")
            print(f"{self._said('had a stale lock of')}; replaced", file=sys.stderr, flush=True)
        write_atomically(self._path, json.dumps(self._own))

    def check(self) -> None:
        """Raise ValueError if another run has taken the lock. Call before each write."""
        if self._read() not in ({}, self._own):  # empty if deleted by hand
            raise ValueError(self._said("was locked meanwhile by"))

    def release(self) -> None:
        """Unlock the folder if this process holds the lock."""
        with suppress(OSError):
            if self._read() == self._own:
                self._path.unlink()

    def _read(self) -> dict[str, Any]:
        """Read the file; empty if it is missing or incomplete."""
        with suppress(OSError, ValueError, TypeError):
            return dict(read_json(self._path))
        return {}

    def _said(self, what: str) -> str:
        host, pid, user, job = (self._read().get(name, "?") for name in ("host", "pid", "user", "job"))
        return printable(f"{self._path.parent} {what} host {host}, pid {pid}, user {user}, job {job or 'none'}")


def _identify_kernel() -> str:
    """Return this boot and container, within which process ids are unique; empty on other systems than Linux."""
    with suppress(OSError):
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    return ""


def _start_time(pid: Any) -> int | None:
    """Return a process's start in ticks since boot, or None if it has ended."""
    with suppress(OSError, TypeError, ValueError):
        state, *rest = Path(f"/proc/{int(pid)}/stat").read_text().rpartition(")")[2].split()
        return None if state in "ZX" else int(rest[18])
    return None
