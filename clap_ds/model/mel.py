"""Compute LAION-CLAP's log-mel spectrograms from waveforms on their device.

Always in fp32: 16 bits can't represent the 100 dB between a spectrum's peaks and its floor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clap_ds.config.model import INT16_SCALE, AudioConfig
from clap_ds.model.precision import at_least_fp32
from clap_ds.model.torchaudio_compat import torchaudio

MIN_POWER = 1e-10
"""Floor of the mel power (-100 dB)."""
ALIGNED = 16
"""Matrix products on GPUs are fastest over multiples of this."""


class LogMel(nn.Module):
    """A log-mel spectrogram in dB, with a floor of 1e-10 under log10. The STFT is centered and
    reflect-padded, with a periodic Hann window. As in LAION-CLAP, the filters are Slaney's with
    Slaney normalization or, with feature fusion, HTK's without."""

    window: Tensor
    mel_filters: Tensor

    def __init__(self, config: AudioConfig) -> None:
        super().__init__()
        self.num_samples = config.num_samples
        self.num_fft = config.stft_window
        self.hop_size = config.hop_size
        # torchaudio can't build filters on the meta device.
        with torch.device("cpu"):
            filters = torchaudio.functional.melscale_fbanks(
                self.num_fft // 2 + 1,
                float(config.fmin),
                float(config.fmax),
                config.mel_bins,
                config.sample_rate,
                norm=None if config.fusion else "slaney",
                mel_scale="htk" if config.fusion else "slaney",
            )
        # Frequencies above fmax have no filter.
        last = int(filters.any(dim=1).nonzero().max())
        self.num_used = min((last // ALIGNED + 1) * ALIGNED, len(filters))
        # Not in checkpoints, as the sizes determine them.
        self.register_buffer("window", torch.hann_window(config.stft_window), persistent=False)
        self.register_buffer("mel_filters", filters.T.contiguous(), persistent=False)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        return super()._apply(at_least_fp32(fn), recurse)

    def forward(self, waveforms: Tensor) -> Tensor:
        """Convert (batch, num_samples), int16 or floats of full scale ±1, to fp32 (batch,
        num_frames, mel_bins) in dB relative to power 1. Raises ValueError if clips don't have the model's length."""
        if waveforms.ndim != 2 or waveforms.shape[1] != self.num_samples:
            raise ValueError(
                f"waveforms are {tuple(waveforms.shape)}, expected (batch, {self.num_samples}) samples"
            )
        return self.of_any_length(waveforms)

    def of_any_length(self, waveforms: Tensor) -> Tensor:
        """Convert (batch, samples) longer than half a window to (batch, samples // hop_size + 1,
        mel_bins)."""
        with torch.autocast(waveforms.device.type, enabled=False):
            waveforms = full_scale(waveforms, self.window.dtype)
            # Half a window on each side centers the first frame on the first sample.
            spectrum_BKT = torch.stft(
                _reflect(waveforms, self.num_fft // 2),
                self.num_fft,
                self.hop_size,
                window=self.window,
                center=False,
                return_complex=True,
            )
            power_BTF = self.mel_power(spectrum_BKT)
            # Decibels relative to power 1.
            return 10.0 * power_BTF.clamp(min=MIN_POWER).log10()

    def mel_power(self, spectrum_BKT: Tensor) -> Tensor:
        """Filter the power of a complex (batch, frequencies, frames) to (batch, frames, mel
        bins)."""
        filters = self.mel_filters
        if spectrum_BKT.is_cuda:
            # On CPUs a shorter sum would round differently.
            filters = filters[:, : self.num_used].contiguous()
            spectrum_BKT = spectrum_BKT[:, : self.num_used]
        # Squaring the parts avoids the square root of abs().
        power_BKT = spectrum_BKT.real.square() + spectrum_BKT.imag.square()
        return torch.matmul(filters, power_BKT).transpose(1, 2)


def full_scale(waveforms: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Convert waveforms, floating of full scale ±1 or int16, to floating ones."""
    if waveforms.is_floating_point():
        return waveforms.to(dtype)
    return waveforms.to(dtype) / INT16_SCALE


def _reflect(waveforms: Tensor, width: int) -> Tensor:
    """Pad like `F.pad` in reflect mode, which is slow on CPUs. Compiled for a GPU, `F.pad` stores
    no padded batch."""
    if waveforms.is_cuda:
        return F.pad(waveforms, (width, width), mode="reflect")
    # The edge samples themselves aren't repeated.
    start = waveforms[:, 1 : width + 1].flip(1)
    end = waveforms[:, -width - 1 : -1].flip(1)
    return torch.cat([start, waveforms, end], dim=1)
