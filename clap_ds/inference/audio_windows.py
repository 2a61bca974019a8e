"""Read audio of any length as a stream of windows of the model's length, in constant memory."""

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
from clap_ds.data.clip import SkippedSample, read_clip
from clap_ds.data.decoding import BrokenItemError, Encoded, mix, open_audio, repeat
from clap_ds.data.shard_io import open_shard
from clap_ds.data.shard_manifest import DAMAGE, describe_error, expand_shards
from clap_ds.data.workers import Loader
from clap_ds.evaluation.clips import CenterCropRng, Clip, empty_row, list_clips

# Frames decoded at a time.
_BLOCK = 2**18

Pooling = Literal["none", "mean", "center"]


@dataclass(frozen=True)
class AudioInput:
    """Audio in memory, and its name for errors.

    `samples` is an encoded file, or (channels, num_samples) float32 in ±1 or int16.
    """

    name: str
    samples: bytes | NDArray[Any]
    sample_rate: int = 0


Source = str | Path | Clip | AudioInput | SkippedSample


@dataclass(slots=True)
class EmbeddingRow:
    """The embedding of a window of a source or of all of it, or the error and where it occurred.

    `source` is a path or `tar: key`. `vector` is (dim,) float32 of length 1.
    """

    source: str
    start_s: float
    end_s: float
    vector: NDArray[np.float32] | None = None
    error: str = ""

    @property
    def is_end(self) -> bool:
        """Return whether this row ends its source."""
        return self.start_s == self.end_s


# A row without its embedding and its waveform, or the end of a source.
Window = tuple[EmbeddingRow, Tensor | None]


def clips_in_shards(pattern: str) -> list[Clip | SkippedSample]:
    """List the clips of tars named by a path, pattern or URL, then the unusable ones."""
    clips, broken = list_clips(expand_shards(pattern))
    return [*clips, *broken]


def read_windows(
    sources: Sequence[Source],
    audio: AudioConfig,
    pooling: Pooling,
    overlap: float,
    *,
    num_workers: int,
    ahead: int,
) -> Iterator[Window]:
    """Yield the windows of the sources in order.

    After each source, yield a row without a window, with the error if any. `num_workers` processes
    (0: this one) prefetch `ahead` windows.
    """
    # Sources are dealt out to streams, each read by a process of its own.
    num_streams = max(1, min(num_workers, len(sources)))
    options: dict[str, Any] = {"section": "inference", "batch_size": None, "num_workers": 0}
    if num_workers:
        # All streams together prefetch `ahead`, each at least two.
        options |= {"num_workers": 1, "prefetch_factor": max(2, ahead // num_streams)}
    loaders: list[Loader[Window]] = []
    for stream in range(num_streams):
        windows = _Windows(sources[stream::num_streams], audio, pooling, overlap)
        loaders.append(Loader(windows, **options))
    try:
        for number in range(len(sources)):
            # The stream that this source was dealt to continues where it stopped.
            for row, waveform in loaders[number % num_streams]:
                yield row, waveform
                if waveform is None:
                    break
    finally:
        for loader in loaders:
            loader.close()


class _Windows(IterableDataset[Window]):
    """The windows of a stream's sources, and after each source its end."""

    def __init__(
        self, sources: Sequence[Source], audio: AudioConfig, pooling: Pooling, overlap: float
    ) -> None:
        self._sources = sources
        self._audio = audio
        self._pooling = pooling
        self._hop = max(1, round((1 - overlap) * audio.num_samples))
        # Clips of a tar follow each other, so one open tar is enough.
        self._open_shard = lru_cache(maxsize=1)(open_shard)

    def __iter__(self) -> Iterator[Window]:
        for source in self._sources:
            name = str(source) if isinstance(source, str | Path) else source.name
            end_s = 0.0
            error = ""
            try:
                for start_s, end_s, waveform in self._cut_windows(source):
                    yield EmbeddingRow(name, start_s, end_s), waveform
            except (*DAMAGE, soundfile.SoundFileError) as damage:
                error = describe_error(damage)
            yield EmbeddingRow(name, end_s, end_s, error=error), None

    def _cut_windows(self, source: Source) -> Iterator[tuple[float, float, Tensor]]:
        """Yield start and end in seconds, and waveform, (num_samples,), of a source's windows."""
        encoded = self._read_encoded(source)
        rate = self._audio.sample_rate
        length = self._audio.num_samples
        with open_audio(encoded) as opened:
            ratio = decoding.resampling_ratio(opened.samplerate, rate)
            duration_s = opened.frames / opened.samplerate
            is_short = opened.frames <= math.ceil(length / ratio)
            if is_short or self._pooling == "center":
                # As evaluation reads it: short audio is repeated, longer audio is cropped or fused.
                window = torch.zeros(length)
                if self._pooling == "center":
                    window = empty_row(self._audio, "encoded")
                read_clip(encoded, window, audio=self._audio, rng=CenterCropRng())
                yield 0.0, duration_s, window
                return
            blocks = _mix_blocks(opened)
            if ratio != 1:
                # The filter overshoots full scale.
                blocks = (block.clamp_(-1, 1) for block in decoding.resample_blocks(blocks, ratio))
            for start, window in _slide(blocks, length, self._hop):
                yield start / rate, (start + length) / rate, window

    def _read_encoded(self, source: Source) -> Encoded:
        """Return a source's encoded content, or a path for a file."""
        if isinstance(source, SkippedSample):
            raise BrokenItemError(source.reason)
        if isinstance(source, AudioInput):
            return _encode(source)
        if isinstance(source, Clip):
            return source.place.read(self._open_shard(source.shard))
        # Opened once, so that the file can't be replaced by another kind of file.
        return f"/proc/self/fd/{self._open_shard(str(source)).number}"


def _encode(audio: AudioInput) -> bytes:
    """Return audio as an encoded file, so that arrays take the same way as files."""
    if isinstance(audio.samples, bytes):
        return audio.samples
    subtype = "PCM_16" if audio.samples.dtype == np.int16 else "FLOAT"
    file = io.BytesIO()
    soundfile.write(file, audio.samples.T, audio.sample_rate, format="RF64", subtype=subtype)
    return file.getvalue()


def _mix_blocks(file: soundfile.SoundFile) -> Iterator[Tensor]:
    """Yield the mean of the channels, (T,) float32, in blocks.

    Raises BrokenItemError at the end if the file was unusable.
    """
    num_frames = 0
    is_silent = True
    while len(frames := file.read(_BLOCK, "float32", always_2d=True)):
        mixed = np.empty(len(frames), np.float32)
        _, is_block_silent = mix(frames, mixed)
        is_silent = is_silent and is_block_silent
        num_frames += len(frames)
        yield torch.from_numpy(mixed)
    # Silence and length are only known at the end.
    decoding.check_samples(num_frames, file.frames, is_silent)


def _slide(blocks: Iterable[Tensor], length: int, hop: int) -> Iterator[tuple[int, Tensor]]:
    """Yield starts and windows: every `hop` samples, and one at the end.

    Audio shorter than a window is repeated.
    """
    # The last samples, up to position `end` of the audio.
    buffer = torch.empty(0)
    end = 0
    # Of the next window.
    start = 0
    for block in blocks:
        buffer = torch.cat([buffer[-length:], block])
        end += len(block)
        buffer_start = end - len(buffer)
        while start + length <= end:
            offset = start - buffer_start
            yield start, buffer[offset : offset + length].clone()
            start += hop
    if end < length:
        window = torch.cat([buffer, torch.zeros(length - end)])
        repeat(window.numpy(), end)
        yield 0, window
        return
    last_end = start - hop + length
    if last_end < end:
        # It overlaps the previous window by more than others.
        yield end - length, buffer[-length:].clone()
