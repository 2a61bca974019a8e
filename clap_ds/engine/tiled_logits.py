"""Sum over rows of a similarity matrix, one tile of columns at a time. Shape letters are as in
`loss`.

The operations between two matrix products are a separate function, which torch.compile fuses into
one kernel on a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from clap_ds.engine.compile import compiled_on_gpu

GPU_TILE = 32768
CPU_TILE = 1024
"""Columns per tile: few kernels on a GPU (80 MB at a micro-batch of 616), cache-sized on a CPU."""


def tiled_row_sums(
    own_BD: Tensor, all_ND: Tensor, scale: Tensor, first: int
) -> tuple[Tensor, Tensor]:
    """Return log Σ_j exp(S_ij) with S_ij = scale · own_i·all_j, and S_ij of pair i, for which j =
    `first` + i.

    Both are (B,) in the scale's dtype."""
    lses = []
    targets = []
    for columns in _tiles(all_ND):
        rest = scale, _pairs(own_BD, columns, first)
        lse_B, *target_B = _row_sums(similarities(own_BD, all_ND[columns], scale.dtype), *rest)
        lses.append(lse_B)
        targets += target_B
    return torch.stack(lses).logsumexp(dim=0), torch.stack(targets).sum(dim=0)


@compiled_on_gpu
def _row_sums(similarity_BK: Tensor, scale: Tensor, pairs: list[Tensor]) -> list[Tensor]:
    """Return both for one tile; without `pairs` only the first. Compiled code computes this maximum
    and sum in one pass (online softmax, arXiv 1805.02867)."""
    logits_BK = similarity_BK * scale
    targets = [(logits_BK * _are_pairs(pairs)).sum(dim=1)] if pairs else []
    maximum_B1 = logits_BK.amax(dim=1, keepdim=True)
    total_B1 = logits_BK.sub_(maximum_B1).exp_().sum(dim=1, keepdim=True)
    return [(maximum_B1 + total_B1.log()).squeeze(1), *targets]


def tiled_softmax_gradient(
    own_BD: Tensor, all_ND: Tensor, own_lse_B: Tensor, all_lse_N: Tensor, scale: Tensor, first: int
) -> tuple[Tensor, Tensor]:
    """Compute the softmax loss's gradient for this rank's features of one tower, recomputing
    similarities tile by tile, from the log-sum-exps of own rows and of all columns. `first` is the
    index of this rank's first pair.

    Returns 2N times the gradients of own features, (B, D), and of the scale from own rows, scalar,
    in the scale's dtype.
    """
    weighted_BD = torch.zeros(own_BD.shape, dtype=scale.dtype, device=own_BD.device)
    weight_dtype = all_ND.dtype if all_ND.is_cuda else scale.dtype
    for columns in _tiles(all_ND):
        others_KD = all_ND[columns]
        lses = (own_lse_B, all_lse_N[columns])
        pairs = _pairs(own_BD, columns, first)
        rest = scale, *lses, pairs, weight_dtype
        weights = _weights(similarities(own_BD, others_KD, scale.dtype), *rest)
        weighted_BD += weighted_sum(weights, others_KD, scale.dtype)
        del weights  # before the next tile is made
    # Σ_ij weight_ij · own_i·all_j; the loop has summed over j
    return weighted_BD * scale, (weighted_BD * own_BD).sum()


@compiled_on_gpu
def _weights(
    similarity_BK: Tensor,
    scale: Tensor,
    own_lse_B: Tensor,
    other_lse_K: Tensor,
    pairs: list[Tensor],
    dtype: torch.dtype,
) -> Tensor:
    """Return 2N times the loss's derivative by one tile's logits."""
    logits_BK = similarity_BK * scale
    weight_BK = (logits_BK - own_lse_B[:, None]).exp_()
    weight_BK += logits_BK.sub_(other_lse_K).exp_()
    if pairs:
        weight_BK.sub_(_are_pairs(pairs), alpha=2)
    return weight_BK.to(dtype)


def _pairs(own_BD: Tensor, columns: slice, first: int) -> list[Tensor]:
    """Return indices in the global batch of own rows (B,) and a tile's columns (K,), int64; nothing
    for a tile without own pairs."""
    own = range(first, first + len(own_BD))
    if columns.stop <= own.start or own.stop <= columns.start:
        return []
    return [torch.arange(each.start, each.stop, device=own_BD.device) for each in (own, columns)]


def _are_pairs(pairs: list[Tensor]) -> Tensor:
    """Return (B, K): 1.0 if row and column are a pair, else 0.0."""
    own_B, other_K = pairs
    return torch.where(own_B[:, None] == other_K, 1.0, 0.0)


def similarities(own_BD: Tensor, other_KD: Tensor, dtype: torch.dtype) -> Tensor:
    """Return (B, K) inner products, accumulated and returned in `dtype`."""
    if own_BD.dtype == dtype:
        return own_BD @ other_KD.T
    if own_BD.is_cuda:
        return torch.mm(own_BD, other_KD.T, out_dtype=dtype)
    return own_BD.to(dtype) @ other_KD.T.to(dtype)


def weighted_sum(weight_BK: Tensor, other_KD: Tensor, dtype: torch.dtype) -> Tensor:
    """Return (B, D) in `dtype`. On a GPU with 16-bit features the weights are rounded to match, but
    not the sum."""
    if other_KD.dtype == dtype:
        return weight_BK @ other_KD
    if other_KD.is_cuda:
        return torch.mm(weight_BK.to(other_KD.dtype), other_KD, out_dtype=dtype)
    return weight_BK @ other_KD.to(dtype)


def _tiles(all_ND: Tensor) -> Iterator[slice]:
    """Yield tiles of equal width, except for the last. If it may be, the width is a multiple of 64
    to suit tensor cores."""
    size = len(all_ND)
    widest = GPU_TILE if all_ND.is_cuda else CPU_TILE
    width = min(widest, 64 * math.ceil(size / math.ceil(size / widest) / 64))
    return (slice(start, min(start + width, size)) for start in range(0, size, width))
