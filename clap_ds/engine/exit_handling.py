"""Record and print how a run ends, in its summary, this rank's error file and the terminal."""

from __future__ import annotations

import re
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import torch
import torch.distributed as dist

from clap_ds.config.errors import CollectiveUserError, UserError, printable
from clap_ds.distributed import error_file, init, watchdog
from clap_ds.distributed.error_file import fault_of, is_connection_lost, write_error_file
from clap_ds.distributed.init import Ranks
from clap_ds.run_records.environment import peak_memory_bytes
from clap_ds.run_records.run_dir import RunDirectory, State

STOP_SIGNALS = watchdog.SIGNALS
_NO_MEMORY = re.compile("can't allocate memory|out of memory|CUBLAS_STATUS_ALLOC_FAILED")
SWALLOWED_S = 20.0
"""Time after which a process ends whose signal's exception a library has caught."""


class NonFiniteError(RuntimeError):
    """The loss, its gradient or the weights became NaN or infinite; raised on all ranks."""

    fault = error_file.ALL_RANKS


class TooLittleMemoryError(CollectiveUserError):
    """A run can't fit in memory; raised on all ranks."""


class StopSignal(BaseException):
    """A signal stopped the run. SLURM sends USR1 before the time limit."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number
        self.state: State = "timeout" if number == signal.SIGUSR1 else "terminated"


def outcome_of(error: BaseException, what: str) -> tuple[State, str, str, str]:
    """Return how a run ends after an exception: its state, the kind and message in this rank's
    error file, and what to print. `what` is what was too large if memory is exhausted."""
    text = str(error)
    first_line = str(error).partition("\n")[0]
    if isinstance(error, StopSignal):
        return error.state, error_file.STOPPED, f"stopped by {text}", f"stopped by {text}"
    if is_out_of_memory(error):
        device = torch.device("cuda" if torch.cuda.is_initialized() else "cpu")
        at = f"out of memory at {what}, after a peak of {peak_memory_bytes(device) / 1e9:.1f} GB"
        return (
            "out_of_memory",
            error_file.OUT_OF_MEMORY,
            at,
            f"{at}: {first_line}\n{advise_on_memory(device.type)}",
        )
    if is_connection_lost(error):
        said = f"another rank is gone: its connection to this one was lost ({first_line})"
        return "failed", error_file.LOST_PEER, first_line, said
    if isinstance(error, NonFiniteError | ValueError | StopIteration):  # in settings or data
        return "failed", error_file.ERROR, text, text
    return "failed", error_file.ERROR, f"{type(error).__name__}: {text}", traceback.format_exc()


def advise_on_memory(device_type: str) -> str:
    """Return what to do if a device's memory is too small, `cuda` or `cpu`."""
    advice = "reduce train_micro_batch_size_per_gpu, or set clap.model.activation_checkpointing"
    if device_type == "cuda":
        return (
            f"{advice} (`clap-ds plan --find_micro_batch` calculates the largest micro-batch that fits,"
            " `clap.bench.find_micro_batch` measures it)"
        )
    return f"{advice}, or run a packaged configuration for CPUs: htsat_tiny_cpu or, to train, train_demo_cpu"


@contextmanager
def record_outcome(record: RunDirectory, ranks: Ranks, what: Callable[[], str]) -> Iterator[None]:
    """Record how the body ends, and end this process unless it completes or raises UserError.
    `what` returns what was too large if memory is exhausted, such as "micro-batch 616 on NVIDIA
    H100"."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        _ignore_signals()  # the first one counts, and recording it must not be interrupted
        stop = StopSignal(number)
        record.finish(
            stop.state, f"stopped by {stop}"
        )  # every rank: later ones see the others' end as a failure
        signal.signal(signal.SIGALRM, lambda *_: exit_if_caught(stop))
        signal.setitimer(signal.ITIMER_REAL, SWALLOWED_S, SWALLOWED_S)
        raise stop

    def exit_if_caught(stop: StopSignal) -> None:
        if (
            sys.exception() is not stop
        ):  # else it is on its way, and a block that it leaves may wait for a checkpoint
            init.exit_now(128 + stop.number)

    previous = {number: signal.signal(number, interrupt) for number in STOP_SIGNALS}
    try:
        yield
        watchdog.stop()
        if ranks.is_main_process:
            record.finish("completed")
    except UserError as error:
        if ranks.is_main_process:
            record.finish(
                "out_of_memory" if isinstance(error, TooLittleMemoryError) else "failed", str(error)
            )
        raise
    except (StopSignal, Exception) as error:
        _ignore_signals()  # launchers send them as soon as another rank has ended
        state, kind, message, said = outcome_of(error, what())
        code, word = (128 + error.number, "") if isinstance(error, StopSignal) else (1, "error: ")
        write_error_file(kind, message, code, fault=fault_of(error))
        of_all = isinstance(error, StopSignal | NonFiniteError)  # raised on all ranks
        if ranks.is_main_process or not of_all:
            record.finish(state, message if of_all else f"rank {ranks.rank}: {message}")
            speaker = "" if of_all else f"rank {ranks.rank}: "
            print(printable(f"{word}{speaker}{said}", "\n"), file=sys.stderr, flush=True)
        if isinstance(error, NonFiniteError):
            # if another rank left, a launcher would end rank 0 before it has printed
            dist.barrier()
        init.leave(code)
    finally:
        signal.alarm(0)
        for number, handler in previous.items():
            signal.signal(number, handler)


def _ignore_signals() -> None:
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether the GPU's or host's memory is exhausted. CUDA, cuBLAS and NCCL allocate
    without torch and raise others."""
    said = isinstance(error, RuntimeError) and _NO_MEMORY.search(str(error)) is not None
    return said or isinstance(error, torch.OutOfMemoryError | MemoryError)
