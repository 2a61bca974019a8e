"""Define HTSAT, CLAP's audio tower: a Swin transformer over a folded log-mel spectrogram (arXiv
2202.00874, 2103.14030).

It matches LAION-CLAP's training code. Shape letters: B batch, F mel bins, T frames, H and W the
token grid, C channels.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clap_ds.config.model import AudioConfig
from clap_ds.model.patch_embed import (
    FusedPatchEmbed,
    PatchEmbed,
    SaveForBackward,
    is_longer_than_clip,
)
from clap_ds.model.precision import MelBatchNorm
from clap_ds.model.swin import INIT_STD, Stage, SwinBlock

NUM_STRIPES = 2
# LAION-CLAP's numbers: `SpecAugmentation(time_drop_width=64, freq_drop_width=8)`.
MAX_TIME_STRIPE = 64
MAX_MEL_STRIPE = 8
NUM_EARLY_STAGES = 2
"""Stages before the split of the graph. They have 5% of the parameters of HTSAT-tiny, and half of
its backward pass's bytes."""


class SpecAugment(nn.Module):
    """LAION-CLAP's SpecAugment (arXiv 1904.08779): zeroes two stripes of frames and two of mel bins
    per clip in training. A stripe's width is uniform in 0 … limit - 1, its start uniform over the
    positions where it fits."""

    def forward(self, mel: Tensor) -> Tensor:
        """Mask (B, F, T), or (B, 4, F, T) with the same stripes in a clip's four channels."""
        if not self.training:
            return mel
        # Per clip, independent of each other.
        mask_BF = _draw_mask(mel, -2, MAX_MEL_STRIPE)
        mask_BT = _draw_mask(mel, -1, MAX_TIME_STRIPE)
        mask_BFT = mask_BF[:, :, None] * mask_BT[:, None, :]
        if mel.ndim == 4:
            return mel * mask_BFT[:, None]
        return mel * mask_BFT


def _draw_mask(mel: Tensor, dim: int, width_limit: int) -> Tensor:
    """Draw a mask (B, size of the dimension): 0 inside the stripes, 1 elsewhere."""
    size = mel.shape[dim]
    device = mel.device
    # (B, stripes, 1), to compare with positions (size,)
    shape = (len(mel), NUM_STRIPES, 1)
    width = torch.randint(min(width_limit, size), shape, device=device)
    # Positions where the whole stripe fits.
    start = (torch.rand(shape, device=device) * (size - width)).long()
    position = torch.arange(size, device=device)
    is_inside = (position >= start) & (position < start + width)
    return (~is_inside.any(dim=1)).to(mel.dtype)


class FoldToImage(nn.Module):
    """A map from spectrograms to square images: time is stretched to `freq_ratio` images' widths,
    and its segments are stacked along frequency.

    The stretch is PyTorch's bicubic interpolation with aligned corners, stored as a matrix.
    """

    stretch: Tensor | None

    def __init__(self, config: AudioConfig) -> None:
        super().__init__()
        self.image_size = config.image_size
        self.freq_ratio = config.freq_ratio
        width = config.image_size * config.freq_ratio
        stretch_TW = None
        if config.num_frames < width:
            # Row t is what an impulse at frame t becomes, as interpolation is linear.
            impulses = torch.eye(config.num_frames)[None, None]
            stretched = F.interpolate(
                impulses, (width, config.num_frames), mode="bicubic", align_corners=True
            )
            stretch_TW = stretched[0, 0].T.contiguous()
        # Not in checkpoints, as the sizes determine it.
        self.register_buffer("stretch", stretch_TW, persistent=False)

    def forward(self, mel_BFT: Tensor) -> Tensor:
        """Fold (B, F, T) to (B, 1, image_size, image_size)."""
        segments = self.stretch_time(mel_BFT).unflatten(2, (self.freq_ratio, self.image_size))
        # (B, F, segments, image) → (B, segments, F, image); segments · F is the image's height.
        image_BHW = segments.transpose(1, 2).flatten(1, 2)
        return image_BHW[:, None]

    def stretch_time(self, mel_BFT: Tensor) -> Tensor:
        """Stretch time to the image's width."""
        if self.stretch is None:
            return mel_BFT
        stretch = self.stretch.to(mel_BFT.dtype)
        if mel_BFT.is_cuda:
            # Products over a multiple of 8 frames are twice as fast.
            padding = -len(stretch) % 8
            mel_BFT = F.pad(mel_BFT, (0, padding))
            stretch = F.pad(stretch, (0, 0, 0, padding))
        return torch.matmul(mel_BFT, stretch)


class UnusedHead(nn.Module):
    """Unused weights of checkpoints, kept as buffers so that optimizer and all-reduce skip them."""

    def __init__(self, *weight_shape: int) -> None:
        super().__init__()
        self.register_buffer("weight", torch.zeros(weight_shape))
        self.register_buffer("bias", torch.zeros(weight_shape[0]))


class HTSAT(nn.Module):
    """The audio tower: one vector per log-mel spectrogram. Stochastic depth grows linearly from 0
    at the first block to `drop_path` at the last. `tscam_conv` and `head`, HTSAT's AudioSet
    classifier, are loaded and saved but unused.

    Attributes:
        splits_graph: compile early and late stages as two graphs. The late ones' gradients are then
            complete before the early ones' backward pass, which hides their all-reduce.
    """

    splits_graph = False

    def __init__(
        self, config: AudioConfig, *, drop_path: float, spec_augment: bool, checkpoint: bool = False
    ) -> None:
        super().__init__()
        self.batch_norm = MelBatchNorm(config.mel_bins)
        self.spec_augment = SpecAugment() if spec_augment else nn.Identity()
        self.fold = FoldToImage(config)
        self.patch_embed = (FusedPatchEmbed if config.fusion else PatchEmbed)(config)
        # On the CPU, as numbers are needed while the model may be on the meta device.
        rates = torch.linspace(0, drop_path, sum(config.depths), device="cpu")
        self.stages = nn.ModuleList(
            Stage(config, stage, stage_rates.tolist(), checkpoint=checkpoint)
            for stage, stage_rates in enumerate(rates.split(config.depths))
        )
        self.norm = nn.LayerNorm(config.output_dim)
        self.apply(_init_weights)

        # The classifier's convolution covers all token rows of a segment.
        kernel_height = max(1, config.stage_grids[-1] // config.freq_ratio)
        self.tscam_conv = UnusedHead(config.num_classes, config.output_dim, kernel_height, 3)
        self.head = UnusedHead(config.num_classes, config.num_classes)

    def blocks(self) -> list[SwinBlock]:
        """Return the blocks of all stages, in order."""
        return [module for module in self.modules() if isinstance(module, SwinBlock)]

    def use_kernels(self, attention: str, mlp: str) -> None:
        """Set the kernels of all blocks (`kernels.py`)."""
        for block in self.blocks():
            block.attention.kernel = attention
            block.mlp.kernel = mlp

    def forward(self, log_mel: Tensor) -> Tensor:
        """Encode (B, num_frames, mel_bins) dB, or (B, 4, num_frames, mel_bins) with feature fusion,
        as (B, output_dim)."""
        # With fusion, a clip's four channels are normalized and folded like clips: N is 4·B, else B.
        mel_NFT = self.batch_norm(log_mel.flatten(0, -3))
        mel = self.spec_augment(mel_NFT.unflatten(0, log_mel.shape[:-2]))
        images_N1HW = self.fold(mel.flatten(0, -3).to(self.norm.weight.dtype))
        images = images_N1HW.unflatten(0, (len(log_mel), -1)).flatten(1, 2)
        is_longer = (is_longer_than_clip(log_mel),) if log_mel.ndim == 4 else ()
        tokens_BHWC = self.patch_embed(images, *is_longer)
        # Eager mode stores what it computed anyway.
        if torch.compiler.is_compiling():
            tokens_BHWC = SaveForBackward.apply(tokens_BHWC)
        for stage in self.stages[:NUM_EARLY_STAGES]:
            tokens_BHWC = stage(tokens_BHWC)
        # Gradients behind the break are complete first, and are sent meanwhile.
        if self.splits_graph:
            torch._dynamo.graph_break()
        for stage in self.stages[NUM_EARLY_STAGES:]:
            tokens_BHWC = stage(tokens_BHWC)
        # One vector per clip: the mean over all places.
        return self.norm(tokens_BHWC).mean(dim=(1, 2))


def _init_weights(module: nn.Module) -> None:
    """Initialize a linear layer like LAION-CLAP: truncated normal weights, zero bias."""
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=INIT_STD)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
