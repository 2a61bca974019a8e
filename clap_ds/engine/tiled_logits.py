"""Sums over rows of a similarity matrix that is never held whole: a tile of its columns at a time. Shape letters are `loss`'s.

What lies between two matrix products is a function of its own, which torch.compile makes one kernel on a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from clap_ds.engine.compile import compiled_on_gpu

GPU_TILE, CPU_TILE = 32768, 1024
"""Columns in a tile: on a GPU few kernels matter, 80 MB at a micro-batch of 616; on a CPU the caches do."""


def tiled_row_sums(own_BD: Tensor, all_ND: Tensor, scale: Tensor, first: int) -> tuple[Tensor, Tensor]:
    """Log Σ_j exp(S_ij) with S_ij = scale · own_i·all_j, and the S_ij of pair i, whose j is `first` + i: (B,) each, in the
    scale's type."""
    lses, targets = [], []
    for columns in _tiles(all_ND):
        rest = scale, _pairs(own_BD, columns, first)
        lse_B, *target_B = compiled_on_gpu(_row_sums, similarities(own_BD, all_ND[columns], scale.dtype), *rest)
        lses.append(lse_B)
        targets += target_B
    return torch.stack(lses).logsumexp(dim=0), torch.stack(targets).sum(dim=0)


def _row_sums(similarity_BK: Tensor, scale: Tensor, pairs: list[Tensor]) -> list[Tensor]:
    """Of one tile; without `pairs` only the first. Maximum and sum, written out like this, are one pass in compiled code
    (online softmax, arXiv 1805.02867)."""
    logits_BK = similarity_BK * scale
    targets = [(logits_BK * _are_pairs(pairs)).sum(dim=1)] if pairs else []
    maximum_B1 = logits_BK.amax(dim=1, keepdim=True)
    total_B1 = logits_BK.sub_(maximum_B1).exp_().sum(dim=1, keepdim=True)
    return [(maximum_B1 + total_B1.log()).squeeze(1), *targets]


def tiled_softmax_gradient(
    own_BD: Tensor, all_ND: Tensor, own_lse_B: Tensor, all_lse_N: Tensor, scale: Tensor, first: int
) -> tuple[Tensor, Tensor]:
    """Work out the softmax loss's gradient by one tower's own features, the similarities recomputed a tile at a time, from
    log-sum-exps over the similarities of the own and of all features. `first` is the place of this rank's first pair.

    Returns:
        2N times the gradients of the own features, (B, D), and of the scale from the own rows, scalar, in the scale's type.
    """
    weighted_BD = torch.zeros(own_BD.shape, dtype=scale.dtype, device=own_BD.device)
    weight_dtype = all_ND.dtype if all_ND.is_cuda else scale.dtype
    for columns in _tiles(all_ND):
        others_KD, lses, pairs = all_ND[columns], (own_lse_B, all_lse_N[columns]), _pairs(own_BD, columns, first)
        rest = scale, *lses, pairs, weight_dtype
        weights = compiled_on_gpu(_weights, similarities(own_BD, others_KD, scale.dtype), *rest)
        weighted_BD += weighted_sum(weights, others_KD, scale.dtype)
        del weights  # before the next tile is made
    # Σ_ij weight_ij · own_i·all_j, where the sum over j has just been made
    return weighted_BD * scale, (weighted_BD * own_BD).sum()


def _weights(
    similarity_BK: Tensor,
    scale: Tensor,
    own_lse_B: Tensor,
    other_lse_K: Tensor,
    pairs: list[Tensor],
    dtype: torch.dtype,
) -> Tensor:
    """2N times the loss's derivative by one tile's logits."""
    logits_BK = similarity_BK * scale
    weight_BK = (logits_BK - own_lse_B[:, None]).exp_()
    weight_BK += logits_BK.sub_(other_lse_K).exp_()
    if pairs:
        weight_BK.sub_(_are_pairs(pairs), alpha=2)
    return weight_BK.to(dtype)


def _pairs(own_BD: Tensor, columns: slice, first: int) -> list[Tensor]:
    """Places in the global batch of the own rows (B,) and of a tile's columns (K,), int64; nothing where the tile has none of
    the pairs."""
    own = range(first, first + len(own_BD))
    if columns.stop <= own.start or own.stop <= columns.start:
        return []
    return [torch.arange(each.start, each.stop, device=own_BD.device) for each in (own, columns)]


def _are_pairs(pairs: list[Tensor]) -> Tensor:
    """(B, K): 1.0 where row and column are a pair, 0.0 elsewhere."""
    own_B, other_K = pairs
    return torch.where(own_B[:, None] == other_K, 1.0, 0.0)


def similarities(own_BD: Tensor, other_KD: Tensor, dtype: torch.dtype) -> Tensor:
    """(B, K) inner products, accumulated and given in `dtype`."""
    if own_BD.dtype == dtype:
        return own_BD @ other_KD.T
    if own_BD.is_cuda:
        return torch.mm(own_BD, other_KD.T, out_dtype=dtype)
    return own_BD.to(dtype) @ other_KD.T.to(dtype)


def weighted_sum(weight_BK: Tensor, other_KD: Tensor, dtype: torch.dtype) -> Tensor:
    """(B, D) in `dtype`; on a GPU with 16-bit features the weights are rounded to match, the sum is not."""
    if other_KD.dtype == dtype:
        return weight_BK @ other_KD
    if other_KD.is_cuda:
        return torch.mm(weight_BK.to(other_KD.dtype), other_KD, out_dtype=dtype)
    return weight_BK @ other_KD.to(dtype)


def _tiles(all_ND: Tensor) -> Iterator[slice]:
    """Of one width but for the last; multiples of 64, as tensor cores want rows to begin, where they may be as wide."""
    size, widest = len(all_ND), GPU_TILE if all_ND.is_cuda else CPU_TILE
    width = min(widest, 64 * math.ceil(size / math.ceil(size / widest) / 64))
    return (slice(start, min(start + width, size)) for start in range(0, size, width))
