"""How ranks agree: every function here is a collective, and none leaves a rank waiting for one that gave up.

What all have goes to rank 0, and what that makes of it to all: gloo's all-reduce and all-gather are rings, whose hops grow with
the number of ranks. It goes through the hosts: a GPU would keep memory for each peer.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from clap_ds.config.errors import AgreedError

T = TypeVar("T")
R = TypeVar("R")


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def hosts() -> dist.ProcessGroup:
    """All ranks, connected through their hosts."""
    return _hosts_of(dist.group.WORLD)


@lru_cache(1)
def _hosts_of(world: object) -> Any:
    return dist.new_group(backend="gloo")


def gather(value: T) -> list[T]:
    """Every rank's value, by rank, on rank 0; on each other one its own alone."""
    if world_size() == 1:
        return [value]
    own = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    longest = gather_tensor(torch.tensor(len(own))).amax()
    dist.broadcast(longest, src=0, group=hosts())
    rows = gather_tensor(F.pad(own, (0, int(longest) - len(own))))
    return [pickle.loads(row.numpy()) for row in rows]  # what follows a pickle's end isn't read


def gather_tensor(own: Tensor) -> Tensor:
    """(ranks, *shape): every rank's tensor, all of one shape and dtype, on rank 0's host; on each other rank its own alone."""
    own = own.cpu()
    if world_size() == 1:
        return own[None]
    everyone = own.new_empty((world_size() if rank() == 0 else 1, *own.shape))
    everyone[0] = own
    dist.gather(own, [*everyone] if rank() == 0 else None, group=hosts())
    return everyone


def judged(value: T, judge: Callable[[list[T]], R]) -> R:
    """What rank 0 makes of every rank's value, by rank, on every rank."""
    everyone = gather(value)
    return on_first(lambda: judge(everyone))


def agree(problem: str | None) -> None:
    """Stop every rank when one has a problem: an AgreedError on all, with the first rank's."""
    if said := judged(problem, _first_problem):
        raise AgreedError(said)


def _first_problem(problems: list[str | None]) -> str | None:
    number, text = next(((number, text) for number, text in enumerate(problems) if text is not None), (0, None))
    return f"rank {number}: {text}" if None in problems and text is not None else text


def together(build: Callable[[], T]) -> T:
    """What `build` gives on every rank; where it raises ValueError on any, an AgreedError on all."""
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
    if world_size() > 1:
        dist.broadcast_object_list(answer, group=hosts())
    result, problem = answer[0]
    if problem is not None:
        raise ValueError(problem)
    return result
