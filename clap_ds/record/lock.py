"""One writer at a time of a folder that hosts share, such as that of a run's checkpoints.

The holder's file says who it is; the holder touches it every 15 s. Clocks of hosts are never compared: who finds such a file
watches whether it is touched. Standard library only; that all ranks agree is left to the caller.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

from clap_ds.config.files import read_json

FILE = "writer.json"
TOUCH_S = 15.0
WATCH_S = 60.0  # untouched for so long, the holder is taken for dead
LOOK_S = 3.0


class HeldError(ValueError):
    """Another run writes the folder; the message says which."""


class FolderLock:
    """This process's claim to be the one that writes a folder.

    Args:
        attempt: of a job, in whose folder for it this is; a job ends one before it begins the next.
    """

    def __init__(self, folder: Path, attempt: Path | None = None) -> None:
        self._path = folder / FILE
        self._over = threading.Event()
        self._own: dict[str, Any] = {
            "token": os.urandom(8).hex(), "host": socket.gethostname(), "user": _user(), "kernel": _kernel(),
            "pid": os.getpid(), "started": _start_time(os.getpid()),
            "slurm_job": os.environ.get("SLURM_JOB_ID", ""), "job": str(attempt or ""),
        }  # fmt: skip

    def acquire(self) -> None:
        """Take the folder, made where it isn't there; one whose holder is dead is taken over, which may take a minute to know.

        Raises:
            HeldError: its holder lives.
            OSError: it can't be written.
        """
        while not self._create(self._path):
            if (found := _read(self._path)) and self._is_dead(found):
                self._take_over(found)
                break
        threading.Thread(target=self._keep_touching, daemon=True, name="clap.lock").start()

    def check(self) -> None:
        """Raises HeldError where another run has taken the folder over meanwhile: this one was suspended, say."""
        if not self._create(self._path) and not self._is_mine():  # it can be created where somebody has deleted it
            raise HeldError(f"{self._path.parent} was taken over by {_shown(_read(self._path) or {})}")

    def release(self) -> None:
        """Give the folder back if it is this process's."""
        self._over.set()
        with contextlib.suppress(OSError):
            if self._is_mine():
                self._path.unlink()

    def _is_mine(self) -> bool:
        return (_read(self._path) or {}).get("token") == self._own["token"]

    def _create(self, path: Path) -> bool:
        """Whether the file could be made: it is this process's then."""
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            file = path.open("x")
        except FileExistsError:
            return False
        try:
            with file:
                json.dump(self._own, file)
        except BaseException:  # a full disk, or a signal's
            path.unlink()
            raise
        return True

    def _keep_touching(self) -> None:
        while not self._over.wait(TOUCH_S):
            with contextlib.suppress(OSError):  # a disk that fails fails the run elsewhere
                os.utime(self._path)

    def _is_dead(self, found: dict[str, Any]) -> bool:
        """Whether the holder is; False, too, where it is another one by now. Raises HeldError: it lives."""
        run, _, attempt = self._own["job"].rpartition("/")
        its_run, _, its_attempt = found.get("job", "").rpartition("/")
        if run and run == its_run and attempt != its_attempt:
            return True
        who = f"{self._path.parent} is held by {_shown(found)}"
        if (found.get("kernel"), found.get("user")) == (_kernel(), _user()):  # its process can be seen from here
            if _start_time(found["pid"]) != found["started"]:
                return True
            raise HeldError(who)
        print(f"{who}; watching for {WATCH_S:.0f} s whether it is alive", file=sys.stderr, flush=True)
        deadline = time.monotonic() + WATCH_S
        while time.monotonic() < deadline:
            time.sleep(LOOK_S)
            now = _read(self._path)
            if now is None or now["token"] != found["token"]:
                return False
            if now["touched"] != found["touched"]:
                raise HeldError(who)
        return True

    def _take_over(self, dead: dict[str, Any]) -> None:
        """Put this process's file in a dead one's place; raises HeldError where another run does so now.

        Of all that found the same one dead, one at a time can make the file `claim`; who comes later finds another holder.
        """
        claim = self._path.with_name(f".{FILE}.{dead['token']}")
        if not self._create(claim):
            raise HeldError(f"{self._path.parent} is being taken over by another run; if there is none, delete {claim}")
        if (_read(self._path) or {}).get("token") != dead["token"]:
            claim.unlink()
            raise HeldError(f"{self._path.parent} is being taken over by another run")
        os.replace(claim, self._path)
        print(f"{self._path.parent} was left behind by {_shown(dead)}; taken over", file=sys.stderr, flush=True)


def _user() -> str:
    return os.environ.get("USER", str(os.getuid()))


def _kernel() -> str:
    """What process ids are unique in: a boot of a machine and a container in it, whose name may be another's, too."""
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"


def _start_time(pid: int) -> int | None:
    """In ticks since the machine's boot; None for a process that has ended."""
    with contextlib.suppress(OSError):
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if state in "ZX" else int(rest[18])
    return None


def _read(path: Path) -> dict[str, Any] | None:
    """What the file says and when it was touched; None where there is none. One half-written says nothing."""
    found: dict[str, Any] = {}
    try:
        touched = path.stat().st_mtime_ns
        with contextlib.suppress(ValueError, TypeError):
            found = dict(read_json(path))
    except FileNotFoundError:
        if path.is_symlink():
            raise HeldError(f"{path} is a link to nowhere; delete it") from None
        return None
    kinds = {"pid": int, "started": int}  # others may have written it
    known = {name: value for name, value in found.items() if isinstance(value, kinds.get(name, str))}
    return {"token": None, "pid": 0, "started": None, **known, "touched": touched}


def _shown(holder: dict[str, Any]) -> str:
    host, pid, user, *jobs = (str(holder.get(name) or "") for name in ("host", "pid", "user", "slurm_job", "job"))
    return f"host {host or '?'}, pid {pid or '?'}, user {user or '?'}, job {', '.join(filter(None, jobs)) or '(none)'}"
