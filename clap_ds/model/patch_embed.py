"""Embed spectrogram images as tokens, optionally with LAION-CLAP's feature fusion for files longer
than a clip (arXiv 2211.06687, with attentional feature fusion, arXiv 2009.14082).

With fusion a file is four spectrograms of a clip's length: the whole file shrunk, and crops from
front, middle and back (`clap_ds.data.clip`). For short files all four are equal and only the first
is used. Tokens of the crops and of the whole file are added with weights per channel and place.
Fusion is computed for all rows, so that shapes don't depend on values, but only longer files use it
and enter the batch norms' statistics. Shape letters: see `htsat.py`.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clap_ds.config.model import NARROWING, AudioConfig
from clap_ds.model.precision import Fp32BatchNorm


class PatchEmbed(nn.Module):
    """Embeds an image's patches: (B, 1, image, image) → (B, H, W, C)."""

    def __init__(self, config: AudioConfig) -> None:
        super().__init__()
        self.proj = nn.Conv2d(
            1, config.embed_dim, kernel_size=config.patch_size, stride=config.patch_size
        )
        self.norm = nn.LayerNorm(config.embed_dim)

    def forward(self, image_B1HW: Tensor) -> Tensor:
        return self.norm(self.project(image_B1HW))

    def project(self, image_B1HW: Tensor) -> Tensor:
        """Compute the convolution as one matrix product; patches don't overlap."""
        size = self.proj.kernel_size[0]
        patches = (
            image_B1HW[:, 0]
            .unflatten(2, (-1, size))
            .unflatten(1, (-1, size))
            .transpose(2, 3)
            .flatten(3)
        )
        return F.linear(patches, self.proj.weight.flatten(1), self.proj.bias)


class StoredTokens(torch.autograd.Function):
    """Returns tokens, which torch.compile then stores, like their gradient, in 16 bits.

    Otherwise it computes them again in the backward pass and stores both in fp32, because their
    reads by two layer norms exceed its limits. It doesn't repeat splits, and stores what is viewed
    by strides.
    """

    @staticmethod
    def forward(ctx: Any, tokens_BHWC: Tensor) -> Tensor:
        return tokens_BHWC.split_with_sizes([tokens_BHWC.shape[-1]], -1)[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0].as_strided(grads[0].shape, grads[0].stride())


def longer_rows(log_mel_B4TF: Tensor) -> Tensor:
    """Return (B,) bool: files longer than a clip, whose channels differ."""
    return (log_mel_B4TF[:, 1:] != log_mel_B4TF[:, :1]).flatten(1).any(dim=1)


class MaskedBatchNorm(Fp32BatchNorm):
    """`nn.BatchNorm2d` of selected rows, channels last. With one value per channel, for which torch
    raises an error, it keeps the running statistics."""

    def forward(self, x_BHWC: Tensor, counts_B: Tensor) -> Tensor:  # type: ignore[override]
        """Normalize in the dtype of the statistics. In training these are from rows with a true
        `counts_B`, at least one."""
        dtype = self.running_mean.dtype
        with torch.autocast(x_BHWC.device.type, enabled=False):
            x_BHWC = x_BHWC.to(dtype)
            mean = self.running_mean
            variance = self.running_var
            if self.training:
                share_B111 = counts_B.to(dtype)[:, None, None, None]
                number = share_B111.sum() * (x_BHWC.shape[1] * x_BHWC.shape[2])
                mean = (x_BHWC * share_B111).sum(dim=(0, 1, 2)) / number
                variance = ((x_BHWC - mean).square() * share_B111).sum(dim=(0, 1, 2)) / number
                assert self.momentum is not None
                self.num_batches_tracked.add_(1)
                step = self.momentum * (number > 1)
                self.running_mean.lerp_(mean.detach(), step)
                self.running_var.lerp_(variance.detach() * number / (number - 1).clamp(min=1), step)
            return (x_BHWC - mean) * (
                self.weight.to(dtype) * (variance + self.eps).rsqrt()
            ) + self.bias.to(dtype)


class AttentionalFusion(nn.Module):
    """A weighted sum of two sets of tokens, with weights from each place and from the mean over
    places."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.local_att = nn.Sequential(*_attention(dim))
        self.global_att = nn.Sequential(
            nn.Identity(), *_attention(dim)
        )  # LAION's first module is the mean

    def forward(self, whole_BHWC: Tensor, parts_BHWC: Tensor, counts_B: Tensor) -> Tensor:
        both = whole_BHWC + parts_BHWC
        score = _apply(self.local_att, both, counts_B) + _apply(
            self.global_att, both.mean((1, 2), True), counts_B
        )
        weight = score.sigmoid()
        return (2 * whole_BHWC * weight + 2 * parts_BHWC * (1 - weight)).to(whole_BHWC.dtype)


def _attention(dim: int) -> list[nn.Module]:
    narrow = dim // NARROWING
    first = nn.Conv2d(dim, narrow, kernel_size=1)
    last = nn.Conv2d(narrow, dim, kernel_size=1)
    return [first, MaskedBatchNorm(narrow), nn.ReLU(), last, MaskedBatchNorm(dim)]


def _apply(layers: nn.Sequential, x_BHWC: Tensor, counts_B: Tensor) -> Tensor:
    for layer in layers:
        if isinstance(layer, nn.Conv2d):
            x_BHWC = F.linear(x_BHWC.to(layer.weight.dtype), layer.weight.flatten(1), layer.bias)
        else:
            x_BHWC = (
                layer(x_BHWC, counts_B) if isinstance(layer, MaskedBatchNorm) else layer(x_BHWC)
            )
    return x_BHWC


class FusedPatchEmbed(PatchEmbed):
    """`PatchEmbed` with fusion: images (B, 4, image, image) and whether files are longer, (B,) →
    (B, H, W, C)."""

    def __init__(self, config: AudioConfig) -> None:
        super().__init__(config)
        size = config.patch_size, 3 * config.patch_size
        self.mel_conv2d = nn.Conv2d(1, config.embed_dim, kernel_size=size, stride=size)
        self.fusion_model = AttentionalFusion(config.embed_dim)

    def forward(self, images_B4HW: Tensor, is_longer_B: Tensor) -> Tensor:  # type: ignore[override]
        if (
            self.training
        ):  # like LAION, treat a short clip as longer if none is: all weights get a gradient
            first_B = torch.arange(len(is_longer_B), device=is_longer_B.device) == 0
            is_longer_B = is_longer_B | (first_B & ~is_longer_B.any())
        whole = self.project(images_B4HW[:, :1])
        fused = self.fusion_model(whole, self._parts(images_B4HW[:, 1:]), is_longer_B)
        return cast(
            "Tensor", self.norm(torch.where(is_longer_B[:, None, None, None], fused, whole))
        )

    def _parts(self, images_B3HW: Tensor) -> Tensor:
        """Embed each crop in tokens three patches wide, side by side, zero-padded to the grid: (B,
        H, W, C)."""
        height, width = self.mel_conv2d.kernel_size
        num_rows = images_B3HW.shape[2] // height
        num_columns = images_B3HW.shape[3] // width
        cells = (
            images_B3HW[..., : num_columns * width]
            .unflatten(3, (-1, width))
            .unflatten(2, (-1, height))
        )
        cells = cells.permute(0, 2, 1, 4, 3, 5).flatten(4)  # (B, rows, parts, columns, pixels)
        tokens = F.linear(cells, self.mel_conv2d.weight.flatten(1), self.mel_conv2d.bias).flatten(
            2, 3
        )
        return F.pad(tokens, (0, 0, 0, num_rows - tokens.shape[2]))
