"""Error files: why each rank ended, in the run directory or, before it exists, in the job's
folder."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NoReturn

from clap_ds.utils.errors import CollectiveUserError, printable
from clap_ds.utils.files import hold_folder, read_json, write_atomically
from clap_ds.utils.redaction import redact_all

# Kinds of error. Ranks can't record that they were killed. `KILLED` is also the fault of an error
# if a data worker was killed.
USER = "user"
ERROR = "error"
OUT_OF_MEMORY = "out_of_memory"
LOST_PEER = "lost_peer"
STOPPED = "stopped"
UNREACHABLE = "unreachable"
STALL = "stall"
SIGNAL = "signal"
KILLED = "killed"
CONSEQUENCES = (LOST_PEER, STOPPED)
"""Consequences of other failures; these never replace an error file."""
ERRORS = "errors"  # folder of error files in the run directory or the job's

# Whose fault an error may be: the program's; a host's; a host's without Python or a package; of a
# connection, of which either host may be broken; of what all ranks share, such as settings.
PROGRAM = ""
HOST = "host"
IMPORT = "import"
LINK = "link"
ALL_RANKS = "all_ranks"
# Of disks and mounts.
_HOST_ERRNOS = (
    errno.EIO, errno.ESTALE, errno.EREMOTEIO, errno.ENOTCONN, errno.ESHUTDOWN,
)  # fmt: skip
# CUDA's error codes that a call or kernel causes on any host: cudaErrorInvalidValue,
# MemoryAllocation, InvalidConfiguration, InvalidDeviceFunction, IllegalAddress,
# LaunchOutOfResources, Assert, MisalignedAddress, InvalidAddressSpace.
_CALL_CODES = (1, 2, 9, 98, 700, 701, 710, 716, 717)
# The same in texts of cuBLAS and NCCL, which have no codes.
_CALL = re.compile(
    "illegal memory access|misaligned address|device-side assert|out of memory|ncclInvalid"
)
# Messages of gloo, torch's store and NCCL if another process ended or doesn't respond.
_LOST_CONNECTION = re.compile(
    r"gloo/|Timed out waiting \d+ms|ncclRemoteError|remote process exit|communicator was aborted"
    "|collective operation timeout"
)


@dataclass(frozen=True)
class RankError:
    """Why and when a rank ended.

    Attributes:
        at: seconds since the epoch.
        code: exit code.
        ranks: those that are missing or at fault; so are `hosts`.
        fault: whose an ERROR may be.
    """

    at: float
    rank: int
    host: str
    kind: str
    message: str
    code: int = 1
    stack: str = ""
    ranks: list[int] = field(default_factory=list)
    hosts: list[str] = field(default_factory=list)
    fault: str = PROGRAM


class ThisRank:
    """This process's rank, and where it records why it ends: nowhere until it is placed.

    Attributes:
        started: set with the first step.
    """

    def __init__(self) -> None:
        self.folder: Path | None = None
        self.rank = 0
        self.host = ""
        self.started = threading.Event()

    def place(self, folder: Path, rank: int, host: str) -> None:
        """Set the run directory or job's folder, and this process's rank and host."""
        self.folder = folder / ERRORS
        self.rank = rank
        self.host = host

    def write(
        self,
        kind: str,
        message: str,
        code: int,
        *,
        ranks: Sequence[int] = (),
        hosts: Sequence[str] = (),
        fault: str = PROGRAM,
    ) -> None:
        """Write why this rank ends, with the current exception's stack; ignore failures to
        write."""
        if self.folder is None:
            return
        name = f"rank{self.rank}.json"
        if kind in CONSEQUENCES and (self.folder / name).exists():
            return
        line = "; ".join(message.strip().splitlines())
        # A signal may have interrupted an import, which a stack would need.
        stack = "" if kind == STOPPED else traceback.format_exc()
        error = RankError(
            time.time(), self.rank, self.host, kind, line, code, stack, [*ranks], [*hosts], fault
        )
        with suppress(OSError), hold_folder(self.folder) as folder:
            write_atomically(folder / name, json.dumps(redact_all(asdict(error))) + "\n")


this_rank = ThisRank()  # a process is one rank
set_error_dir = this_rank.place
write_error_file = this_rank.write


def write_stopped(number: int) -> None:
    """Write that a signal ends this rank."""
    write_error_file(STOPPED, f"stopped by {signal.Signals(number).name}", 128 + number)


def read_errors(folder: Path) -> list[RankError]:
    """Read all ranks' error files, skipping unreadable ones."""
    errors = []
    for path in (folder / ERRORS).glob("rank*.json"):
        with suppress(OSError, ValueError, TypeError):
            errors.append(RankError(**read_json(path)))
    return errors


def find_fault(error: BaseException) -> str:
    """Return whose fault an exception may be: its attribute `fault` or, for those of libraries, by
    type and error code."""
    if hasattr(error, "fault"):
        return str(error.fault)
    if isinstance(error, CollectiveUserError):
        return ALL_RANKS
    if isinstance(error, ImportError):
        return IMPORT
    text = str(error)
    if isinstance(error, OSError):
        # torch raises a data worker's error again without its number. Clients of remote files use
        # EIO with texts of their own.
        host_texts = [f"[Errno {number}] {os.strerror(number)}" for number in _HOST_ERRNOS]
        return HOST if any(host_text in text for host_text in host_texts) else PROGRAM
    if isinstance(error, RuntimeError):
        is_programs = getattr(error, "error_code", None) in _CALL_CODES or _CALL.search(text)
        if "NCCL error" in text and not is_programs:
            return LINK
        if "CUDA error" in text and not is_programs:
            return HOST
    if error.__cause__ is not None:
        return find_fault(error.__cause__)
    return PROGRAM


def is_connection_lost(error: BaseException) -> bool:
    """Return whether another process ended or doesn't respond, by the messages of gloo, NCCL and
    torch's store."""
    distributed = sys.modules.get("torch.distributed")
    for name in ("DistNetworkError", "DistStoreError"):
        if isinstance(error, getattr(distributed, name, ())):
            return True
    return isinstance(error, RuntimeError) and _LOST_CONNECTION.search(str(error)) is not None


class UnreachableError(RuntimeError):
    """A rank or host, named in the message, is unreachable.

    Attributes:
        hosts: those of the missing ranks.
        fault: LINK on a rank that can't reach another one, of which either may be broken.
    """

    def __init__(self, message: str, hosts: Sequence[str] = (), fault: str = PROGRAM) -> None:
        super().__init__(message)
        self.hosts = list(hosts)
        self.fault = fault


def exit_unreachable(error: UnreachableError) -> NoReturn:
    """Record and print the error, and exit at once."""
    write_error_file(UNREACHABLE, str(error), 1, hosts=error.hosts, fault=error.fault)
    print("error:", printable(str(error)), file=sys.stderr, flush=True)
    os._exit(1)
