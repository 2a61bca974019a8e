"""`clap.debug`: when a run hangs or dies, every rank says where it was.

Crashes leave a Python stack, NCCL says what it does, a collective that takes too long fails, and the first rank that
fails has all the others write their stacks to `stacks/rank<N>-failing.txt` in the run directory: the one that is somewhere
else than the rest is the culprit (a job writes others beside, of ranks that stand still). Off, it costs nothing. Leaves how a
run's end is recorded to `clap_ds.engine.session`.
"""

from __future__ import annotations

import faulthandler
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, TextIO

from clap_ds.config.sections import DebugSettings
from clap_ds.dist.distributed import Ranks

LOOK_S = 0.5  # between a rank's looks whether another one failed
_KEY = "clap/dump_stacks"


def prepare(settings: DebugSettings) -> None:
    """Set what libraries read when they start; call before the process group is made. Variables the user set stay."""
    if not settings.enabled:
        return
    faulthandler.enable(all_threads=True)
    for name, value in {
        "NCCL_DEBUG": settings.nccl_debug,
        "NCCL_DEBUG_SUBSYS": settings.nccl_debug_subsys,
        "TORCH_DISTRIBUTED_DEBUG": "INFO",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_SHOW_CPP_STACKTRACES": "1",
    }.items():
        os.environ.setdefault(name, value)


@contextmanager
def watch(settings: DebugSettings, ranks: Ranks, run_directory: Path) -> Iterator[None]:
    """While the body runs, write this rank's stacks as soon as it or any other rank leaves it by an exception."""
    if not settings.enabled or ranks.world_size == 1:
        yield
        return
    folder = run_directory / "stacks"
    folder.mkdir(exist_ok=True)
    with (folder / f"rank{ranks.rank}-failing.txt").open("w", buffering=1) as file:
        faulthandler.enable(file, all_threads=True)
        over = threading.Event()
        watcher = threading.Thread(target=_wait_for_failure, args=(ranks, file, over), daemon=True, name="clap.debug")
        watcher.start()
        try:
            yield
        except BaseException as error:
            # Before this rank leaves, the others must have had the time to look and to write.
            _announce(f"rank {ranks.rank}: {type(error).__name__}: {error}")
            watcher.join(2 * LOOK_S + 2)
            time.sleep(2 * LOOK_S)
            raise
        finally:
            over.set()
            watcher.join(2 * LOOK_S + 2)
            faulthandler.enable(all_threads=True)


def _connect() -> Any:
    """An own connection to rank 0's store: the process group's is busy inside a collective that hangs."""
    import torch.distributed as dist

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=10), wait_for_workers=False)


def _announce(reason: str) -> None:
    with suppress(RuntimeError):  # rank 0 is gone, which the others see by themselves
        _connect().set(_KEY, reason[:2000])


def _wait_for_failure(ranks: Ranks, file: TextIO, over: threading.Event) -> None:
    reason = "rank 0 is gone"
    try:
        store = _connect()
        while not store.check([_KEY]):
            if over.wait(LOOK_S):
                return
        reason = store.get(_KEY).decode()
    except RuntimeError:
        if over.is_set():
            return
    file.write(f"# rank {ranks.rank} on {os.uname().nodename}, {time.strftime('%F %T')}; because {reason}\n")
    faulthandler.dump_traceback(file, all_threads=True)
