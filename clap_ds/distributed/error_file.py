"""Error files: why each rank ended, in the run directory or, before it exists, in the job's folder."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from clap_ds.config.files import own_folder, read_json, write_atomically
from clap_ds.config.redaction import redacted_all

USER, ERROR, OUT_OF_MEMORY, LOST_PEER = "user", "error", "out_of_memory", "lost_peer"
STOPPED, UNREACHABLE, STALL = "stopped", "unreachable", "stall"
CONSEQUENCES = (LOST_PEER, STOPPED)
"""Consequences of other failures; these never replace an error file."""
WORDS = "errors"  # folder of error files in the run directory or the job's
SHOWN = 8  # ranks or hosts listed per line
_place: tuple[Path, int, str] | None = None  # a process is one rank


@dataclass(frozen=True)
class RankError:
    """Why and when a rank ended; `ranks` and `hosts` are others that are missing or at fault."""

    at: float
    rank: int
    host: str
    kind: str
    message: str
    code: int
    stack: str
    ranks: list[int]
    hosts: list[str]


def set_error_dir(folder: Path, rank: int, host: str) -> None:
    """Set the folder of this rank's error files."""
    global _place
    _place = folder / WORDS, rank, host


def write_error_file(
    kind: str, message: str, code: int, *, ranks: Sequence[int] = (), hosts: Sequence[str] = ()
) -> None:
    """Write why this rank ends, with the current exception's stack; ignore failures to write."""
    if _place is None:
        return
    folder, rank, host = _place
    path, line = folder / f"rank{rank}.json", "; ".join(message.strip().splitlines())
    if kind in CONSEQUENCES and path.exists():
        return
    word = RankError(round(time.time(), 3), rank, host, kind, line, code, traceback.format_exc(), [*ranks], [*hosts])
    with suppress(OSError), own_folder(folder) as there:
        write_atomically(there / path.name, json.dumps(redacted_all(asdict(word))) + "\n")


def read_errors(folder: Path) -> list[RankError]:
    """Read all ranks' error files, skipping unreadable ones."""
    words = []
    for path in (folder / WORDS).glob("rank*.json"):
        with suppress(OSError, ValueError, TypeError):
            words.append(RankError(**read_json(path)))
    return words


def some(names: Sequence[object]) -> str:
    """Join as many names as fit in a line."""
    return ", ".join(map(str, names[:SHOWN])) + (", …" if len(names) > SHOWN else "")
