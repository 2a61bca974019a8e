"""Collectives in which ranks exchange values and errors; an error on one rank blocks no other.

They use gloo: NCCL would keep GPU memory for each peer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, TypeVar

import torch.distributed as dist

from clap_ds.config.errors import CollectiveUserError

T = TypeVar("T")
R = TypeVar("R")


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def hosts() -> dist.ProcessGroup:
    """Return the gloo group of all ranks."""
    return _hosts_of(dist.group.WORLD)


@lru_cache(1)
def _hosts_of(world: object) -> Any:
    return dist.new_group(backend="gloo")


def gather(value: T) -> list[T]:
    """Return every rank's value, by rank, on rank 0, and only the own value elsewhere."""
    if world_size() == 1:
        return [value]
    everyone = [value] * (world_size() if rank() == 0 else 1)
    dist.gather_object(value, everyone if rank() == 0 else None, group=hosts())
    return everyone


def reduce_on_rank0(value: T, reduce: Callable[[list[T]], R]) -> R:
    """Return, on every rank, the result of `reduce` on rank 0 for all ranks' values."""
    everyone = gather(value)
    return run_on_rank0(lambda: reduce(everyone))


def _first_problem(problems: list[str | None]) -> str | None:
    if not all(problems):  # name the rank
        problems = [text and f"rank {number}: {text}" for number, text in enumerate(problems)]
    return next(filter(None, problems), None)


@contextmanager
def raise_on_all_ranks() -> Iterator[None]:
    """Run the body on every rank. Raises CollectiveUserError on all ranks at the end if it raises ValueError on any."""
    problem = None
    try:
        yield
    except ValueError as error:
        problem = str(error)
    if said := reduce_on_rank0(problem, _first_problem):
        raise CollectiveUserError(said)


def run_on_rank0(task: Callable[[], T]) -> T:
    """Run a task on rank 0 and return its result on every rank. Raises ValueError on all if it raises that or OSError."""
    answer: list[Any] = [None, None]  # result, problem
    if rank() == 0:
        try:
            answer[0] = task()
        except (ValueError, OSError) as error:
            answer[1] = str(error)
    if world_size() > 1:
        dist.broadcast_object_list(answer, group=hosts())
    if answer[1] is not None:
        raise ValueError(answer[1])
    return answer[0]
