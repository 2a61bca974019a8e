"""Run data worker processes, and allocate memory shared with them."""

import contextlib
import math
import mmap
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from clap_ds.distributed.error_file import KILLED
from clap_ds.distributed.init import keep_freed_memory

# by exit code
_LIKELY_CAUSES = {
    -signal.SIGKILL: "; the host probably ran out of memory: "
    "use fewer workers or a smaller shuffle_buffer",
    -signal.SIGBUS: "; shared memory (/dev/shm) is probably full: enlarge it or use fewer workers",
}

T = TypeVar("T")


class WorkerKilledError(ValueError):
    """The end of a data worker by a signal: the host has too little memory, or is broken."""

    fault = KILLED


class Loader(Iterator[T], Generic[T]):
    """A `DataLoader` with single-threaded workers that leave signals to the rank. It leaves torch's
    global generator unchanged. `section` names the settings' section with `num_workers`; `options`
    are passed to the DataLoader."""

    def __init__(
        self, dataset: Dataset[Any], *, num_workers: int, section: str, **options: Any
    ) -> None:
        self._section = section
        handler = signal.getsignal(signal.SIGCHLD)
        loader = DataLoader(
            dataset,
            num_workers=num_workers,
            worker_init_fn=_start_worker,
            # replaces the global one, which dropout uses
            generator=torch.Generator(),
            **options,
        )
        self._loaded: Iterator[T] = iter(loader)
        # DataLoader's handler would raise a worker's death anywhere in training.
        if handler is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGCHLD, handler)

    def __next__(self) -> T:
        try:
            return next(self._loaded)
        except StopIteration:
            raise
        # Its type depends on what a dead worker left unfinished.
        except Exception as error:
            for worker in getattr(self._loaded, "_workers", []):
                # The exit code may appear after the error.
                worker.join(timeout=1)
                if worker.exitcode:
                    self.close()
                    raise self._death(worker.pid, worker.exitcode) from error
            raise

    def _death(self, process: int, code: int) -> ValueError:
        """Return the error of a worker that ended with an exit code, negative for a signal."""
        cause = f"code {code}"
        if code < 0:
            cause = signal.Signals(-code).name + _LIKELY_CAUSES.get(code, "")
        message = f"a data worker (process {process}) was ended by {cause}"
        is_fault_of_host = -code in (signal.SIGKILL, signal.SIGBUS, signal.SIGSEGV)
        error_type = WorkerKilledError if is_fault_of_host else ValueError
        return error_type(f"{self._section}.num_workers: {message}")

    def close(self) -> None:
        """Stop the workers and wait for them. Unlike the iterator's finalizer, don't swallow a
        signal's exception."""
        loaded = self._loaded
        self._loaded = iter(())
        getattr(loaded, "_shutdown_workers", lambda: None)()


def _start_worker(worker: int) -> None:
    """Set up a worker process. It ignores the first SIGTERM, because its rank finishes a step, but
    not the second."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: signal.signal(number, signal.SIG_DFL))
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    # Decoders allocate megabytes per clip.
    keep_freed_memory()
    torch.set_num_threads(1)


def shared_empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return a zero tensor shared with forked processes, but not in /dev/shm, which is small in
    containers."""
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize)
    return torch.frombuffer(memory, dtype=dtype).view(*shape)


def lock_pages(tensor: Tensor) -> bool:
    """Page-lock a tensor until `unlock_pages`, for asynchronous copies to the GPU. Return whether
    CUDA succeeded."""
    size = tensor.numel() * tensor.element_size()
    if not int(torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), size, 0)):
        return True
    with contextlib.suppress(RuntimeError):
        # Clears CUDA's last error, which the next kernel would raise.
        torch.zeros(1, device="cuda")
    return False


def unlock_pages(tensor: Tensor) -> None:
    torch.cuda.cudart().cudaHostUnregister(tensor.data_ptr())
