"""How ranks agree: every function here is a collective, and none leaves a rank waiting for one that gave up.

Without a process group this is the only rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from clap_ds.config.errors import AgreedError

T = TypeVar("T")


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def gather(value: T) -> list[T]:
    """Every rank's value, by rank, on every rank."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value)
    return values


def gather_tensor(own: Tensor) -> Tensor:
    """(ranks, *shape): every rank's tensor, by rank, on every rank; they are of one shape and dtype."""
    if world_size() == 1:
        return own[None]
    everyone = [torch.empty_like(own) for _ in range(world_size())]
    dist.all_gather(everyone, own)
    return torch.stack(everyone)


def agree(problem: str | None) -> None:
    """Stop every rank when one has a problem: an AgreedError on all, with the first rank's and how many ranks share it."""
    problems = gather(problem)
    found = [(number, text) for number, text in enumerate(problems) if text is not None]
    if found:
        others = f" (and {len(found) - 1} more ranks)" if len(found) > 1 else ""
        where = f"rank {found[0][0]}{others}: " if len(found) < len(problems) else ""
        raise AgreedError(f"{where}{found[0][1]}")


def together(build: Callable[[], T]) -> T:
    """Build something on every rank; where `build` raises ValueError on any, an AgreedError on all."""
    with agreed():
        built = build()
    return built


@contextmanager
def agreed() -> Iterator[None]:
    """What every rank does in here; where one raises ValueError, an AgreedError on all at the end."""
    problem = None
    try:
        yield
    except ValueError as error:
        problem = str(error)
    agree(problem)


def on_first(task: Callable[[], T]) -> T:
    """What a task gives on rank 0, on every rank; a ValueError on every rank where it raises one, or an OSError."""
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
