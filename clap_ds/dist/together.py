"""What ranks do together around a checkpoint: rank 0 acts and all know the outcome, so that none waits for one that gave up.

Without a process group this is the only rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def gather(value: T) -> list[T]:
    """Every rank's value, by rank, on every rank. A collective."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def on_first(task: Callable[[], T]) -> T:
    """What a task gives on rank 0, on every rank. A collective.

    Raises:
        ValueError: the task raised one, or an OSError; on every rank.
    """
    answer: list[Any] = [None]
    if rank() == 0:
        try:
            answer = [(task(), None)]
        except (ValueError, OSError) as error:
            answer = [(None, str(error))]
    if dist.is_initialized():
        dist.broadcast_object_list(answer)
    result, problem = answer[0]
    if problem is not None:
        raise ValueError(problem)
    return result
