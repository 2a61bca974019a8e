"""Worker processes that load data, and memory that they fill and the training process reads."""

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

from clap_ds.distributed.init import keep_freed_memory

_LIKELY_CAUSES = {
    -signal.SIGKILL: "; the host has most likely run out of memory: use fewer workers or a smaller shuffle_buffer",
    -signal.SIGBUS: "; shared memory (/dev/shm) is most likely full: make it larger or use fewer workers",
}

T = TypeVar("T")


class Loader(Iterator[T], Generic[T]):
    """A `DataLoader` whose workers compute in one thread and leave signals to the rank. torch's global generator stays as it
    is. `section` of the settings has `num_workers`, `options` are the DataLoader's."""

    def __init__(self, dataset: Dataset[Any], *, num_workers: int, section: str, **options: Any) -> None:
        self._section = section
        handler = signal.getsignal(signal.SIGCHLD)
        generator = torch.Generator()  # instead of the global one, and so dropout's
        self._loaded: Iterator[T] = iter(
            DataLoader(dataset, num_workers=num_workers, worker_init_fn=_start_worker, generator=generator, **options)
        )
        if handler is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGCHLD, handler)

    def __next__(self) -> T:
        try:
            return next(self._loaded)
        except StopIteration:
            raise
        except Exception as error:  # of several kinds, depending on what a worker's end leaves undone
            for worker in getattr(self._loaded, "_workers", []):
                worker.join(timeout=1)  # the end may show a little later than what it left undone
                if code := worker.exitcode:
                    self.close()
                    how = f"{signal.Signals(-code).name}{_LIKELY_CAUSES.get(code, '')}" if code < 0 else f"code {code}"
                    death = f"a data worker (process {worker.pid}) was ended by {how}"
                    raise ValueError(f"{self._section}.num_workers: {death}") from error
            raise

    def close(self) -> None:
        """Stop the workers and wait for them. The iterator's finaliser would, too, but swallow what a signal raises then."""
        loaded, self._loaded = self._loaded, iter(())
        getattr(loaded, "_shutdown_workers", lambda: None)()


def _start_worker(worker: int) -> None:
    """Set up a worker process. It lets a first SIGTERM pass, for its rank still has a step to finish, and obeys the next."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: signal.signal(number, signal.SIG_DFL))
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    keep_freed_memory()  # decoders ask for megabytes of it for every clip
    torch.set_num_threads(1)


def shared_empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Make a tensor of zeros for this process and those forked from it: not in /dev/shm, which is small in containers."""
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize)
    return torch.frombuffer(memory, dtype=dtype).view(*shape)


def lock_pages(tensor: Tensor) -> bool:
    """Let the GPU copy from a tensor while the host goes on, until `unlock_pages`. Returns whether CUDA can do that."""
    size = tensor.numel() * tensor.element_size()
    if not int(torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), size, 0)):
        return True
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda")  # CUDA's last error, which the next kernel would raise
    return False


def unlock_pages(tensor: Tensor) -> None:
    torch.cuda.cudart().cudaHostUnregister(tensor.data_ptr())
