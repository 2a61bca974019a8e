"""Audio of any length in windows of the model's length, read on from its start: hours take no more memory than a minute.

What is at most a window long is `decode_audio`'s, as in evaluation. In longer files nothing jumps, which not every format can
do exactly, and so each is one process's; processes take turns with files.
"""

from __future__ import annotations

import io
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import soundfile
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import IterableDataset

from clap_ds.config.model import AudioConfig
from clap_ds.data.broken import BrokenItemError
from clap_ds.data.decoding import Encoded, Stretch, check_samples, decode_audio, mix, open_audio, repeat
from clap_ds.data.resampling import resample_blocks, resampling_ratio
from clap_ds.data.shard_files import open_shard
from clap_ds.data.tar_items import DAMAGE, Place, words
from clap_ds.data.workers import Loader
from clap_ds.evaluation.clips import Clip, Middle, empty_row

_BLOCK = 2**18  # frames decoded at a time
_WAV_BYTES = 2**32 - 2**16  # more than that, and the header, is RF64's

Which = Literal["each", "mean", "middle"]


@dataclass(frozen=True)
class Sound:
    """Samples in memory, (channels, num_samples) float32 of full scale ±1 or int16, and what they are called in errors."""

    name: str
    samples: NDArray[Any]
    sample_rate: int

    def encoded(self) -> bytes:
        """As a file, so that samples in memory and in files are treated by the same code."""
        kind = "PCM_16" if self.samples.dtype == np.int16 else "FLOAT"
        container = "WAV" if self.samples.nbytes < _WAV_BYTES else "RF64"
        try:
            soundfile.write(file := io.BytesIO(), self.samples.T, self.sample_rate, format=container, subtype=kind)
        except soundfile.SoundFileError as error:
            raise BrokenItemError(f"no file can hold such audio: {getattr(error, 'error_string', error)}") from None
        return file.getvalue()


Source = str | Path | Clip | Sound


class Piece(NamedTuple):
    """A window of a source, its waveform (num_samples,) float32; or, without a waveform, the source's end and what, if
    anything, is wrong with it. Times are of the source."""

    start_s: float
    end_s: float
    waveform: Tensor | None
    error: str = ""


def name_of(source: Source) -> str:
    return source.name if isinstance(source, (Clip, Sound)) else str(source)


def read_windows(
    sources: Sequence[Source], audio: AudioConfig, *, which: Which, overlap: float, num_workers: int, ahead: int
) -> Iterator[Piece]:
    """The windows of the sources in order, those of each followed by its end. Read by `num_workers` processes (0: by this one),
    which keep `ahead` windows ready between them; a ValueError where one of these was killed."""
    num_streams = max(1, min(num_workers, len(sources)))
    options = {"prefetch_factor": max(2, ahead // num_streams)} if num_workers else {}
    streams = [_Windows(sources[first::num_streams], audio, which, overlap) for first in range(num_streams)]
    loaders: list[Loader[Piece]] = [
        Loader(stream, num_workers=min(1, num_workers), section="inference", batch_size=None, **options)
        for stream in streams
    ]
    try:
        for number in range(len(sources)):
            for piece in loaders[number % num_streams]:
                yield piece
                if piece.waveform is None:
                    break
    finally:
        for loader in loaders:
            loader.close()


class _Windows(IterableDataset[Piece]):
    def __init__(self, sources: Sequence[Source], audio: AudioConfig, which: Which, overlap: float) -> None:
        self._sources, self._audio, self._which = sources, audio, which
        self._hop = max(1, round((1 - overlap) * audio.num_samples))
        self._open_shard = lru_cache(maxsize=1)(open_shard)

    def __iter__(self) -> Iterator[Piece]:
        for source in self._sources:
            end_s, error = 0.0, ""
            try:
                for piece in self._windows(source):
                    yield piece
                    end_s = piece.end_s
            except BrokenItemError as broken:
                error = str(broken)
            except DAMAGE as damage:
                error = f"can't be read: {words(damage)}"
            yield Piece(end_s, end_s, None, error)

    def _windows(self, source: Source) -> Iterator[Piece]:
        """Windows without sound are held back until there is one with it: a file without any is broken."""
        encoded, stretch = self._content(source)
        rate, length = self._audio.sample_rate, self._audio.num_samples
        with open_audio(encoded) as file:
            ratio, duration_s = resampling_ratio(file.samplerate, rate), file.frames / file.samplerate
            is_one = self._which == "middle" or file.frames <= math.ceil(length / ratio)
        if is_one:
            row = empty_row(self._audio, "encoded")
            decode_audio(encoded, row, sample_rate=rate, rng=Middle())
            yield Piece(0.0, duration_s, row)
            return
        silence, held_back, is_heard = torch.zeros(length), list[int](), False
        with open_audio(stretch) as file:
            for start, waveform in _cut(resample_blocks(_mono(file), ratio), length, self._hop):
                if not (is_heard := is_heard or bool(waveform.any())):
                    held_back.append(start)
                    continue
                for earlier in held_back:
                    yield Piece(earlier / rate, (earlier + length) / rate, silence)
                held_back.clear()
                yield Piece(start / rate, (start + length) / rate, waveform)

    def _content(self, source: Source) -> tuple[Encoded, Encoded | Stretch]:
        """All of a source's file, mapped where it is long; and as what leaves no pages of it with this process."""
        if isinstance(source, Sound):
            return (encoded := source.encoded()), encoded
        file = self._open_shard(source.shard if isinstance(source, Clip) else str(source))
        place = source.place if isinstance(source, Clip) else Place(0, os.fstat(file.number).st_size)
        if not place.size:
            raise BrokenItemError("the file is empty")
        return place.read(file), Stretch(file.read, place.start, place.size)


def _mono(file: soundfile.SoundFile) -> Iterator[Tensor]:
    """The mean of the channels, (T,) float32, in blocks; then a BrokenItemError where that was of no use."""
    found, is_silent = 0, True
    while len(frames := file.read(_BLOCK, "float32", always_2d=True)):
        mixed = np.empty(len(frames), np.float32)
        is_silent = mix(frames, mixed)[1] and is_silent
        found += len(frames)
        yield torch.from_numpy(mixed)
    check_samples(found, file.frames, is_silent)


def _cut(blocks: Iterable[Tensor], length: int, hop: int) -> Iterator[tuple[int, Tensor]]:
    """Windows of the blocks put together, and where they start: one every `hop` samples, and one that ends with the last
    sample. What turns out to be shorter than a window is repeated."""
    held, at, following = torch.empty(0), 0, 0  # `at`: where what is held starts
    for block in blocks:
        held = torch.cat([held, block])
        while following + length <= at + len(held):
            yield following, held[following - at :][:length].clone()
            following += hop
        passed = max(0, len(held) - length)
        held, at = held[passed:], at + passed
    if len(held) < length:
        row = torch.zeros(length)
        row[: len(held)] = held
        repeat(row.numpy(), len(held))
        yield 0, row
    elif following - hop < at:
        yield at, held
