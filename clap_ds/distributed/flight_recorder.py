"""Read torch's Flight Recorder: the collectives that a rank has started and completed.

Standard library only, except in a rank.
"""

from __future__ import annotations

import io
import os
import pickle
from contextlib import suppress
from pathlib import Path
from typing import Any

from clap_ds.config.files import read_bytes

Progress = dict[str, tuple[int, int]]
"""Last started and last completed collective by process group, such as `nccl 0`; all ranks start
them in the same order."""
DUMP = "nccl_rank"
"""Stem of the files that NCCL's own watchdog writes if a collective times out; it needs no
Python."""


def prepare() -> None:
    """Make NCCL record when the device starts collectives. Call before creating a process group."""
    defaults = {
        "TORCH_NCCL_ENABLE_TIMING": "1",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_BUFFER_SIZE": "2000",
    }
    os.environ.update({**defaults, **os.environ})


def own_progress() -> Progress:
    from torch._C import _distributed_c10d as c10d

    found: Progress = {}
    for backend, name in (("nccl", "_dump_nccl_trace"), ("gloo", "_dump_fr_trace")):
        if dump := getattr(c10d, name, None):
            found |= _progress(backend, dump(False, False, False))
    return found


def dumped_progress(folder: Path, rank: int) -> Progress:
    """Return the progress in a rank's dump; empty if there is none."""
    with suppress(OSError, ValueError, LookupError, TypeError, EOFError, pickle.UnpicklingError):
        return _progress("nccl", read_bytes(folder / f"{DUMP}{rank}"))
    return {}


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"expected plain values, found {module}.{name}")


def _progress(backend: str, dump: bytes) -> Progress:
    """Return the progress in a dump. Queued collectives of gloo count as started, those of NCCL
    don't."""
    begun = f"last_{'started' if backend == 'nccl' else 'enqueued'}_collective"
    done = "last_completed_collective"
    status = _PlainUnpickler(io.BytesIO(dump)).load()["pg_status"]
    return {
        f"{backend} {group}": (max(of[begun], of[done]), of[done]) for group, of in status.items()
    }
