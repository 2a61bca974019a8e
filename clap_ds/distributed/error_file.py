"""Error files: why each rank ended, in the run directory or, before it exists, in the job's folder."""

from __future__ import annotations

import json
import threading
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from clap_ds.config.files import own_folder, read_json, write_atomically
from clap_ds.config.redaction import redacted_all

USER, ERROR, OUT_OF_MEMORY, LOST_PEER = "user", "error", "out_of_memory", "lost_peer"
STOPPED, UNREACHABLE, STALL = "stopped", "unreachable", "stall"
CONSEQUENCES = (LOST_PEER, STOPPED)
"""Consequences of other failures; these never replace an error file."""
ERRORS = "errors"  # folder of error files in the run directory or the job's


@dataclass(frozen=True)
class RankError:
    """Why and when a rank ended; `ranks` and `hosts` are missing or at fault."""

    at: float
    rank: int
    host: str
    kind: str
    message: str
    code: int = 1
    stack: str = ""
    ranks: list[int] = field(default_factory=list)
    hosts: list[str] = field(default_factory=list)


class ThisRank:
    """This process's rank, and where it records why it ends: nowhere until it is placed."""

    def __init__(self) -> None:
        self.folder: Path | None = None
        self.rank, self.host = 0, ""
        self.started = threading.Event()  # with the first step

    def place(self, folder: Path, rank: int, host: str) -> None:
        self.folder, self.rank, self.host = folder / ERRORS, rank, host

    def write(
        self, kind: str, message: str, code: int, *, ranks: Sequence[int] = (), hosts: Sequence[str] = ()
    ) -> None:
        """Write why this rank ends, with the current exception's stack; ignore failures to write."""
        name, line = f"rank{self.rank}.json", "; ".join(message.strip().splitlines())
        if self.folder is None or (kind in CONSEQUENCES and (self.folder / name).exists()):
            return
        stack = traceback.format_exc()
        error = RankError(time.time(), self.rank, self.host, kind, line, code, stack, [*ranks], [*hosts])
        with suppress(OSError), own_folder(self.folder) as there:
            write_atomically(there / name, json.dumps(redacted_all(asdict(error))) + "\n")


this_rank = ThisRank()  # a process is one rank
set_error_dir, write_error_file = this_rank.place, this_rank.write


def read_errors(folder: Path) -> list[RankError]:
    """Read all ranks' error files, skipping unreadable ones."""
    errors = []
    for path in (folder / ERRORS).glob("rank*.json"):
        with suppress(OSError, ValueError, TypeError):
            errors.append(RankError(**read_json(path)))
    return errors
