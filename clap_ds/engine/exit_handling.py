"""How a run ends, in its record, in this rank's last word and on the terminal."""

from __future__ import annotations

import re
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NamedTuple

import torch
import torch.distributed as dist

from clap_ds.config.errors import UserError, printable
from clap_ds.distributed import error_file, init, watchdog
from clap_ds.distributed.error_file import leave_word
from clap_ds.distributed.init import Ranks
from clap_ds.run_records.environment import peak_memory_bytes
from clap_ds.run_records.run_dir import RunDirectory, State

STOP_SIGNALS = watchdog.SIGNALS
_NO_MEMORY = ("can't allocate memory", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
_LESS_MEMORY = (
    "less is needed by a smaller train_micro_batch_size_per_gpu (`clap-plan --find_micro_batch` calculates the largest)"
)
_LOST = re.compile(
    r"gloo.*(by peer|Broken pipe)|Timed out waiting \d+ms|ncclRemoteError|remote process exit|communicator was aborted"
    "|collective operation timeout",
    re.DOTALL,
)


class NonFiniteError(RuntimeError):
    """The loss, its gradient or the weights became NaN or infinite; raised on all ranks."""


class Interrupted(BaseException):
    """A signal stopped the run. SLURM announces the end of the allotted time by USR1."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number
        self.state: State = "timeout" if number == signal.SIGUSR1 else "terminated"


class Ending(NamedTuple):
    """Of a run that didn't complete."""

    state: State
    error: str  # in its summary
    kind: str  # of this rank's last word
    word: str
    said: str | None  # on the terminal; None: the traceback
    code: int = 1


def ending_of(error: BaseException, rank: int, what: str) -> Ending:
    """How a run ends by an exception on a rank; `what` was too large where memory is exhausted."""
    text = str(error)
    first_line, failed = text.partition("\n")[0], f"rank {rank}: {text}"
    if isinstance(error, Interrupted):
        stopped = f"stopped by {text}"
        return Ending(error.state, stopped, error_file.STOPPED, stopped, f"rank {rank}: {stopped}", 128 + error.number)
    if isinstance(error, NonFiniteError):
        return Ending("failed", text, error_file.ERROR, text, f"error: {failed}")
    if is_out_of_memory(error):
        device = torch.device("cuda" if torch.cuda.is_initialized() else "cpu")
        at = f"out of memory at {what}, after a peak of {peak_memory_bytes(device) / 1e9:.1f} GB"
        said = f"error: rank {rank}: {at}: {first_line}\n{_LESS_MEMORY}, or clap.model.activation_checkpointing"
        return Ending("out_of_memory", f"rank {rank}: {at}", error_file.OUT_OF_MEMORY, at, said)
    if is_connection_lost(error):
        said = f"error: rank {rank}: another rank is gone: its connection to this one was lost ({first_line})"
        return Ending("failed", failed, error_file.LOST_PEER, first_line, said)
    if isinstance(error, ValueError | StopIteration):  # about settings and data
        return Ending("failed", failed, error_file.ERROR, text, f"error: {failed}")
    return Ending("failed", failed, error_file.ERROR, f"{type(error).__name__}: {text}", None)


@contextmanager
def recorded_ending(record: RunDirectory, ranks: Ranks, what: str) -> Iterator[None]:
    """Record how what is done in here ends, and end this process unless it completes or raises UserError.

    Args:
        what: was too large where memory is exhausted: "micro-batch 616 on NVIDIA H100".
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        _ignore_signals()  # the first one counts; recording its end must not be interrupted
        stop = Interrupted(number)
        record.finish(
            stop.state, f"stopped by {stop}"
        )  # by every rank: to a later one the others' end looks like a failure
        raise stop

    previous = {number: signal.signal(number, interrupt) for number in STOP_SIGNALS}
    try:
        yield
        watchdog.stop()
        if ranks.is_first:
            record.finish("completed")
    except UserError as error:
        if ranks.is_first:
            record.finish("failed", str(error))
        raise
    except (Interrupted, Exception) as error:
        _ignore_signals()  # launchers send them as soon as another rank has ended, perhaps for the same reason
        end = ending_of(error, ranks.rank, what)
        leave_word(end.kind, end.word, end.code)
        if ranks.is_first or not isinstance(error, Interrupted | NonFiniteError):  # which are every rank's
            record.finish(end.state, end.error)
            print(printable(end.said or traceback.format_exc(), "\n"), file=sys.stderr, flush=True)
        if isinstance(error, NonFiniteError):
            dist.barrier()  # every rank is here; a launcher would end rank 0 before it has spoken if another left
        init.leave(end.code)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _ignore_signals() -> None:
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the GPU's or the host's memory is exhausted. CUDA, cuBLAS and NCCL don't ask torch's allocator for theirs."""
    said = isinstance(error, RuntimeError) and any(words in str(error) for words in _NO_MEMORY)
    return said or isinstance(error, torch.OutOfMemoryError | MemoryError)


def is_connection_lost(error: BaseException) -> bool:
    """Whether another process is gone or gives no answer, as gloo, NCCL and torch's store word it."""
    lost = isinstance(error, RuntimeError) and _LOST.search(str(error)) is not None
    return lost or isinstance(error, dist.DistNetworkError | dist.DistStoreError)
