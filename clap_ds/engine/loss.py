"""Compute contrastive losses over the global batch, with exact gradients but without sending
feature gradients.

Both losses here have closed-form gradients: a rank that has seen all features computes its own
features' gradient in the forward pass, and then frees the similarities and gathered features. The
softmax loss works tile by tile, as the similarities of a large batch don't fit in memory. The
operations between two matrix products are a separate function, which torch.compile fuses into one
kernel on a GPU.

Shape letters: B micro-batch, N global batch (B × ranks), K a tile of it, D joint dimension, R ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from clap_ds.config.schema import LossSettings
from clap_ds.distributed.collectives import rank, world_size
from clap_ds.engine.compile import compiled_on_gpu

# Columns per tile: few kernels on a GPU (80 MB at a micro-batch of 616), cache-sized on a CPU.
GPU_TILE = 32768
CPU_TILE = 1024

# torch 2.13 renames it; 2.11 has only the older name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

PeerWait = Callable[[], AbstractContextManager[object]]
"""Makes a context manager for waits for other ranks, such as `StepTimer.feature_wait`."""
LossAndGradients = tuple[Tensor, tuple[Tensor, ...]]


class _Gather:
    """An all-gather that has been started."""

    def __init__(self, local: Tensor, dtype: torch.dtype) -> None:
        # Collectives require contiguous memory.
        self._local = local.detach().to(dtype).contiguous()
        self._gathered = self._local
        self._work: dist.Work | None = None
        if world_size() > 1:
            self._gathered = self._local.new_empty(world_size() * len(local), *local.shape[1:])
            # On a GPU it runs beside the work queued afterwards.
            self._work = _all_gather(self._gathered, self._local, async_op=True)

    def wait(self) -> Tensor:
        """Return every rank's rows in rank order, complete for work queued afterwards."""
        if self._work is not None:
            self._work.wait()
        return self._gathered

    def own(self) -> Tensor:
        """Return this rank's rows, which need no wait."""
        return self._local


def softmax_rows(logits_BB: Tensor, positive_BB: Tensor) -> tuple[Tensor, float]:
    """Return the softmax loss of each pair of a held-out batch, (B,), and the minimum loss with
    equal similarities."""
    # A row's positives share its target equally.
    targets_BB = positive_BB / positive_BB.sum(1, keepdim=True)
    audio_to_text_B = F.cross_entropy(logits_BB, targets_BB, reduction="none")
    text_to_audio_B = F.cross_entropy(logits_BB.T, targets_BB, reduction="none")
    return torch.stack((audio_to_text_B, text_to_audio_B)).mean(0), math.log(len(logits_BB))


def sigmoid_rows(logits_BB: Tensor, positive_BB: Tensor) -> tuple[Tensor, float]:
    """Return the sigmoid loss of each pair of a held-out batch, (B,), and the minimum loss with
    equal similarities."""
    positives = float(positive_BB.mean())
    # The entropy of a positive, for each of a row's entries.
    chance = -len(logits_BB) * (
        positives * math.log(positives) + (1 - positives) * math.log1p(-positives)
    )
    return -F.logsigmoid((2 * positive_BB - 1) * logits_BB).sum(1), chance


class ContrastiveLoss:
    """Base of losses. Features are gathered and compared in `wire_dtype`; sums and gradients are
    fp32.

    Attributes:
        compute: both towers' gathers of (N, D), logit scale and, if needed, bias → the mean loss of
            this rank's pairs, and its gradients by this rank's features and the scalars.
        needs_bias: whether the model learns a logit bias.
        evaluate: logits and positives of a held-out batch, both (B, B) fp64 → each pair's loss
            (B,), and the loss if all similarities are equal.
    """

    compute: Callable[..., LossAndGradients]
    needs_bias: bool
    evaluate: Callable[[Tensor, Tensor], tuple[Tensor, float]]

    def __init__(
        self, wire_dtype: torch.dtype = torch.float32, peer_wait: PeerWait = nullcontext
    ) -> None:
        self.wire_dtype = wire_dtype
        self._peer_wait = peer_wait
        self._early: dict[str, _Gather] = {}

    def gather_early(self, model: nn.Module) -> None:
        """Start gathering each tower's features when they are ready, during the other tower's
        forward pass."""
        for tower in ("audio", "text"):
            projection = model.get_submodule(f"{tower}_projection")
            projection.register_forward_hook(partial(self._start, tower))

    def _start(self, tower: str, module: nn.Module, inputs: Any, features_BD: Tensor) -> None:
        if torch.is_grad_enabled():
            self._early[tower] = _Gather(features_BD, self.wire_dtype)

    def __call__(
        self,
        audio_BD: Tensor,
        text_BD: Tensor,
        logit_scale: Tensor,
        logit_bias: Tensor | None = None,
    ) -> Tensor:
        """Compute the loss of this rank's pairs against the global batch. A collective; all
        micro-batches have the same size.

        Args:
            audio_BD, text_BD: L2-normalized features of the same pairs, fp32.
            logit_scale: factor of the cosine similarities, shape (1,), fp32.
            logit_bias: what is added to them, shape (1,), fp32, if the loss needs it.

        Returns the mean over this rank's pairs, a scalar. Its mean over ranks is the global batch's
        loss; likewise gradients.
        """
        # Hooks may have started these during the forward pass.
        audio = self._early.pop("audio", None) or _Gather(audio_BD, self.wire_dtype)
        text = self._early.pop("text", None) or _Gather(text_BD, self.wire_dtype)
        scalars = [logit_scale, logit_bias] if self.needs_bias else [logit_scale]
        compute = partial(self.compute, audio, text, *scalars)
        # Gathered features are constants to autograd: their ranks compute their gradients.
        loss: Tensor = _WithGradient.apply(compute, audio_BD, text_BD, *scalars)
        return loss


class _WithGradient(torch.autograd.Function):
    """A loss that computes its gradient in the forward pass."""

    @staticmethod
    def forward(ctx: Any, compute: Callable[..., LossAndGradients], *inputs: Tensor) -> Tensor:
        loss, gradients = compute(needs_gradients=any(ctx.needs_input_grad))
        ctx.save_for_backward(*gradients)
        return loss

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        # The chain rule for a scalar; `compute` isn't an input with a gradient.
        gradients = [gradient * upstream[0] for gradient in ctx.saved_tensors]
        return None, *gradients


class SoftmaxLoss(ContrastiveLoss):
    """Symmetric cross entropy of CLIP and CLAP (arXiv 2103.00020, 2211.06687).

    With S = scale · A·Tᵀ over the global batch, r its row and c its column log-sum-exps, the
    gradient is dL/dS_ij = (exp(S_ij - r_i) + exp(S_ij - c_j) - 2·[i = j]) / 2N.
    """

    needs_bias = False
    evaluate = staticmethod(softmax_rows)

    def compute(
        self, audio: _Gather, text: _Gather, scale: Tensor, *, needs_gradients: bool
    ) -> LossAndGradients:
        audio_BD = audio.own()
        text_BD = text.own()
        num_local = len(audio_BD)
        # The index of this rank's first pair.
        first_pair = rank() * num_local
        # Columns compare own texts with all audio, rows own audio with all texts:
        # -log softmax is the log-sum-exp minus the pair's own logit.
        # Audio features have arrived during the text tower's forward pass. Texts are underway
        # while columns are computed.
        with self._peer_wait():
            audio_ND = audio.wait()
        column_lse_B, column_target_B = tiled_row_sums(text_BD, audio_ND, scale, first_pair)
        with self._peer_wait():
            text_ND = text.wait()
        row_lse_B, row_target_B = tiled_row_sums(audio_BD, text_ND, scale, first_pair)
        loss = ((row_lse_B - row_target_B).mean() + (column_lse_B - column_target_B).mean()) / 2
        if not needs_gradients:
            return loss, ()

        # A row's gradient needs its columns' log-sum-exps, which other ranks have.
        lses = _Gather(torch.stack((row_lse_B, column_lse_B))[None], row_lse_B.dtype)
        with self._peer_wait():
            lse_R2B = lses.wait()
        # (R, 2, B) → (2, N)
        row_lse_N, column_lse_N = lse_R2B.transpose(0, 1).flatten(1)
        audio_grad_BD, scale_grad = tiled_softmax_gradient(
            audio_BD, text_ND, row_lse_B, column_lse_N, scale, first_pair
        )
        # Rows alone give the scale's gradient, as ranks' rows together are the whole matrix.
        text_grad_BD, _ = tiled_softmax_gradient(
            text_BD, audio_ND, column_lse_B, row_lse_N, scale, first_pair
        )
        # 1/2N of the formula, times the number of ranks, by which data parallelism will divide.
        factor = 1 / (2 * num_local)
        scale_grad = (scale_grad * factor).view_as(scale)
        return loss, (audio_grad_BD * factor, text_grad_BD * factor, scale_grad)


class SigmoidLoss(ContrastiveLoss):
    """Pairwise sigmoid loss of SigLIP (arXiv 2303.15343).

    L = -1/N · Σ_ij log σ(z_ij · (scale · a_i·t_j + bias)). z_ij is 1 if i = j, else -1. Each rank
    computes the rows of its audio and the columns of its text, one rank's block at a time. Only
    rows contribute to the loss and the scalars' gradients, so that each entry counts once.
    """

    needs_bias = True
    evaluate = staticmethod(sigmoid_rows)

    def compute(
        self,
        audio: _Gather,
        text: _Gather,
        scale: Tensor,
        bias: Tensor,
        *,
        needs_gradients: bool,
    ) -> LossAndGradients:
        with self._peer_wait():
            audios = audio.wait().chunk(world_size())
            texts = text.wait().chunk(world_size())
        audio_BD = audios[rank()]
        text_BD = texts[rank()]
        num_local = len(audio_BD)
        loss = torch.zeros_like(scale)
        scale_grad = torch.zeros_like(scale)
        bias_grad = torch.zeros_like(scale)
        audio_grad_BD = torch.zeros_like(audio_BD, dtype=scale.dtype)
        text_grad_BD = torch.zeros_like(text_BD, dtype=scale.dtype)
        # Each rank begins with its own block, the only one with pairs.
        for distance in range(world_size()):
            other_audio_BD = audios[rank() - distance]
            other_text_BD = texts[rank() - distance]
            similarity_BB = similarities(audio_BD, other_text_BD, scale.dtype)
            loss_BB, row_weight_BB = _sigmoid_terms(
                similarity_BB * scale + bias, paired=distance == 0
            )
            loss += loss_BB.sum()
            scale_grad += (row_weight_BB * similarity_BB).sum()
            bias_grad += row_weight_BB.sum()
            audio_grad_BD += weighted_sum(row_weight_BB, other_text_BD, scale.dtype)
            # The own block has this rank's columns as well as its rows.
            column_weight_BB = row_weight_BB.T
            if distance > 0:
                similarity_BB = similarities(text_BD, other_audio_BD, scale.dtype)
                _, column_weight_BB = _sigmoid_terms(similarity_BB * scale + bias, paired=False)
            text_grad_BD += weighted_sum(column_weight_BB, other_audio_BD, scale.dtype)
        # 1/N of the formula, times the number of ranks, by which data parallelism will divide.
        gradients = (
            audio_grad_BD * (scale / num_local),
            text_grad_BD * (scale / num_local),
            scale_grad / num_local,
            bias_grad / num_local,
        )
        return loss[0] / num_local, gradients


def _sigmoid_terms(logits_BB: Tensor, *, paired: bool) -> tuple[Tensor, Tensor]:
    """Return -log σ(z·logit) of a block and its derivative by the logit; z is 1 on the diagonal if
    `paired`, else -1."""
    loss_BB = F.softplus(logits_BB)
    weight_BB = logits_BB.sigmoid()
    if paired:
        # softplus(-x) = softplus(x) - x
        loss_BB.diagonal().sub_(logits_BB.diagonal())
        weight_BB.diagonal().sub_(1)
    return loss_BB, weight_BB


LOSSES: dict[str, Any] = {"softmax": SoftmaxLoss, "sigmoid": SigmoidLoss}


def build_loss(
    settings: LossSettings, precision: str = "fp32", peer_wait: PeerWait = nullcontext
) -> Any:
    """Build a loss. It sends features in bf16 if the run or its autocast uses bf16, else in
    fp32."""
    # Their rounding, by up to 2⁻⁹, is that of the run's own activations.
    in_bf16 = precision in ("bf16", "torch_autocast_bfloat16")
    return LOSSES[settings.kind](torch.bfloat16 if in_bf16 else torch.float32, peer_wait)


def tiled_row_sums(
    own_BD: Tensor, all_ND: Tensor, scale: Tensor, first_pair: int
) -> tuple[Tensor, Tensor]:
    """Return log Σ_j exp(S_ij) with S_ij = scale · own_i·all_j, and S_ij of pair i, for which j =
    `first_pair` + i. Both are (B,) in the scale's dtype."""
    lses = []
    targets = []
    for columns in _tiles(all_ND):
        pairs = _pairs(own_BD, columns, first_pair)
        # No name refers to a tile's similarities, so that they are freed before the next one's.
        lse_B, *target_B = _row_sums(
            similarities(own_BD, all_ND[columns], scale.dtype), scale, pairs
        )
        lses.append(lse_B)
        targets += target_B
    return torch.stack(lses).logsumexp(dim=0), torch.stack(targets).sum(dim=0)


@compiled_on_gpu
def _row_sums(similarity_BK: Tensor, scale: Tensor, pairs: list[Tensor]) -> list[Tensor]:
    """Return both for one tile; without `pairs` only the log-sum-exp. Compiled code computes this
    maximum and sum in one pass (online softmax, arXiv 1805.02867)."""
    logits_BK = similarity_BK * scale
    targets = []
    if pairs:
        targets.append((logits_BK * _are_pairs(pairs)).sum(dim=1))
    # log Σ exp(x) = m + log Σ exp(x - m) can't overflow.
    maximum_B1 = logits_BK.amax(dim=1, keepdim=True)
    total_B1 = logits_BK.sub_(maximum_B1).exp_().sum(dim=1, keepdim=True)
    return [(maximum_B1 + total_B1.log()).squeeze(1), *targets]


def tiled_softmax_gradient(
    own_BD: Tensor,
    all_ND: Tensor,
    own_lse_B: Tensor,
    all_lse_N: Tensor,
    scale: Tensor,
    first_pair: int,
) -> tuple[Tensor, Tensor]:
    """Compute the softmax loss's gradient for this rank's features of one tower, recomputing
    similarities tile by tile.

    Args:
        own_lse_B, all_lse_N: log-sum-exps of own rows and of all columns.
        first_pair: index of this rank's first pair.

    Returns 2N times the gradients of own features, (B, D), and of the scale from own rows, scalar,
    in the scale's dtype.
    """
    weighted_BD = torch.zeros(own_BD.shape, dtype=scale.dtype, device=own_BD.device)
    weight_dtype = all_ND.dtype if all_ND.is_cuda else scale.dtype
    for columns in _tiles(all_ND):
        other_KD = all_ND[columns]
        pairs = _pairs(own_BD, columns, first_pair)
        weight_BK = _weights(
            similarities(own_BD, other_KD, scale.dtype),
            scale,
            own_lse_B,
            all_lse_N[columns],
            pairs,
            weight_dtype,
        )
        weighted_BD += weighted_sum(weight_BK, other_KD, scale.dtype)
        # Free the tile before the next one is made.
        del weight_BK
    # Σ_ij weight_ij · own_i·all_j; the loop has summed over j.
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
    # exp(S_ij - r_i) + exp(S_ij - c_j) - 2·[i = j]
    weight_BK = (logits_BK - own_lse_B[:, None]).exp_()
    weight_BK += logits_BK.sub_(other_lse_K).exp_()
    if pairs:
        weight_BK.sub_(_are_pairs(pairs), alpha=2)
    return weight_BK.to(dtype)


def _pairs(own_BD: Tensor, columns: slice, first_pair: int) -> list[Tensor]:
    """Return indices in the global batch of own rows (B,) and a tile's columns (K,), int64; nothing
    for a tile without own pairs."""
    end = first_pair + len(own_BD)
    if columns.stop <= first_pair or end <= columns.start:
        return []
    rows_B = torch.arange(first_pair, end, device=own_BD.device)
    columns_K = torch.arange(columns.start, columns.stop, device=own_BD.device)
    return [rows_B, columns_K]


def _are_pairs(pairs: list[Tensor]) -> Tensor:
    """Return (B, K): 1.0 if row and column are a pair, else 0.0."""
    rows_B, columns_K = pairs
    return torch.where(rows_B[:, None] == columns_K, 1.0, 0.0)


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
    max_width = GPU_TILE if all_ND.is_cuda else CPU_TILE
    num_tiles = math.ceil(size / max_width)
    width = min(max_width, 64 * math.ceil(size / num_tiles / 64))
    return (slice(start, min(start + width, size)) for start in range(0, size, width))
