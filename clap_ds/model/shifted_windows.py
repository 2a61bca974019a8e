"""Partition a square token grid into windows, and compute their relative positions and shift masks.

Shape letters: S sets of tokens (q, k and v), B batch, H and W the token grid, G windows of a clip,
A attention heads, N tokens of a window, D head dim.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

MASKED_SCORE = -100.0
"""Added to the scores of tokens that only the cyclic shift made neighbors."""


def to_windows(tokens_BHWE: Tensor, window: int, shift: int, sets: int, heads: int) -> Tensor:
    """Shift (B, H, W, S·A·D) cyclically up and left, and partition it into (S, B, G, A, N, D),
    windows in row-major order."""
    if shift:
        tokens_BHWE = tokens_BHWE.roll(-shift, 1).roll(-shift, 2)
    # (B, rows, row in window, columns, column in window, S, A, D)
    tiles = tokens_BHWE.unflatten(3, (sets, heads, -1))
    tiles = tiles.unflatten(2, (-1, window)).unflatten(1, (-1, window))
    tiles = tiles.permute(5, 0, 1, 3, 6, 2, 4, 7)
    return tiles.flatten(5, 6).flatten(2, 3)


def from_windows(windows_SBGAND: Tensor, shift: int) -> Tensor:
    """Invert `to_windows`."""
    per_side = math.isqrt(windows_SBGAND.shape[2])
    window = math.isqrt(windows_SBGAND.shape[4])
    tiles = windows_SBGAND.unflatten(4, (window, window)).unflatten(2, (per_side, per_side))
    # (S, B, rows, columns, A, row in window, column in window, D)
    tiles = tiles.permute(1, 2, 5, 3, 6, 0, 4, 7)
    tokens_BHWE = tiles.flatten(5).flatten(3, 4).flatten(1, 2)
    if shift:
        tokens_BHWE = tokens_BHWE.roll(shift, 1).roll(shift, 2)
    return tokens_BHWE


def relative_position_index(window: int) -> Tensor:
    """Return (N, N): the bias table's row for each pair of a window's tokens."""
    side = torch.arange(window)
    place_N2 = torch.cartesian_prod(side, side)
    # Gaps from 1 - window to window - 1 become indices from 0 to 2·window - 2.
    gap_NN2 = place_N2[:, None] - place_N2[None, :] + window - 1
    return gap_NN2[..., 0] * (2 * window - 1) + gap_NN2[..., 1]


def shifted_window_mask(grid: int, window: int, shift: int) -> Tensor:
    """Return (G, N, N) to add to the shifted grid's scores: MASKED_SCORE for tokens that only the
    shift made neighbors."""
    position = torch.arange(grid)
    # Along each side: 0 before the last windows, 1 in them, 2 for tokens from the other edge.
    side = (position >= grid - window).long() + (position >= grid - shift).long()
    region_HW = side[:, None] * 3 + side
    region_GN = to_windows(region_HW[None, :, :, None], window, 0, 1, 1)[0, 0, :, 0, :, 0]
    is_apart_GNN = region_GN[:, None, :] != region_GN[:, :, None]
    return torch.where(is_apart_GNN, MASKED_SCORE, 0.0)
