"""Partition a square token grid into windows, and compute their relative positions and shift masks.

Shape letters: B batch, H and W the token grid, G windows of a clip, N tokens of a window, C channels.
"""

from __future__ import annotations

import torch
from torch import Tensor

MASKED_SCORE = -100.0
"""Added to the scores of tokens that only the cyclic shift made neighbors."""


def partition_windows(tokens_BHWC: Tensor, window: int) -> Tensor:
    """Partition (B, H, W, C) into (B, G, N, C), windows in row-major order."""
    tiles = tokens_BHWC.unflatten(2, (-1, window)).unflatten(1, (-1, window))
    return tiles.transpose(2, 3).flatten(3, 4).flatten(1, 2)


def merge_windows(windows_BGNC: Tensor, grid: int) -> Tensor:
    """Invert `partition_windows` for a square grid."""
    window = int(windows_BGNC.shape[2] ** 0.5)
    per_side = grid // window
    tiles = windows_BGNC.unflatten(2, (window, window)).unflatten(1, (per_side, per_side))
    return tiles.transpose(2, 3).flatten(3, 4).flatten(1, 2)


def relative_position_index(window: int) -> Tensor:
    """Return (N, N): the bias table's row for each pair of a window's tokens."""
    place_N2 = torch.cartesian_prod(torch.arange(window), torch.arange(window))
    row_gap, column_gap = (place_N2[:, None] - place_N2[None, :] + window - 1).unbind(dim=2)
    return row_gap * (2 * window - 1) + column_gap


def shifted_window_mask(grid: int, window: int, shift: int) -> Tensor:
    """Return (G, N, N) to add to the shifted grid's scores: MASKED_SCORE for tokens that only the shift made neighbors."""
    position = torch.arange(grid)
    region = (position >= grid - window).long() + (position >= grid - shift).long()
    regions = partition_windows((region[:, None] * 3 + region[None, :])[None, :, :, None], window)[0, :, :, 0]
    return (regions[:, None, :] != regions[:, :, None]) * MASKED_SCORE
