"""Run data worker processes, and allocate memory shared with them."""

from __future__ import annotations

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

_LIKELY_CAUSES = {
    -signal.SIGKILL: "; the host probably ran out of memory: use fewer workers or a smaller shuffle_buffer",
    -signal.SIGBUS: "; shared memory (/dev/shm) is probably full: enlarge it or use fewer workers",
}

T = TypeVar("T")


class WorkerKilledError(ValueError):
    """A signal ended a data worker: the host has too little memory, or is broken."""

    fault = KILLED


class Loader(Iterator[T], Generic[T]):
    """Wrap a `DataLoader` with single-threaded workers that leave signals to the rank, and keep
    torch's global generator. `section` names the settings' section with `num_workers`; `options`
    are passed to the DataLoader."""

    def __init__(
        self, dataset: Dataset[Any], *, num_workers: int, section: str, **options: Any
    ) -> None:
        self._section = section
        handler = signal.getsignal(signal.SIGCHLD)
        generator = torch.Generator()  # replaces the global one, which dropout uses
        self._loaded: Iterator[T] = iter(
            DataLoader(
                dataset,
                num_workers=num_workers,
                worker_init_fn=_start_worker,
                generator=generator,
                **options,
            )
        )
        if handler is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGCHLD, handler)

    def __next__(self) -> T:
        try:
            return next(self._loaded)
        except StopIteration:
            raise
        except Exception as error:  # its type depends on what a dead worker left unfinished
            for worker in getattr(self._loaded, "_workers", []):
                worker.join(timeout=1)  # the exit code may appear after the error
                if code := worker.exitcode:
                    self.close()
                    how = (
                        f"{signal.Signals(-code).name}{_LIKELY_CAUSES.get(code, '')}"
                        if code < 0
                        else f"code {code}"
                    )
                    death = f"a data worker (process {worker.pid}) was ended by {how}"
                    is_hosts = -code in (signal.SIGKILL, signal.SIGBUS, signal.SIGSEGV)
                    error_type = WorkerKilledError if is_hosts else ValueError
                    raise error_type(f"{self._section}.num_workers: {death}") from error
            raise

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
    keep_freed_memory()  # decoders allocate megabytes per clip
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
        torch.zeros(1, device="cuda")  # clears CUDA's last error, which the next kernel would raise
    return False


def unlock_pages(tensor: Tensor) -> None:
    torch.cuda.cudart().cudaHostUnregister(tensor.data_ptr())
