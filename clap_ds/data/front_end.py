"""What shards hold, and by which front end it was prepared.

`encoded`: audio files as people have them. `waveform`: WAV files of one channel in 16 bits at the model's sample rate. `mel`:
the model's log-mel features, as NumPy files (frames, mel_bins) in float16.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from clap_ds.config.model import AudioConfig

Kind = Literal["encoded", "waveform", "mel"]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True, slots=True)
class FrontEnd:
    """What becomes of audio before the model's audio tower; fields as `AudioConfig` has them."""

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
