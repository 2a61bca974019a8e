"""Shards of short clips with known captions and classes, and a tokenizer."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import pytest
import torch.distributed as dist

from clap_ds.distributed.init import Ranks
from clap_ds.weights.hub import train_tokenizer
from tests.data.tars import wav, write_tar
from tests.rank_pool import RankPool, in_group_of

KINDS = ("hum", "click", "hiss")
ALONE = Ranks(0, 1, 0, 1)
Members = list[tuple[str, bytes]]


def tone(number: int) -> np.ndarray:
    """Return a clip's unique 0.1 s tone."""
    return (np.sin(np.arange(4800) * 0.01 * (number + 1)) * 0.5).astype(np.float32)


def clip_members(number: int, description: Any) -> Members:
    """Return an item: a tone and a json."""
    audio = wav(tone(number))
    return [
        (f"{number:04d}.wav", audio),
        (f"{number:04d}.json", json.dumps(description).encode()),
    ]


def npy(values: np.ndarray) -> bytes:
    """Encode a NumPy file in row-major order."""
    np.save(file := io.BytesIO(), np.ascontiguousarray(values))
    return file.getvalue()


def description(number: int) -> dict[str, Any]:
    """Return two captions for even clips, one for odd ones, all distinct: equal captions' features
    may differ."""
    kind = KINDS[number % len(KINDS)]
    captions = [f"a {kind} number {number}", f"{kind} again, {number}"]
    return {"kind": kind, "caption": captions[: 2 - number % 2]}


def members_of(numbers: range) -> Members:
    """Return the items of clips."""
    members = []
    for number in numbers:
        members += clip_members(number, description(number))
    return members


def write_clips(path: Path, numbers: range, extra: Members | None = None) -> str:
    """Write a tar of clips, followed by `extra` members."""
    return str(write_tar(path, members_of(numbers) + (extra or [])))


def run_on_ranks(
    pool: RankPool, world_size: int, folder: Path, function: Callable[..., Any], *arguments: Any
) -> list[Any]:
    """Return `function`'s result on each rank of a group, whose ranks are `current_ranks()`."""
    store = str(folder / f"store-{uuid4()}")
    return pool.run(in_group_of, world_size, store, function, *arguments)[:world_size]


def current_ranks() -> Ranks:
    return Ranks(dist.get_rank(), dist.get_world_size(), 0, 1)


@pytest.fixture(scope="session")
def clip_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("clip_tokenizer")
    captions = []
    for number in range(20):
        captions += description(number)["caption"]
    train_tokenizer(captions, folder)
    return str(folder)
