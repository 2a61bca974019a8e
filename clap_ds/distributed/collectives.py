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

# Limit for a value. A peer's claim of its size is memory allocated here.
MAX_BYTES = 64 * 2**20
T = TypeVar("T")
R = TypeVar("R")


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def hosts() -> dist.ProcessGroup:
    """Return the gloo group of all ranks."""
    return _new_gloo_group(dist.group.WORLD)


# The argument makes the cache forget the group of an earlier world.
@lru_cache(1)
def _new_gloo_group(world: object) -> Any:
    return dist.new_group(backend="gloo")


def _encode(value: Any) -> Tensor:
    """Return a value's JSON as uint8 [bytes]."""
    content = json.dumps(value, default=os.fspath).encode()
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def _decode(content: Tensor) -> Any:
    return json.loads(content.numpy().tobytes())


def _pad(content: Tensor) -> Tensor:
    """Pad this rank's JSON with spaces to the longest of all ranks. A collective."""
    if world_size() == 1:
        return content
    # Collectives of gloo need equal sizes on all ranks. JSON ignores trailing spaces.
    size = torch.tensor(len(content))
    dist.all_reduce(size, dist.ReduceOp.MAX, group=hosts())
    if size > MAX_BYTES:
        raise RuntimeError(f"expected at most {MAX_BYTES:,} bytes from a rank, not {int(size):,}")
    padded = torch.full((int(size),), ord(" "), dtype=torch.uint8)
    padded[: len(content)] = content
    return padded


def gather_tensor(tensor: Tensor) -> list[Tensor]:
    """Return every rank's CPU tensor, of the same shape on all, by rank, on rank 0, and only the
    own one elsewhere."""
    if world_size() == 1:
        return [tensor]
    if rank() != 0:
        dist.gather(tensor, group=hosts())
        return [tensor]
    by_rank = [torch.empty_like(tensor) for _ in range(world_size())]
    dist.gather(tensor, by_rank, group=hosts())
    return by_rank


def gather(value: T) -> list[T]:
    """Return every rank's value, by rank, on rank 0, and only the own value elsewhere."""
    return [_decode(content) for content in gather_tensor(_pad(_encode(value)))]


def reduce_on_rank0(value: T, reduce: Callable[[list[T]], R]) -> R:
    """Return, on every rank, the result of `reduce` on rank 0 for all ranks' values."""
    values = gather(value)
    return run_on_rank0(lambda: reduce(values))


def _merge_problems(problems: list[str | None]) -> str | None:
    """Return the first rank's problem, with its rank unless all ranks have one."""
    for rank, problem in enumerate(problems):
        if problem is not None:
            return problem if all(problems) else f"rank {rank}: {problem}"
    return None


@contextmanager
def raise_on_all_ranks() -> Iterator[None]:
    """Run the body on every rank. Raises CollectiveUserError on all ranks at the end if it raises
    ValueError on any."""
    problem = None
    try:
        yield
    except ValueError as error:
        problem = str(error)
    merged = reduce_on_rank0(problem, _merge_problems)
    if merged is not None:
        raise CollectiveUserError(merged)


def run_on_rank0(task: Callable[[], T]) -> T:
    """Run a task on rank 0 and return its result on every rank. Raises ValueError on all if it
    raises that or OSError."""
    content = _encode(None)
    if rank() == 0:
        try:
            content = _encode({"result": task()})
        except (ValueError, OSError) as error:
            content = _encode({"problem": str(error)})
    content = _pad(content)
    if world_size() > 1:
        dist.broadcast(content, src=0, group=hosts())
    outcome = _decode(content)
    if "problem" in outcome:
        raise ValueError(outcome["problem"])
    return outcome["result"]
