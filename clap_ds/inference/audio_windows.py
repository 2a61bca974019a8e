"""Read audio of any length as a stream of windows of the model's length, in constant memory."""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import soundfile
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import IterableDataset

from clap_ds.config.model import AudioConfig
from clap_ds.data import decoding
from clap_ds.data.clip import Broken, read_clip
from clap_ds.data.decoding import BrokenItemError, Encoded, mix, open_audio, repeat
from clap_ds.data.shard_io import open_shard
from clap_ds.data.shard_manifest import DAMAGE, words
from clap_ds.data.workers import Loader
from clap_ds.evaluation.clips import Clip, Middle, empty_row

_BLOCK = 2**18  # frames decoded at a time

Pooling = Literal["none", "mean", "center"]


@dataclass(frozen=True)
class Sound:
    """Hold a sound in memory and its name for errors: an encoded file, or samples, (channels,
    num_samples) float32 in ±1 or int16."""

    name: str
    samples: bytes | NDArray[Any]
    sample_rate: int = 0


Source = str | Path | Clip | Sound | Broken


@dataclass(slots=True)
class EmbeddingRow:
    """Hold the embedding, (dim,) float32 of length 1, of a window of a source (a path or `tar:
    key`) or of all of it; or the error and where it occurred."""

    source: str
    start_s: float
    end_s: float
    vector: NDArray[np.float32] | None = None
    error: str = ""

    @property
    def is_end(self) -> bool:
        """Return whether this row ends its source."""
        return self.start_s == self.end_s


Window = tuple[EmbeddingRow, Tensor | None]
"""A row without its embedding and its waveform, or the end of a source."""


def read_windows(
    sources: Sequence[Source],
    audio: AudioConfig,
    pooling: Pooling,
    overlap: float,
    *,
    num_workers: int,
    ahead: int,
) -> Iterator[Window]:
    """Yield the windows of the sources in order, and after each source a row without a window, with
    the error if any. `num_workers` processes (0: this one) prefetch `ahead` windows."""
    num_streams = max(1, min(num_workers, len(sources)))
    options: dict[str, Any] = (
        {"prefetch_factor": max(2, ahead // num_streams)} if num_workers else {}
    )
    options |= {"num_workers": min(1, num_workers), "section": "inference", "batch_size": None}
    streams = [
        _Windows(sources[first::num_streams], audio, pooling, overlap)
        for first in range(num_streams)
    ]
    loaders: list[Loader[Window]] = [Loader(stream, **options) for stream in streams]
    try:
        for number in range(len(sources)):
            for row, waveform in loaders[number % num_streams]:
                yield row, waveform
                if waveform is None:
                    break
    finally:
        for loader in loaders:
            loader.close()


class _Windows(IterableDataset[Window]):
    def __init__(
        self, sources: Sequence[Source], audio: AudioConfig, pooling: Pooling, overlap: float
    ) -> None:
        self._sources = sources
        self._audio = audio
        self._pooling = pooling
        self._hop = max(1, round((1 - overlap) * audio.num_samples))
        self._open_shard = lru_cache(maxsize=1)(open_shard)

    def __iter__(self) -> Iterator[Window]:
        for source in self._sources:
            name = source.name if isinstance(source, (Clip, Sound, Broken)) else str(source)
            end_s = 0.0
            error = ""
            try:
                for start_s, end_s, waveform in self._windows(source):
                    yield EmbeddingRow(name, start_s, end_s), waveform
            except (*DAMAGE, soundfile.SoundFileError) as damage:
                error = words(damage)
            yield EmbeddingRow(name, end_s, end_s, error=error), None

    def _windows(self, source: Source) -> Iterator[tuple[float, float, Tensor]]:
        encoded = self._content(source)
        rate = self._audio.sample_rate
        length = self._audio.num_samples
        with open_audio(encoded) as opened:
            ratio = decoding.resampling_ratio(opened.samplerate, rate)
            if self._pooling == "center" or opened.frames <= math.ceil(length / ratio):
                row = (
                    empty_row(self._audio, "encoded")
                    if self._pooling == "center"
                    else torch.zeros(length)
                )
                read_clip(encoded, row, audio=self._audio, rng=Middle())
                yield 0.0, opened.frames / opened.samplerate, row
                return
            blocks = _mono(opened)
            if ratio != 1:
                blocks = (block.clamp_(-1, 1) for block in decoding.resample_blocks(blocks, ratio))
            for start, waveform in _cut(blocks, length, self._hop):
                yield start / rate, (start + length) / rate, waveform

    def _content(self, source: Source) -> Encoded:
        """Return a source's encoded content, or a path for a file."""
        if isinstance(source, Broken):
            raise BrokenItemError(source.reason)
        if isinstance(source, Sound):
            if isinstance(samples := source.samples, bytes):
                return samples
            subtype = (
                "PCM_16" if samples.dtype == np.int16 else "FLOAT"
            )  # to use the same code as for files
            soundfile.write(
                to := io.BytesIO(), samples.T, source.sample_rate, format="RF64", subtype=subtype
            )
            return to.getvalue()
        file = self._open_shard(source.shard if isinstance(source, Clip) else str(source))
        return (
            source.place.read(file) if isinstance(source, Clip) else f"/proc/self/fd/{file.number}"
        )


def _mono(file: soundfile.SoundFile) -> Iterator[Tensor]:
    """Yield the mean of the channels, (T,) float32, in blocks. Finally raise BrokenItemError if it
    was unusable."""
    found = 0
    is_silent = True
    while len(frames := file.read(_BLOCK, "float32", always_2d=True)):
        mixed = np.empty(len(frames), np.float32)
        is_silent = mix(frames, mixed)[1] and is_silent
        found += len(frames)
        yield torch.from_numpy(mixed)
    decoding.check_samples(found, file.frames, is_silent)


def _cut(blocks: Iterable[Tensor], length: int, hop: int) -> Iterator[tuple[int, Tensor]]:
    """Yield windows and their starts: every `hop` samples, and one at the end. Repeat audio shorter
    than a window."""
    # the next window's start, and the end of the held samples
    held = torch.empty(0)
    start = 0
    end = 0
    for block in blocks:
        held = torch.cat([held[-length:], block])
        end = end + len(block)
        while start + length <= end:
            yield start, held[len(held) - end + start :][:length].clone()
            start += hop
    if end < length:
        window = torch.cat([held, torch.zeros(length - end)])
        repeat(window.numpy(), end)
        yield 0, window
    elif start - hop + length < end:
        yield end - length, held[-length:].clone()
