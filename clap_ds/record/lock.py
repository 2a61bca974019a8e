"""One writer at a time of a folder that hosts share, such as that of a run's checkpoints.

The holder's file says who it is and is renewed every 15 s. Clocks of hosts are never compared: who finds such a file watches
whether it changes. Standard library only; that all ranks agree is left to the caller.
"""

from __future__ import annotations

import contextlib
import errno
import getpass
import hashlib
import json
import os
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

FILE = "writer.json"
REFRESH_S = 15.0
WATCH_S = 60.0  # without a change, and the holder is taken for dead
LOOK_S = 3.0
_BYTES = 1024  # of the file, always: to renew it takes no room on a full disk


class HeldError(ValueError):
    """Another run writes the folder; the message says which."""


class FolderLock:
    """This process's claim to be the one that writes a folder.

    Args:
        attempt: of a job, in whose folder for it this is; a job ends one before it begins the next.
    """

    def __init__(self, folder: Path, attempt: Path | None = None) -> None:
        self._path = folder / FILE
        self._own = _identity() | {"job": str(attempt or "")}
        self._file: int | None = None  # stays open, so that what is renewed is never a successor's
        self._beat = 0
        self._over = threading.Event()
        self._refresher = threading.Thread(target=self._refresh, daemon=True, name="clap.lock")

    def acquire(self) -> None:
        """Take the folder, made where it isn't there; one whose holder is dead is taken over, which may take a minute to know.

        Raises:
            HeldError: its holder lives.
            OSError: it can't be written.
        """
        while (file := self._create(self._path)) is None:
            found = _read(self._path)
            if found is not None and self._is_dead(found) and (file := self._take_over(found)) is not None:
                break
        self._file = file
        self._refresher.start()

    def check(self) -> None:
        """Raises HeldError where another run has taken the folder over meanwhile: this one was suspended, say."""
        holder = _read(self._path)
        if holder is None and (file := self._create(self._path)) is not None:  # somebody has tidied up
            self._file = file
            return
        if (holder := holder or _read(self._path)) is None or holder["token"] != self._own["token"]:
            raise HeldError(f"{self._path.parent} was taken over by {_shown(holder or {})}")

    def release(self) -> None:
        """Give the folder back if it has been taken, and is this process's still."""
        if self._file is None:
            return
        self._over.set()
        if self._refresher.is_alive():
            self._refresher.join(REFRESH_S)
        with contextlib.suppress(OSError):
            if (_read(self._path) or {}).get("token") == self._own["token"]:
                self._path.unlink()
            os.close(self._file)
        self._file = None

    def _create(self, path: Path) -> int | None:
        """The file, open, if it could be made, and so is this process's."""
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            return None
        try:
            self._write(file)
        except BaseException:  # a full disk, or a signal's
            os.close(file)
            path.unlink()
            raise
        return file

    def _write(self, file: int) -> None:
        text = json.dumps({**self._own, "beat": self._beat})
        os.pwrite(file, f"{text:<{_BYTES - 1}}\n".encode(), 0)
        os.fsync(file)
        self._beat += 1

    def _refresh(self) -> None:
        while not self._over.wait(REFRESH_S):
            with contextlib.suppress(OSError):  # a disk that fails fails the run elsewhere
                if self._file is not None:
                    self._write(self._file)

    def _is_dead(self, found: dict[str, Any]) -> bool:
        """Whether the holder is; False, too, where it is another one by now. Raises HeldError: it lives."""
        alive = _is_running(found)
        if alive is False or self._is_earlier_attempt(found):
            return True
        who = f"{self._path.parent} is held by {_shown(found)}"
        if alive:
            raise HeldError(who)
        print(f"{who}; watching for {WATCH_S:.0f} s whether it is alive", file=sys.stderr, flush=True)
        deadline = time.monotonic() + WATCH_S
        while time.monotonic() < deadline:
            time.sleep(LOOK_S)
            now = _read(self._path)
            if now is None or now["token"] != found["token"]:
                return False
            if now["beat"] != found["beat"]:
                raise HeldError(who)
        return True

    def _is_earlier_attempt(self, found: dict[str, Any]) -> bool:
        """Whether the holder was another attempt of this same run."""
        run, _, attempt = str(self._own["job"]).rpartition("/")
        its_run, _, its_attempt = str(found.get("job", "")).rpartition("/")
        return run != "" and run == its_run and attempt != its_attempt

    def _take_over(self, dead: dict[str, Any]) -> int | None:
        """Put this process's file in a dead one's place; None where another was faster.

        Of all that found the same one dead, one at a time can make the file of this name, and it has the dead one's file under
        its eyes then: who comes later finds the winner's there.
        """
        claim = self._path.with_name(f".{FILE}.{dead['token']}")
        if (file := self._create(claim)) is None:
            deadline = time.monotonic() + WATCH_S
            while claim.exists():
                if time.monotonic() > deadline:
                    raise HeldError(
                        f"{claim} was left by a run that broke off while it took the folder over: delete it"
                    )
                time.sleep(LOOK_S / 10)
            return None
        now = _read(self._path)
        if now is None or now["token"] != dead["token"]:
            os.close(file)
            claim.unlink()
            return None
        os.replace(claim, self._path)
        print(f"{self._path.parent} was left behind by {_shown(dead)}; taken over", file=sys.stderr, flush=True)
        return file


def _identity() -> dict[str, Any]:
    """Who this process is, for people and for other processes."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # in a container without it
        user = str(os.getuid())
    return {
        "token": os.urandom(8).hex(),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "started": _start_time(os.getpid()),
        "kernel": _kernel(),
        "job": "",
        "slurm_job": os.environ.get("SLURM_JOB_ID", ""),
        "user": user,
    }


def _kernel() -> str:
    """What process ids are unique in: a boot of a machine and a container in it, whose name may be another's, too."""
    with contextlib.suppress(OSError):
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    return ""


def _start_time(pid: int) -> int | None:
    """In ticks since the machine's boot, -1 for one that has ended; None where that can't be read."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return -1 if state in "ZX" else int(rest[18])
    return None


def _is_running(found: dict[str, Any]) -> bool | None:
    """Whether the holder's process is there, where that can be seen from here."""
    if not found.get("kernel") or found["kernel"] != _kernel():
        return None
    with contextlib.suppress(PermissionError):
        try:
            os.kill(found["pid"], 0)
        except ProcessLookupError:
            return False
    started = _start_time(found["pid"])
    return None if started is None else bool(started == found["started"])


def _read(path: Path) -> dict[str, Any] | None:
    """What the file says, None where there is none; of one that is half-written, its text's hash is its token."""
    try:
        text = path.read_text(errors="replace")
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ESTALE):
            return None
        raise
    with contextlib.suppress(ValueError):
        found = json.loads(text)
        if isinstance(found, dict) and {"token", "beat"} <= found.keys():
            return found
    return {"token": hashlib.blake2b(text.encode(), digest_size=8).hexdigest(), "beat": 0}


def _shown(holder: dict[str, Any]) -> str:
    who = f"host {holder.get('host', '?')}, pid {holder.get('pid', '?')}, user {holder.get('user', '?')}"
    job = ", ".join(str(holder[name]) for name in ("slurm_job", "job") if holder.get(name))
    return f"{who}, job {job or '(none)'}"
