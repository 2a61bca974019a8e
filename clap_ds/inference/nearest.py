"""The rows of a table that are nearest to a vector: exact, block by block."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from clap_ds.inference.vectors import Block


class Found(NamedTuple):
    """A row: its cosine similarity to what was looked for, file and times."""

    score: float
    file: str
    start_s: float
    end_s: float


def nearest(blocks: Iterable[Block], query: NDArray[np.float32], top: int) -> list[Found]:
    """The `top` rows of the highest scores, the highest first and of equal ones the earlier first; rows without a vector are
    left out.

    Args:
        query: (dim,), of length 1, as the rows' vectors are.
    """
    best: list[Found] = []
    for block in blocks:
        scores = block.vector @ query
        least = best[-1].score if len(best) == top else -np.inf
        better = np.flatnonzero(scores > least)  # not where NaN
        better = better[np.argsort(-scores[better], kind="stable")[:top]]
        rows = (
            Found(float(scores[n]), str(block.file[n]), *map(float, (block.start_s[n], block.end_s[n]))) for n in better
        )
        best = sorted([*best, *rows], key=lambda row: -row.score)[:top]  # stable
    return best
