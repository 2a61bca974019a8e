"""Sums over rows of a similarity matrix that is never held whole: a tile of its columns at a time.

What the losses work out of them, and how features get from rank to rank, is `loss`'s. Shape letters are as there.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor


def tiled_log_sum_exp(own_BD: Tensor, all_ND: Tensor, scale: Tensor, tile: int) -> Tensor:
    """Log Σ_j exp(scale · own_i·all_j), a tile of columns at a time: (B,) in the scale's type."""
    maximum_B = torch.full(own_BD.shape[:1], -torch.inf, dtype=scale.dtype, device=own_BD.device)
    total_B = torch.zeros_like(maximum_B)
    for columns in _tiles(all_ND.shape[0], tile):
        logits_BK = similarities(own_BD, all_ND[columns], scale.dtype).mul_(scale)
        larger_B = torch.maximum(maximum_B, logits_BK.amax(dim=1))
        total_B = total_B * (maximum_B - larger_B).exp() + logits_BK.sub_(larger_B[:, None]).exp_().sum(dim=1)
        maximum_B = larger_B
    return maximum_B + total_B.log()


class Positives:
    """Which pairs have the same caption as each of this rank's.

    Args:
        captions_N: everybody's captions, one number for each different one, int64.
        own: this rank's among them.
    """

    def __init__(self, captions_N: Tensor, own: slice, tile: int) -> None:
        self._captions_N, self._own, self._tile = captions_N, own, tile
        self.number_B = torch.zeros_like(captions_N[own])
        for columns in _tiles(len(captions_N), tile):
            self.number_B += self.among(columns).sum(dim=1)

    def among(self, columns: slice) -> Tensor:
        """(B, K) bool."""
        return self._captions_N[self._own, None] == self._captions_N[columns]

    def mean_similarity(self, own_BD: Tensor, all_ND: Tensor, dtype: torch.dtype) -> Tensor:
        """Of each own feature of one tower to its positives of the other, (B,) in `dtype`."""
        total_B = torch.zeros(own_BD.shape[:1], dtype=dtype, device=own_BD.device)
        for columns in _tiles(len(all_ND), self._tile):
            total_B += (similarities(own_BD, all_ND[columns], dtype) * self.among(columns)).sum(dim=1)
        return total_B / self.number_B


def tiled_softmax_gradient(
    own_BD: Tensor,
    all_ND: Tensor,
    own_lse_B: Tensor,
    all_lse_N: Tensor,
    first: int,
    scale: Tensor,
    tile: int,
    positives: Positives | None = None,
) -> tuple[Tensor, Tensor]:
    """Gradient of the softmax loss by one tower's own features, the similarity matrix recomputed a tile at a time.

    Args:
        own_BD: this rank's features of one tower; row i belongs to row first + i of `all_ND`.
        all_ND: everybody's features of the other tower.
        own_lse_B: log-sum-exps over the similarities of each own feature.
        all_lse_N: log-sum-exps over the similarities of each of the other tower's features.
        scale: factor of the similarities, shape (1,); gives the type of sums and results.
        positives: of the own features; without, pair i has pair i alone.

    Returns:
        2N times the gradients of the own features, (B, D), and of the scale from the own rows, scalar.
    """
    gradient_BD = torch.zeros(own_BD.shape, dtype=scale.dtype, device=own_BD.device)
    scale_gradient = torch.zeros((), dtype=scale.dtype, device=own_BD.device)
    for columns in _tiles(all_ND.shape[0], tile):
        similarity_BK = similarities(own_BD, all_ND[columns], scale.dtype)
        logits_BK = similarity_BK * scale
        weight_BK = (logits_BK - own_lse_B[:, None]).exp_()
        weight_BK += logits_BK.sub_(all_lse_N[columns]).exp_()
        if positives is not None:
            weight_BK -= positives.among(columns) * (2 / positives.number_B.to(scale.dtype))[:, None]
        elif columns.start < first + own_BD.shape[0] and first < columns.stop:
            # Pairs lie where column = first + row.
            weight_BK.diagonal(first - columns.start).sub_(2)
        scale_gradient += torch.dot(weight_BK.flatten(), similarity_BK.flatten())
        gradient_BD += weighted_sum(weight_BK, all_ND[columns])
    return gradient_BD * scale, scale_gradient


def similarities(own_BD: Tensor, other_KD: Tensor, dtype: torch.dtype) -> Tensor:
    """(B, K) inner products, accumulated and given in `dtype`."""
    if own_BD.dtype == dtype:
        return own_BD @ other_KD.T
    if own_BD.is_cuda:
        return torch.mm(own_BD, other_KD.T, out_dtype=dtype)
    return own_BD.to(dtype) @ other_KD.T.to(dtype)


def weighted_sum(weight_BK: Tensor, other_KD: Tensor) -> Tensor:
    """(B, D) in the weights' type; on a GPU with 16-bit features the weights are rounded to match, the sum is not."""
    if other_KD.dtype == weight_BK.dtype:
        return weight_BK @ other_KD
    if other_KD.is_cuda:
        return torch.mm(weight_BK.to(other_KD.dtype), other_KD, out_dtype=weight_BK.dtype)
    return weight_BK @ other_KD.to(weight_BK.dtype)


def _tiles(size: int, tile: int) -> Iterator[slice]:
    return (slice(start, min(start + tile, size)) for start in range(0, size, tile))
