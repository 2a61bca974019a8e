"""Convert audio for shards: keep the file, or compute its uncropped waveform or log-mel features."""

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
from clap_ds.data.batch import Kind
from clap_ds.data.clip import FEATURES
from clap_ds.data.decoding import AUDIO_FORMATS, BrokenItemError, check_peak, check_samples, decode_audio, open_audio
from clap_ds.data.resampling import resampling_ratio
from clap_ds.data.shard_manifest import FrontEnd
from clap_ds.model.mel import LogMel


class EncodedClip(NamedTuple):
    extension: str
    content: bytes
    seconds: float


def as_it_is(content: bytes, extension: str) -> EncodedClip:
    """Keep a file, or convert it to FLAC if training doesn't support its format. Raises BrokenItemError."""
    with open_audio(content) as file:
        rate, expected = file.samplerate, file.frames
        samples = file.read(dtype="float32", always_2d=True)
    check_peak(samples)
    check_samples(len(samples), expected, not samples.any())
    if extension not in AUDIO_FORMATS:
        mixed = samples if samples.shape[1] <= 8 else samples.mean(axis=1)  # FLAC supports 8 channels
        extension, content = "flac", _encoded(mixed.clip(-1, 1), rate, "FLAC")
    return EncodedClip(extension, content, len(samples) / rate)


class Preparation:
    """Convert audio files to kind `waveform`, or `mel` after repeating short clips (see `front_end`)."""

    def __init__(self, kind: Kind, audio: AudioConfig) -> None:
        self.kind, self.audio, self.front_end = kind, audio, FrontEnd.of(audio)
        self._log_mel = LogMel(audio)
        convert(self._log_mel)

    def clip(self, content: bytes, extension: str = "") -> EncodedClip:
        """Convert an audio file. Raises BrokenItemError."""
        rate = self.audio.sample_rate
        waveform = _decode(content, rate)
        if not waveform.any():
            raise BrokenItemError("audio is silent: every sample is 0 in 16 bits")
        wav = _encoded(waveform, rate, "WAV")
        if self.kind == "mel":
            return EncodedClip(FEATURES, _npy(self._features(wav, len(waveform))), len(waveform) / rate)
        return EncodedClip("wav", wav, len(waveform) / rate)

    def _features(self, wav: bytes, num_samples: int) -> NDArray[np.float16]:
        """Compute the (frames, mel_bins) features of a WAV, as training would, but uncropped."""
        length, hop = self.audio.num_samples, self.audio.hop_size
        row = torch.empty(max(num_samples, length), dtype=torch.int16)
        decode_audio(wav, row, sample_rate=self.audio.sample_rate, rng=random.Random(0))
        whole = length + (len(row) - length) // hop * hop
        return self._log_mel.of_any_length(row[None, :whole])[0].half().numpy()


def add_preparation_options(parser: argparse.ArgumentParser, kinds: tuple[Kind, ...], **more: Any) -> None:
    add = parser.add_argument_group("preprocessing for a model").add_argument
    what = "waveform: 16-bit mono WAV at the model's rate; mel: the model's float16 features; encoded: original files"
    add("--kind", choices=kinds, help=what, **more)
    add("--preset", type=preset_argument, metavar="NAME", help=f"model preset: {PRESETS}")


def preparation_of(options: argparse.Namespace) -> Preparation | None:
    """Build the `Preparation` of these options; None for kind `encoded`. Raises UserError if they conflict."""
    if (options.kind == "encoded") == bool(options.preset):
        raise UserError(f"--kind {options.kind}: waveform and mel require a --preset ({PRESETS}); encoded takes none")
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
