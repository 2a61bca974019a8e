"""Collectives in which ranks exchange values and errors; an error on one rank blocks no other.

They use gloo: NCCL would keep GPU memory for each peer. Values are exchanged as JSON, not as
torch's pickles, in which a peer could send code. So on any number of ranks tuples become lists and
paths text, and dictionaries' keys must be text.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from clap_ds.utils.errors import CollectiveUserError

MOST_BYTES = 64 * 2**20
"""Limit for a value: a peer's claim of its size is memory allocated here."""
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


def _encode(value: Any) -> Tensor:
    return torch.frombuffer(
        bytearray(json.dumps(value, default=os.fspath).encode()), dtype=torch.uint8
    )


def _decode(content: Tensor) -> Any:
    return json.loads(content.numpy().tobytes())


def _pad(content: Tensor) -> Tensor:
    """Pad this rank's JSON with spaces to the longest of all ranks. A collective."""
    if world_size() == 1:
        return content
    size = torch.tensor(len(content))
    dist.all_reduce(size, dist.ReduceOp.MAX, group=hosts())
    if size > MOST_BYTES:
        raise RuntimeError(f"expected at most {MOST_BYTES:,} bytes from a rank, not {int(size):,}")
    padded = torch.full((int(size),), ord(" "), dtype=torch.uint8)
    padded[: len(content)] = content
    return padded


def gather_tensor(tensor: Tensor) -> list[Tensor]:
    """Return every rank's CPU tensor, of the same shape on all, by rank, on rank 0, and only the
    own one elsewhere."""
    if world_size() == 1:
        return [tensor]
    by_rank = [torch.empty_like(tensor) for _ in range(world_size())] if rank() == 0 else None
    dist.gather(tensor, by_rank, group=hosts())
    return by_rank or [tensor]


def gather(value: T) -> list[T]:
    """Return every rank's value, by rank, on rank 0, and only the own value elsewhere."""
    return [_decode(content) for content in gather_tensor(_pad(_encode(value)))]


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
    """Run the body on every rank. Raises CollectiveUserError on all ranks at the end if it raises
    ValueError on any."""
    problem = None
    try:
        yield
    except ValueError as error:
        problem = str(error)
    if said := reduce_on_rank0(problem, _first_problem):
        raise CollectiveUserError(said)


def run_on_rank0(task: Callable[[], T]) -> T:
    """Run a task on rank 0 and return its result on every rank. Raises ValueError on all if it
    raises that or OSError."""
    answer = _encode(None)
    if rank() == 0:
        try:
            answer = _encode({"result": task()})
        except (ValueError, OSError) as error:
            answer = _encode({"problem": str(error)})
    answer = _pad(answer)
    if world_size() > 1:
        dist.broadcast(answer, src=0, group=hosts())
    outcome = _decode(answer)
    if "problem" in outcome:
        raise ValueError(outcome["problem"])
    return outcome["result"]
