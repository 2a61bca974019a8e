"""One writer at a time of a folder that hosts share, such as that of a run's checkpoints: who could create `writer.json`.

A killed process leaves the file. It is replaced where the process is known to be gone: on this host, or by the same job.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from clap_ds.config.errors import printable
from clap_ds.config.files import read_json, write_atomically

FILE = "writer.json"


class FolderLock:
    """This process's claim to be the one that writes a folder, in a job known by its folder `job` or by SLURM."""

    def __init__(self, folder: Path, job: Path | None = None) -> None:
        self._path = folder / FILE
        # What process ids are unique in: a boot of a machine and a container in it.
        kernel = f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
        self._own: dict[str, Any] = {
            "host": socket.gethostname(), "pid": os.getpid(), "started": _start_time(os.getpid()), "kernel": kernel,
            "user": os.environ.get("USER", ""), "job": str(job or os.environ.get("SLURM_JOB_ID", "")),
        }  # fmt: skip

    def acquire(self) -> None:
        """Take the folder, made where it isn't there. Raises ValueError: it has a holder; OSError: it can't be written."""
        if self._create():
            return
        found = self._read()
        is_here = found.get("kernel") == self._own["kernel"]
        is_same_job = self._own["job"] != "" and found.get("job") == self._own["job"]
        if not (_start_time(found.get("pid")) != found.get("started") if is_here else is_same_job):
            raise ValueError(f"{self._said('is held by')}. If that job is over, delete {self._path}")
        print(f"{self._said('was left behind by')}; taken over", file=sys.stderr, flush=True)
        write_atomically(self._path, json.dumps(self._own))

    def check(self) -> None:
        """Raises ValueError where another run has taken the folder over meanwhile. Call before each write."""
        if not self._create() and self._read() != self._own:  # it is created where somebody deleted it
            raise ValueError(self._said("was taken over by"))

    def release(self) -> None:
        """Give the folder back if it is this process's."""
        with suppress(OSError):
            if self._read() == self._own:
                self._path.unlink()

    def _create(self) -> bool:
        """Whether the file could be made."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with self._path.open("x") as file:
                json.dump(self._own, file)
        except FileExistsError:
            return False
        return True

    def _read(self) -> dict[str, Any]:
        """What the file says; nothing where there is none, or it is half-written."""
        with suppress(OSError, ValueError, TypeError):
            return dict(read_json(self._path))
        return {}

    def _said(self, what: str) -> str:
        host, pid, user, job = (self._read().get(name, "?") for name in ("host", "pid", "user", "job"))
        return printable(f"{self._path.parent} {what} host {host}, pid {pid}, user {user}, job {job or 'none'}")


def _start_time(pid: Any) -> int | None:
    """In ticks since the machine's boot; None for a process that has ended."""
    with suppress(OSError):
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if state in "ZX" else int(rest[18])
    return None
