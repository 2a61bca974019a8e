"""A rank's last word: one small file that says what failed, for whoever asks later why the run ended.

torch elastic's format, with the rank's place beside. In the run directory once there is one, before that in the job's folder,
if a job started the rank. Which word is the cause is left to `clap_ds.ranks.verdict`. Standard library only.
"""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from clap_ds.config.secrets import redacted_all

USER, ERROR, OUT_OF_MEMORY, LOST_PEER = "user", "error", "out_of_memory", "lost_peer"
STOPPED, UNREACHABLE, STALL = "stopped", "unreachable", "stall"
CONSEQUENCES = (LOST_PEER, STOPPED)
"""What a rank reports because of something else; never to blame, and no word that is there is replaced by it."""
WORDS = "errors"
"""Folder of the ranks' words, in the run directory or the job's."""
SHOWN = 8  # ranks or hosts in one line
_place: tuple[Path, int, str] | None = None  # a process is one rank


def speak_in(folder: Path, rank: int, host: str) -> None:
    """From here on this rank's words go there."""
    global _place
    _place = folder / WORDS, rank, host


def leave_word(kind: str, message: str, code: int, *, ranks: Sequence[int] = (), missing: Sequence[str] = ()) -> None:
    """Write why this rank ends, with the stack of the exception being handled; not at all where it can't be written.

    Args:
        kind: one of this module's.
        message: its lines become one.
        code: the exit code that follows.
        ranks: that are to blame, for `STALL`.
        missing: hosts that didn't come, for `UNREACHABLE`; that are to blame, for `STALL`.
    """
    if _place is None:
        return
    folder, rank, host = _place
    path, stack = folder / f"rank{rank}.json", traceback.format_exc()
    if kind in CONSEQUENCES and path.exists():
        return
    extra = {"py_callstack": stack, "timestamp": f"{time.time():.3f}", "host": host, "rank": rank, "kind": kind}
    extra |= {"code": code, "ranks": list(ranks), "missing": list(missing)}
    content = {"message": {"message": "; ".join(message.strip().splitlines()), "extraInfo": extra}}
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(f".{os.getpid()}")
        draft.write_text(json.dumps(redacted_all(content)) + "\n")
        os.replace(draft, path)


def some(names: Sequence[object]) -> str:
    """As many of them as fit in a line."""
    return ", ".join(map(str, names[:SHOWN])) + (", …" if len(names) > SHOWN else "")
