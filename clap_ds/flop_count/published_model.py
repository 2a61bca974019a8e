"""The model that open_clip's profiler measured, with operations that the published figures count
but this engine doesn't execute.

It is for counting only: its outputs are meaningless.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clap_ds.config.model import AudioConfig, ClapConfig
from clap_ds.flop_count.counters import build
from clap_ds.model.clap import ClapModel
from clap_ds.model.htsat import FoldToImage
from clap_ds.model.mel import MIN_POWER, LogMel, full_scale


def build_published_model(config: ClapConfig) -> ClapModel:
    """Build a model with convolutional STFT, interpolated stretch, AudioSet head, and all tokens in
    the last text layer."""
    model = build(config)
    model.text.roberta.encoder.layer[-1].first_only = False
    model.add_module("mel", ConvolutionMel(config.audio))
    model.audio.add_module("fold", InterpolatingFold(config.audio))
    model.audio.add_module("norm", NormWithAudioSetHead(config.audio))
    return model.requires_grad_(False)


class ConvolutionMel(LogMel):
    """The front end of LAION-CLAP, torchlibrosa's, with a convolution as Fourier transform."""

    waves: Tensor

    def __init__(self, config: AudioConfig) -> None:
        super().__init__(config)
        # 2π·k·n / N for frequency k and sample n.
        samples_N = torch.arange(self.num_fft, dtype=torch.float64)
        frequencies_K = samples_N[: self.num_fft // 2 + 1] * (2 * math.pi / self.num_fft)
        angles_KN = torch.outer(frequencies_K, samples_N)
        waves_KN = torch.cat([angles_KN.cos(), -angles_KN.sin()]).float() * self.window
        self.register_buffer("waves", waves_KN[:, None], persistent=False)

    def forward(self, waveforms: Tensor) -> Tensor:
        padded = F.pad(full_scale(waveforms)[:, None], (self.num_fft // 2,) * 2, mode="reflect")
        with torch.autocast(waveforms.device.type, enabled=False):
            spectrum = F.conv1d(padded, self.waves, stride=self.hop_size)
            real_BKT, imaginary_BKT = spectrum.chunk(2, dim=1)
            power = self.mel_power(torch.complex(real_BKT, imaginary_BKT))
            return 10.0 * power.clamp(min=MIN_POWER).log10()  # decibels


class InterpolatingFold(FoldToImage):
    """A fold into an image with an interpolation as stretch, which no counter counts as
    multiply-adds."""

    def stretch_time(self, mel_BFT: Tensor) -> Tensor:
        size = (mel_BFT.shape[1], self.image_size * self.freq_ratio)
        return F.interpolate(mel_BFT[:, None], size, mode="bicubic", align_corners=True)[:, 0]


class NormWithAudioSetHead(nn.LayerNorm):
    """The last norm, and HTSAT's AudioSet head, whose result is unused, as in contrastive
    training."""

    def __init__(self, config: AudioConfig) -> None:
        super().__init__(config.output_dim)
        self.height = max(1, config.stage_grids[-1] // config.freq_ratio)
        self.tscam_conv = nn.Conv2d(
            config.output_dim, config.num_classes, (self.height, 3), padding=(0, 1)
        )

    def forward(self, tokens_BHWC: Tensor) -> Tensor:
        normed = super().forward(tokens_BHWC)
        # Grid rows are time segments of `height` frequencies each: place the segments side by side.
        segments = normed.permute(0, 3, 1, 2).unflatten(2, (-1, self.height))
        self.tscam_conv(segments.transpose(2, 3).flatten(3))
        return normed
