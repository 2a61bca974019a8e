"""Embed spectrogram images as tokens, optionally with LAION-CLAP's feature fusion for files longer
than a clip (arXiv 2211.06687, with attentional feature fusion, arXiv 2009.14082).

With fusion a file is four spectrograms of a clip's length: the whole file shrunk, and crops from
front, middle and back (`clap_ds.data.clip`). For short files all four are equal and only the first
is used. Tokens of the crops and of the whole file are added with weights per channel and place.
Fusion is computed for all rows, so that shapes don't depend on values, but only longer files use it
and enter the batch norms' statistics. Shape letters: see `htsat.py`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clap_ds.config.model import NARROWING, AudioConfig
from clap_ds.model.precision import MaskedBatchNorm


def is_longer_than_clip(log_mel_B4TF: Tensor) -> Tensor:
    """Return (B,) bool: files longer than a clip, whose channels differ."""
    return (log_mel_B4TF[:, 1:] != log_mel_B4TF[:, :1]).flatten(1).any(dim=1)


# Patches are square, and as far apart as they are wide.
class PatchEmbed(nn.Module):
    """An embedding of an image's patches: (B, 1, image, image) → (B, H, W, C)."""

    def __init__(self, config: AudioConfig) -> None:
        super().__init__()
        size = config.patch_size
        self.proj = nn.Conv2d(1, config.embed_dim, kernel_size=size, stride=size)
        self.norm = nn.LayerNorm(config.embed_dim)

    def forward(self, image_B1HW: Tensor) -> Tensor:
        return self.norm(self.project(image_B1HW))

    def project(self, image_B1HW: Tensor) -> Tensor:
        """Compute the convolution as one matrix product; patches don't overlap."""
        size = self.proj.kernel_size[0]
        patches = image_B1HW[:, 0].unflatten(2, (-1, size)).unflatten(1, (-1, size))
        # (B, H, patch, W, patch) → (B, H, W, pixels of a patch)
        patches = patches.transpose(2, 3).flatten(3)
        return F.linear(patches, self.proj.weight.flatten(1), self.proj.bias)


class SaveForBackward(torch.autograd.Function):
    """The identity, which makes torch.compile store tokens and their gradient in 16 bits.

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


class PointwiseLayers(nn.Sequential):
    """LAION's layers of one attention: convolutions of single places with batch norms, from C
    channels over C / 4 to C."""

    def __init__(self, dim: int, *prefix: nn.Module) -> None:
        narrow = dim // NARROWING
        super().__init__(
            *prefix,
            nn.Conv2d(dim, narrow, kernel_size=1),
            MaskedBatchNorm(narrow),
            nn.ReLU(),
            nn.Conv2d(narrow, dim, kernel_size=1),
            MaskedBatchNorm(dim),
        )

    def forward(self, x_BHWC: Tensor, counts_B: Tensor) -> Tensor:  # type: ignore[override]
        """Apply the layers to tokens; rows with a true `counts_B` enter the statistics."""
        for layer in self:
            if isinstance(layer, nn.Conv2d):
                # A 1×1 convolution, channels last. Batch norms before it compute in fp32.
                weight = layer.weight.flatten(1)
                x_BHWC = F.linear(x_BHWC.to(weight.dtype), weight, layer.bias)
            elif isinstance(layer, MaskedBatchNorm):
                x_BHWC = layer(x_BHWC, counts_B)
            else:
                x_BHWC = layer(x_BHWC)
        return x_BHWC


class AttentionalFusion(nn.Module):
    """A weighted sum of two sets of tokens, with weights from each place and from the mean over
    places."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.local_att = PointwiseLayers(dim)
        # LAION's first module is the mean, which `forward` computes.
        self.global_att = PointwiseLayers(dim, nn.Identity())

    def forward(self, whole_BHWC: Tensor, parts_BHWC: Tensor, counts_B: Tensor) -> Tensor:
        sum_BHWC = whole_BHWC + parts_BHWC
        mean_B11C = sum_BHWC.mean((1, 2), True)
        score_BHWC = self.local_att(sum_BHWC, counts_B) + self.global_att(mean_B11C, counts_B)
        weight_BHWC = score_BHWC.sigmoid()
        # Twice, so that equal weights of 0.5 give the sum.
        fused_BHWC = 2 * whole_BHWC * weight_BHWC + 2 * parts_BHWC * (1 - weight_BHWC)
        return fused_BHWC.to(whole_BHWC.dtype)


class FusedPatchEmbed(PatchEmbed):
    """`PatchEmbed` with fusion: images (B, 4, image, image) and whether files are longer, (B,) →
    (B, H, W, C)."""

    def __init__(self, config: AudioConfig) -> None:
        super().__init__(config)
        size = config.patch_size, 3 * config.patch_size
        self.mel_conv2d = nn.Conv2d(1, config.embed_dim, kernel_size=size, stride=size)
        self.fusion_model = AttentionalFusion(config.embed_dim)

    def forward(self, images_B4HW: Tensor, is_longer_B: Tensor) -> Tensor:  # type: ignore[override]
        if self.training:
            # Like LAION, treat a short clip as longer if none is: all weights get a gradient.
            is_first_B = torch.arange(len(is_longer_B), device=is_longer_B.device) == 0
            is_longer_B = is_longer_B | (is_first_B & ~is_longer_B.any())
        whole_BHWC = self.project(images_B4HW[:, :1])
        parts_BHWC = self._embed_crops(images_B4HW[:, 1:])
        fused_BHWC = self.fusion_model(whole_BHWC, parts_BHWC, is_longer_B)
        tokens_BHWC = torch.where(is_longer_B[:, None, None, None], fused_BHWC, whole_BHWC)
        normalized: Tensor = self.norm(tokens_BHWC)
        return normalized

    def _embed_crops(self, images_B3HW: Tensor) -> Tensor:
        """Embed each crop in tokens three patches wide, side by side, zero-padded to the grid: (B,
        H, W, C)."""
        height, width = self.mel_conv2d.kernel_size
        num_rows = images_B3HW.shape[2] // height
        num_columns = images_B3HW.shape[3] // width
        # A convolution ignores what is left at the right edge.
        cells = images_B3HW[..., : num_columns * width]
        cells = cells.unflatten(3, (-1, width)).unflatten(2, (-1, height))
        # (B, crops, rows, height, columns, width) → (B, rows, crops, columns, pixels)
        cells = cells.permute(0, 2, 1, 4, 3, 5).flatten(4)
        tokens = F.linear(cells, self.mel_conv2d.weight.flatten(1), self.mel_conv2d.bias)
        tokens_BHWC = tokens.flatten(2, 3)
        return F.pad(tokens_BHWC, (0, 0, 0, num_rows - tokens_BHWC.shape[2]))
