"""What becomes of audio on its way into a shard: a file as people have it, or as a model sees it, once for all runs, the
waveform before cropping or its log-mel features.

These two go the way that decoding for a run on `waveforms: int16` goes, by the same functions: features of clips not longer
than the model's differ from the model's own of the encoded clip by their rounding to float16 alone, by 2⁻⁵ dB at most below 128 dB.
"""

from __future__ import annotations

import argparse
import io
import math
import random
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import soundfile
import torch
from numpy.typing import NDArray

from clap_ds.config.errors import UserError
from clap_ds.config.model import AudioConfig, load_preset
from clap_ds.config.model_names import preset_names
from clap_ds.data.batch import INT16_SCALE
from clap_ds.data.broken import BrokenItemError
from clap_ds.data.decoding import AUDIO_FORMATS, check_finite, check_samples, decode_audio, open_audio
from clap_ds.data.features import FEATURES
from clap_ds.data.front_end import FrontEnd, Kind
from clap_ds.data.resampling import resample, resampling_ratio
from clap_ds.data.shard_making.audio_files import check_whole
from clap_ds.model.mel import LogMel
from clap_ds.native.convert import convert

_LONGEST_PIECE = 1e6  # seconds


class Clip(NamedTuple):
    """Audio as it goes into a shard."""

    extension: str
    content: bytes
    seconds: float
    suffix: str = ""  # of the item's key, where there are several of one file


@dataclass(frozen=True, slots=True)
class Encoding:
    """A file as it is or, where training couldn't read it or it is wanted, as FLAC.

    `sample_rate`: Hz; None keeps the file's. `to_flac`: re-encode even what needn't be. `mono`: the channels' mean."""

    to_flac: bool = False
    sample_rate: int | None = None
    mono: bool = False

    def clips(self, content: bytes, extension: str) -> list[Clip]:
        """The one clip of an audio file; BrokenItemError where it can't be used, or where its end is missing."""
        with open_audio(content) as file:
            rate = file.samplerate
            samples = file.read(dtype="float32", always_2d=True)
            check_whole(content, file, len(samples))
        check_finite(samples)
        check_samples(len(samples), len(samples), not samples.any())
        wanted_rate = self.sample_rate or rate
        if extension not in AUDIO_FORMATS or self.to_flac or self.mono or wanted_rate != rate:
            waveform = torch.from_numpy(samples.T.copy())
            if self.mono or len(waveform) > 8:  # FLAC's most channels
                waveform = waveform.mean(dim=0, keepdim=True)
            converted = resample(waveform, rate, wanted_rate).clamp_(-1, 1).T.numpy()
            extension, content = "flac", _encoded(converted, wanted_rate, "FLAC")
        return [Clip(extension, content, len(samples) / rate)]


@dataclass
class Preparation:
    """What becomes of audio: WAV files of one channel in 16 bits at the model's rate (`waveform`), or the model's features,
    (frames, mel_bins) float16, as NumPy files (`mel`).

    Clips stay whole, or are cut into `pieces` of so many seconds; the last is from half to one and a half times as long, and
    silent ones are left out. Of `mel`, clips not longer than the model's are repeated to its length first, as for training, and
    of longer ones what is beyond the last whole hop is left out.
    """

    kind: Kind
    audio: AudioConfig
    pieces: float | None = None
    _log_mel: LogMel = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._log_mel = LogMel(self.audio)
        convert(self._log_mel)

    def __repr__(self) -> str:
        """What the result follows from."""
        return f"{self.kind} {FrontEnd.of(self.audio)} {self.pieces}"

    def clips(self, content: bytes, extension: str = "") -> list[Clip]:
        """The clips of an audio file; BrokenItemError where it can't be used, or where its end is missing."""
        rate, prepared = self.audio.sample_rate, []
        waveforms = self._pieces(_decode(content, rate))
        for number, waveform in enumerate(waveforms):
            if not waveform.any():
                continue
            extension, file = "wav", _encoded(waveform, rate, "WAV")
            if self.kind == "mel":
                extension, file = FEATURES, _npy(self._features(file, len(waveform)))
            suffix = f"-{number:03d}" if len(waveforms) > 1 else ""
            prepared.append(Clip(extension, file, len(waveform) / rate, suffix))
        if not prepared:
            raise BrokenItemError("audio is silent: every sample is 0 in 16 bits")
        return prepared

    def _pieces(self, waveform: NDArray[np.int16]) -> list[NDArray[np.int16]]:
        if self.pieces is None:
            return [waveform]
        length = round(self.pieces * self.audio.sample_rate)
        number = max(1, (2 * len(waveform) + length) // (2 * length))
        return np.split(waveform, range(length, number * length, length))

    def _features(self, wav: bytes, num_samples: int) -> NDArray[np.float16]:
        """(frames, mel_bins) of what a reader of this WAV would give the model, or of all of it if it is longer."""
        length, hop = self.audio.num_samples, self.audio.hop_size
        row = torch.empty(max(num_samples, length), dtype=torch.int16)
        decode_audio(wav, row, sample_rate=self.audio.sample_rate, rng=random.Random(0))
        # Clip by clip, so that an hour takes no more memory than ten seconds. Frames near a clip's edges see its reflection
        # there: those that the next clip has, too, are taken from it.
        edge = math.ceil(self.audio.stft_window / 2 / hop)
        assert self.audio.num_frames > 2 * edge, "clips shorter than a window"
        last = (len(row) - length) // hop
        features = np.empty((last + self.audio.num_frames, self.audio.mel_bins), dtype=np.float16)
        for start in [*range(0, last, self.audio.num_frames - 2 * edge), last]:
            of_clip = self._log_mel(row[None, start * hop : start * hop + length].float().div_(INT16_SCALE))[0]
            skipped = edge if start else 0
            features[start + skipped : start + len(of_clip)] = of_clip[skipped:]
        return features


Conversion = Encoding | Preparation


def add_preparation_options(add: Any, kinds: tuple[Kind, ...], **more: Any) -> None:
    """`add` is an `add_argument` of argparse."""
    what = {
        "encoded": "audio files",
        "waveform": "WAV, mono, 16 bits, the model's rate",
        "mel": "the model's features, 16 bits",
    }
    add("--kind", choices=kinds, help="; ".join(f"{kind}: {what[kind]}" for kind in kinds), **more)
    names = ", ".join(preset_names())
    add("--preset", choices=preset_names(), metavar="NAME", help=f"the model that it is for: {names}")
    help_text = "cut longer audio into pieces of so many, each an item with its captions (default: it stays whole)"
    add("--pieces", type=float, metavar="SECONDS", help=help_text)


def preparation_of(options: argparse.Namespace) -> Preparation | None:
    """What these options ask for; None for kind `encoded`. UserError where they don't go together."""
    if options.kind == "encoded":
        if options.preset or options.pieces is not None:
            raise UserError("--preset and --pieces: expected --kind waveform or --kind mel, too")
        return None
    if not options.preset:
        raise UserError(f"--kind {options.kind}: expected --preset, too, one of {', '.join(preset_names())}")
    audio = load_preset(options.preset).audio
    shortest = audio.num_samples / audio.sample_rate
    if options.pieces is not None and not shortest <= options.pieces <= _LONGEST_PIECE:
        raise UserError(f"--pieces {options.pieces}: expected seconds, at least the {shortest:g} of the model's clips")
    return Preparation(options.kind, audio, options.pieces)


def _decode(content: bytes, rate: int) -> NDArray[np.int16]:
    """All of an audio file (T,), as decoding for training gives it."""
    with open_audio(content) as file:
        ratio = resampling_ratio(file.samplerate, rate)
        row = torch.from_numpy(np.empty(math.ceil(file.frames * ratio), np.int16))  # torch's error isn't a MemoryError
        length = decode_audio(content, row, sample_rate=rate, rng=random.Random(0))
        check_whole(content, file, file.frames if length == len(row) else math.floor(length / ratio))
    return row[:length].numpy()


def _encoded(samples: NDArray[Any], rate: int, file_format: str) -> bytes:
    """A file of 16 bits."""
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format=file_format, subtype="PCM_16")
    return file.getvalue()


def _npy(array: NDArray[Any]) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()
