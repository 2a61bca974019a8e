"""Partition a square token grid into windows, and compute their relative positions and shift masks.

Shape letters: S sets of tokens (q, k and v), B batch, H and W the token grid, G windows of a clip,
A attention heads, N tokens of a window, D head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

MASKED_SCORE = -100.0
"""Added to the scores of tokens that only the cyclic shift made neighbors."""


def to_windows(tokens_BHWE: Tensor, window: int, shift: int, sets: int, heads: int) -> Tensor:
    """Shift (B, H, W, S·A·D) cyclically up and left, and partition it into (S, B, G, A, N, D),
    windows in row-major order."""
    if shift:
        tokens_BHWE = tokens_BHWE.roll(-shift, 1).roll(-shift, 2)
    tiles = (
        tokens_BHWE.unflatten(3, (sets, heads, -1))
        .unflatten(2, (-1, window))
        .unflatten(1, (-1, window))
    )
    return tiles.permute(5, 0, 1, 3, 6, 2, 4, 7).flatten(5, 6).flatten(2, 3)


def from_windows(windows_SBGAND: Tensor, shift: int) -> Tensor:
    """Invert `to_windows`."""
    per_side, window = (round(windows_SBGAND.shape[dim] ** 0.5) for dim in (2, 4))
    tiles = windows_SBGAND.unflatten(4, (window, window)).unflatten(2, (per_side, per_side))
    tokens_BHWE = tiles.permute(1, 2, 5, 3, 6, 0, 4, 7).flatten(5).flatten(3, 4).flatten(1, 2)
    return tokens_BHWE.roll(shift, 1).roll(shift, 2) if shift else tokens_BHWE


def relative_position_index(window: int) -> Tensor:
    """Return (N, N): the bias table's row for each pair of a window's tokens."""
    place_N2 = torch.cartesian_prod(torch.arange(window), torch.arange(window))
    row_gap, column_gap = (place_N2[:, None] - place_N2[None, :] + window - 1).unbind(dim=2)
    return row_gap * (2 * window - 1) + column_gap


def shifted_window_mask(grid: int, window: int, shift: int) -> Tensor:
    """Return (G, N, N) to add to the shifted grid's scores: MASKED_SCORE for tokens that only the
    shift made neighbors."""
    position = torch.arange(grid)
    region = (position >= grid - window).long() + (position >= grid - shift).long()
    regions = to_windows((region[:, None] * 3 + region)[None, :, :, None], window, 0, 1, 1)[
        0, 0, :, 0, :, 0
    ]
    return (regions[:, None, :] != regions[:, :, None]) * MASKED_SCORE
