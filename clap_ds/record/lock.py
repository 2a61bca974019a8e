"""One writer at a time of a folder that hosts share, such as that of a run's checkpoints: who could create `writer.json`.

A killed process leaves the file. It is replaced where the process is known to be gone: on this host, in an earlier attempt of
the same job, or before SLURM started the same job anew. Standard library only.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from clap_ds.config.files import read_json, write_atomically

FILE = "writer.json"


class HeldError(ValueError):
    """Another run writes the folder; the message says which, and what to do when it is over."""


class FolderLock:
    """This process's claim to be the one that writes a folder.

    Args:
        attempt: of a job, in whose folder for it this is; a job ends one before it begins the next.
    """

    def __init__(self, folder: Path, attempt: Path | None = None) -> None:
        job, restarts = os.environ.get("SLURM_JOB_ID", ""), os.environ.get("SLURM_RESTART_COUNT", "0")
        self._path = folder / FILE
        self._own: dict[str, Any] = {
            "token": os.urandom(8).hex(), "host": socket.gethostname(), "user": os.environ.get("USER", str(os.getuid())),
            "kernel": _kernel(), "pid": os.getpid(), "started": _start_time(os.getpid()), "slurm_job": job,
            "job": str(attempt or (f"SLURM/{job}/{restarts}" if job else "")),
        }  # fmt: skip

    def acquire(self) -> None:
        """Take the folder, made where it isn't there. Raises HeldError: it has a holder; OSError: it can't be written."""
        if self._create():
            return
        if not self._is_over(_read(self._path)):
            raise HeldError(f"{_said(self._path, 'is held by')}. If that job is over, delete {self._path}")
        print(f"{_said(self._path, 'was left behind by')}; taken over", file=sys.stderr, flush=True)
        write_atomically(self._path, json.dumps(self._own))

    def check(self) -> None:
        """Raises HeldError where another run has taken the folder over meanwhile. Call before each write."""
        if not self._create() and _read(self._path) != self._own:  # it is created where somebody deleted it
            raise HeldError(_said(self._path, "was taken over by"))

    def release(self) -> None:
        """Give the folder back if it is this process's."""
        with suppress(OSError):
            if _read(self._path) == self._own:
                self._path.unlink()

    def _create(self) -> bool:
        """Whether the file could be made."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        try:
            file = os.fdopen(os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644), "w")
        except FileExistsError:
            return False
        try:
            with file:
                json.dump(self._own, file)
        except BaseException:  # a full disk, or a signal's
            self._path.unlink()
            raise
        return True

    def _is_over(self, found: dict[str, Any]) -> bool:
        """Whether the holder is known to be gone."""
        own, its_job = self._own, str(found.get("job", ""))
        if own["job"] and os.path.dirname(own["job"]) == os.path.dirname(its_job) and own["job"] != its_job:
            return True
        is_visible = all(found.get(name) == own[name] for name in ("kernel", "user"))
        return is_visible and _start_time(found.get("pid")) != found.get("started")


def _kernel() -> str:
    """What process ids are unique in: a boot of a machine and a container in it, whose name may be another's, too."""
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"


def _start_time(pid: Any) -> int | None:
    """In ticks since the machine's boot; None for a process that has ended."""
    with suppress(OSError):
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if state in "ZX" else int(rest[18])
    return None


def _read(path: Path) -> dict[str, Any]:
    """What the file says; nothing where there is none, or it is half-written."""
    with suppress(OSError, ValueError, TypeError):
        return dict(read_json(path))
    return {}


def _said(path: Path, what: str) -> str:
    host, pid, user, *jobs = (_read(path).get(name, "?") for name in ("host", "pid", "user", "slurm_job", "job"))
    return f"{path.parent} {what} host {host}, pid {pid}, user {user}, job {', '.join(map(str, filter(None, jobs)))}"
