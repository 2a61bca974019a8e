"""What the evaluation tests share: shards of short clips whose captions and classes are known, and a tokenizer for them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from clap_ds.model.clap import ClapModel
from clap_ds.model.tokenizer import train_tokenizer
from tests.data.tars import wav, write_tar
from tests.ranks import RankPool

KINDS = ("hum", "click", "hiss")
ITEM_BYTES = 20992
"""Of a clip's two members with their headers and padding."""
WriteClips = Callable[..., list[str]]


def tone(number: int) -> np.ndarray:
    """0.1 s that only this clip has."""
    return (np.sin(np.arange(4800) * 0.01 * (number + 1)) * 0.5).astype(np.float32)


def clip_members(number: int, description: Any, samples: np.ndarray | None = None) -> list[tuple[str, bytes]]:
    """An item: a tone and a json."""
    content = json.dumps(description).encode()
    return [(f"{number:04d}.wav", wav(tone(number) if samples is None else samples)), (f"{number:04d}.json", content)]


def description(number: int) -> dict[str, Any]:
    """Two captions for even clips, one for odd ones. No two are alike: whether the features of equal captions are, to the last
    bit, in any row of any batch, depends on the processor."""
    kind = KINDS[number % len(KINDS)]
    return {"kind": kind, "caption": [f"a {kind} number {number}", f"{kind} again, {number}"][: 2 - number % 2]}


def tell_captions_apart(model: ClapModel) -> ClapModel:
    """The model with larger text weights. To a fresh tower captions are alike but for rounding, which differs from processor to
    processor and from batch to batch, and the order of candidates with it."""
    with torch.no_grad():
        for parameter in model.text.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model


@pytest.fixture
def write_clips(tmp_path: Path) -> WriteClips:
    """Writes clips, numbered through, into tars of the given sizes."""

    def write(*sizes: int, extra: list[tuple[str, bytes]] | None = None) -> list[str]:
        paths, number = [], 0
        for shard, size in enumerate(sizes):
            members = [m for n in range(number, number + size) for m in clip_members(n, description(n))]
            paths.append(str(write_tar(tmp_path / f"clips-{shard}.tar", members + (extra or [] if shard == 0 else []))))
            number += size
        return paths

    return write


@pytest.fixture(scope="session")
def three_processes() -> Iterator[RankPool]:
    """To be joined in groups of up to three."""
    pool = RankPool(3, grouped=False)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def clip_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("clip_tokenizer")
    train_tokenizer([caption for n in range(20) for caption in description(n)["caption"]], folder)
    return str(folder)
