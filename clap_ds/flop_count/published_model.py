"""The model as open_clip's profiler met it, in shape and cost: what the published figures count and this engine doesn't do.

For counting only: its weights compute nothing of use. So that counters meet in it what the closed form works out: the STFT as
torchlibrosa's convolutions, the AudioSet head, every token in the last text layer.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clap_ds.config.model import AudioConfig, ClapConfig
from clap_ds.flop_count.counters import build
from clap_ds.model.clap import ClapModel


def published_model(config: ClapConfig) -> ClapModel:
    """The STFT as a convolution, the stretch as an interpolation, the AudioSet head, every token in the last text layer."""
    model = build(config)
    model.text.compute_every_token()
    model.add_module("mel", ConvolutionLogMel(config.audio))
    model.audio.add_module("fold", InterpolatingFold(config.audio))
    model.audio.add_module("norm", NormWithAudioSetHead(config.audio))
    return model.requires_grad_(False)


class ConvolutionLogMel(nn.Module):
    """torchlibrosa's STFT, two convolutions, and the mel product."""

    def __init__(self, config: AudioConfig) -> None:
        super().__init__()
        num_bins = config.stft_window // 2 + 1
        self.padding = config.stft_window // 2
        self.real = nn.Conv1d(1, num_bins, config.stft_window, stride=config.hop_size, bias=False)
        self.imaginary = nn.Conv1d(1, num_bins, config.stft_window, stride=config.hop_size, bias=False)
        self.mel_filters = nn.Parameter(torch.rand(num_bins, config.mel_bins))

    def forward(self, waveforms: Tensor) -> Tensor:
        padded = F.pad(waveforms[:, None], (self.padding, self.padding), mode="reflect")
        power = self.real(padded) ** 2 + self.imaginary(padded) ** 2
        return torch.matmul(power.transpose(1, 2), self.mel_filters).clamp(min=1e-10).log10()


class InterpolatingFold(nn.Module):
    """The fold into an image with the stretch as an interpolation, which no counter takes for multiply-adds."""

    def __init__(self, config: AudioConfig) -> None:
        super().__init__()
        self.image_size, self.freq_ratio = config.image_size, config.freq_ratio

    def forward(self, mel_BFT: Tensor) -> Tensor:
        size = (mel_BFT.shape[1], self.image_size * self.freq_ratio)
        stretched = F.interpolate(mel_BFT[:, None], size, mode="bicubic", align_corners=True)[:, 0]
        segments = stretched.unflatten(2, (self.freq_ratio, self.image_size))
        return segments.transpose(1, 2).reshape(mel_BFT.shape[0], 1, self.image_size, self.image_size)


class NormWithAudioSetHead(nn.LayerNorm):
    """The last norm, followed by HTSAT's AudioSet head, whose result is dropped as the contrastive loss drops it."""

    def __init__(self, config: AudioConfig) -> None:
        super().__init__(config.output_dim)
        self.kernel_height = max(1, config.stage_grids[-1] // config.freq_ratio)
        self.tscam_conv = nn.Conv2d(config.output_dim, config.num_classes, (self.kernel_height, 3), padding=(0, 1))

    def forward(self, tokens_BHWC: Tensor) -> Tensor:
        normed = super().forward(tokens_BHWC)
        # Rows of the grid are time segments of `kernel_height` frequencies each: lay the segments side by side.
        segments = normed.permute(0, 3, 1, 2).unflatten(2, (-1, self.kernel_height))
        self.tscam_conv(segments.transpose(2, 3).flatten(3))
        return normed
