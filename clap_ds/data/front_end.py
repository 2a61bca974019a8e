"""Define the kinds of shards and the front end that prepared them.

`encoded`: audio files in any supported format. `waveform`: 16-bit mono WAV at the model's sample rate. `mel`: the
model's log-mel features as NumPy files, (frames, mel_bins) float16.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from clap_ds.config.model import AudioConfig

Kind = Literal["encoded", "waveform", "mel"]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True, slots=True)
class FrontEnd:
    """Describe the audio processing before the audio tower, with the fields of `AudioConfig`."""

    sample_rate: int
    num_samples: int
    stft_window: int
    hop_size: int
    mel_bins: int
    fmin: float
    fmax: int
    fusion: bool = False

    @classmethod
    def of(cls, audio: AudioConfig) -> FrontEnd:
        return cls(**{name: getattr(audio, name) for name in cls.__slots__})
