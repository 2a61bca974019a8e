"""What becomes of audio on its way into a shard: a file as it is, the waveform before cropping, or its log-mel features."""

from __future__ import annotations

import argparse
import io
import math
import random
from typing import Any, NamedTuple

import numpy as np
import soundfile
import torch
from numpy.typing import NDArray

from clap_ds.config.errors import UserError
from clap_ds.config.model import PRESETS, AudioConfig, load_preset, preset_argument
from clap_ds.cpu_kernels.patch_model import convert
from clap_ds.data.batch import INT16_SCALE
from clap_ds.data.broken import BrokenItemError
from clap_ds.data.decoding import AUDIO_FORMATS, check_peak, check_samples, decode_audio, open_audio
from clap_ds.data.features import FEATURES
from clap_ds.data.front_end import FrontEnd, Kind
from clap_ds.data.resampling import resampling_ratio
from clap_ds.model.mel import LogMel


class Clip(NamedTuple):
    extension: str
    content: bytes
    seconds: float


def as_it_is(content: bytes, extension: str) -> Clip:
    """Keep a file as it is or, where training couldn't read it, as FLAC; BrokenItemError where it can't be used."""
    with open_audio(content) as file:
        rate, expected = file.samplerate, file.frames
        samples = file.read(dtype="float32", always_2d=True)
    check_peak(samples)
    check_samples(len(samples), expected, not samples.any())
    if extension not in AUDIO_FORMATS:
        mixed = samples if samples.shape[1] <= 8 else samples.mean(axis=1)  # FLAC's most channels
        extension, content = "flac", _encoded(mixed.clip(-1, 1), rate, "FLAC")
    return Clip(extension, content, len(samples) / rate)


class Preparation:
    """Makes audio files what `front_end` calls `waveform` or `mel`, of which short clips are repeated first."""

    def __init__(self, kind: Kind, audio: AudioConfig) -> None:
        self.kind, self.audio, self.front_end = kind, audio, FrontEnd.of(audio)
        self._log_mel = LogMel(audio)
        convert(self._log_mel)

    def clip(self, content: bytes, extension: str = "") -> Clip:
        """Prepare an audio file; BrokenItemError where it can't be used."""
        rate = self.audio.sample_rate
        waveform = _decode(content, rate)
        if not waveform.any():
            raise BrokenItemError("audio is silent: every sample is 0 in 16 bits")
        wav = _encoded(waveform, rate, "WAV")
        if self.kind == "mel":
            return Clip(FEATURES, _npy(self._features(wav, len(waveform))), len(waveform) / rate)
        return Clip("wav", wav, len(waveform) / rate)

    def _features(self, wav: bytes, num_samples: int) -> NDArray[np.float16]:
        """Compute (frames, mel_bins) of what a reader of this WAV would give the model, or of all of it if it is longer."""
        length, hop = self.audio.num_samples, self.audio.hop_size
        row = torch.empty(max(num_samples, length), dtype=torch.int16)
        decode_audio(wav, row, sample_rate=self.audio.sample_rate, rng=random.Random(0))
        whole = length + (len(row) - length) // hop * hop
        return self._log_mel.of_any_length(row[None, :whole].float().div_(INT16_SCALE))[0].half().numpy()


def add_preparation_options(parser: argparse.ArgumentParser, kinds: tuple[Kind, ...], **more: Any) -> None:
    add = parser.add_argument_group("audio prepared for a model, once for all runs").add_argument
    what = "waveform: WAV, mono, 16 bits, the model's rate; mel: the model's features, 16 bits; encoded: audio files"
    add("--kind", choices=kinds, help=what, **more)
    add("--preset", type=preset_argument, metavar="NAME", help=f"the model that it is for: {PRESETS}")


def preparation_of(options: argparse.Namespace) -> Preparation | None:
    """Make what these options ask for; None for kind `encoded`. UserError where they don't go together."""
    if (options.kind == "encoded") == bool(options.preset):
        raise UserError(f"--kind {options.kind}: waveform and mel, and these alone, take a --preset, one of {PRESETS}")
    if options.kind == "mel" and load_preset(options.preset).audio.fusion:
        raise UserError(f"--kind mel: {options.preset} has feature fusion: expected --kind waveform")
    return Preparation(options.kind, load_preset(options.preset).audio) if options.preset else None


def _decode(content: bytes, rate: int) -> NDArray[np.int16]:
    with open_audio(content) as file:
        ratio = resampling_ratio(file.samplerate, rate)
        row = torch.from_numpy(np.empty(math.ceil(file.frames * ratio), np.int16))  # torch's error isn't a MemoryError
    length = decode_audio(content, row, sample_rate=rate, rng=random.Random(0))
    return row[:length].numpy()


def _encoded(samples: NDArray[Any], rate: int, file_format: str) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format=file_format, subtype="PCM_16")
    return file.getvalue()


def _npy(array: NDArray[Any]) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()
