"""Memory that worker processes fill and the training process reads, mapped once."""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor


def shared_empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor of zeros on the CPU, for this process and those forked from it. OSError where there is no room for it.

    Not in /dev/shm, which is small in containers; a page takes room once something is written to it.
    """
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize)
    return torch.frombuffer(memory, dtype=dtype).view(*shape)


def lock_pages(tensor: Tensor) -> bool:
    """Let the GPU copy from a tensor while the host goes on, as after `Tensor.pin_memory`. Returns whether CUDA can do that.

    `unlock_pages` before the memory goes. After workers are forked, as they need none of it.
    """
    size = tensor.numel() * tensor.element_size()
    if not int(torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), size, 0)):
        return True
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda")  # CUDA's last error, which the next kernel would raise
    return False


def unlock_pages(tensor: Tensor) -> None:
    """Copies from it are over."""
    torch.cuda.cudart().cudaHostUnregister(tensor.data_ptr())
