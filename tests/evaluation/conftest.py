"""Fixtures of the evaluation tests: shards of short clips with known captions and classes, and a
tokenizer."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import pytest

from clap_ds.distributed.init import Ranks
from clap_ds.weights.hub import train_tokenizer
from tests.data.tars import wav, write_tar
from tests.rank_pool import RankPool, in_group_of

KINDS = ("hum", "click", "hiss")
ALONE = Ranks(0, 1, 0, 1)
WriteClips = Callable[..., list[str]]


def tone(number: int) -> np.ndarray:
    """Return a clip's unique 0.1 s tone."""
    return (np.sin(np.arange(4800) * 0.01 * (number + 1)) * 0.5).astype(np.float32)


def clip_members(
    number: int, description: Any, samples: np.ndarray | None = None
) -> list[tuple[str, bytes]]:
    """Return an item: a tone and a json."""
    content = json.dumps(description).encode()
    return [
        (f"{number:04d}.wav", wav(tone(number) if samples is None else samples)),
        (f"{number:04d}.json", content),
    ]


def npy(values: np.ndarray) -> bytes:
    """Encode a NumPy file in row-major order."""
    np.save(file := io.BytesIO(), np.ascontiguousarray(values))
    return file.getvalue()


def description(number: int) -> dict[str, Any]:
    """Return two captions for even clips, one for odd ones, all distinct: equal captions' features
    may differ."""
    kind = KINDS[number % len(KINDS)]
    return {
        "kind": kind,
        "caption": [f"a {kind} number {number}", f"{kind} again, {number}"][: 2 - number % 2],
    }


@pytest.fixture
def write_clips(tmp_path: Path) -> WriteClips:
    """Return a function that writes numbered clips into tars of the given sizes, with `extra`
    members in the last."""

    def write(*sizes: int, extra: list[tuple[str, bytes]] | None = None) -> list[str]:
        paths = []
        first = 0
        for shard, size in enumerate(sizes):
            members = [
                m for n in range(first, first + size) for m in clip_members(n, description(n))
            ]
            members += (extra or []) * (shard == len(sizes) - 1)
            paths.append(str(write_tar(tmp_path / f"clips-{shard}.tar", members)))
            first += size
        return paths

    return write


def on_ranks(
    pool: RankPool, world_size: int, folder: Path, function: Callable[..., Any], *arguments: Any
) -> list[Any]:
    """Return `function`'s result on each rank of a group, whose ranks are `ranks_here()`."""
    return pool.run(
        in_group_of, world_size, str(folder / f"store-{uuid4()}"), function, *arguments
    )[:world_size]


def ranks_here() -> Ranks:
    import torch.distributed as dist

    return Ranks(dist.get_rank(), dist.get_world_size(), 0, 1)


@pytest.fixture(scope="session")
def clip_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("clip_tokenizer")
    train_tokenizer([caption for n in range(20) for caption in description(n)["caption"]], folder)
    return str(folder)
