"""Build audio files, items and tars with the standard library and libsndfile."""

import functools
import io
import tarfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import soundfile
import torch

from clap_ds.config.model import INT16_SCALE
from clap_ds.data.batch import Batch


def encode(
    samples: np.ndarray, rate: int, file_format: str, subtype: str | None = None, **options: Any
) -> bytes:
    """Return an audio file of samples (T,) or (T, channels)."""
    buffer = io.BytesIO()
    soundfile.write(buffer, samples, rate, format=file_format, subtype=subtype, **options)
    return buffer.getvalue()


def wav(samples: np.ndarray, sample_rate: int = 48000, subtype: str = "FLOAT") -> bytes:
    return encode(samples, sample_rate, "WAV", subtype)


# Cached, because a header contains its time of writing.
@functools.cache
def marked_item(number: int) -> list[tuple[str, bytes]]:
    """Return an item that `number_of` recognizes after loading: its 480 samples are equal."""
    sound = wav(np.full(480, (number + 1) / 1000, dtype=np.float32))
    return [(f"{number:04d}.wav", sound), (f"{number:04d}.txt", f"tone {number}".encode())]


def marked_items(numbers: Iterable[int]) -> list[tuple[str, bytes]]:
    return [member for number in numbers for member in marked_item(number)]


def number_of(waveform: torch.Tensor) -> int:
    """Return the number of the marked item of int16 samples."""
    return round(float(waveform[0]) / INT16_SCALE * 1000) - 1


def numbers_in(source: Iterator[Batch], num_batches: int) -> list[int]:
    """Return the numbers of marked items in order."""
    return [number_of(row) for _ in range(num_batches) for row in next(source).audio]


def write_tar(path: Path, members: Sequence[tuple[str, bytes]]) -> Path:
    with tarfile.open(path, "w") as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def marked_tars(directory: Path, num_tars: int, items_per_tar: int, first: int = 0) -> str:
    """Write tars of marked items numbered from `first`. Return their pattern."""
    directory.mkdir(exist_ok=True)
    for tar in range(num_tars):
        start = first + tar * items_per_tar
        write_tar(directory / f"{tar:03d}.tar", marked_items(range(start, start + items_per_tar)))
    return str(directory / f"{{000..{num_tars - 1:03d}}}.tar")


def items_in(folder: Path, pattern: str = "*.tar") -> dict[str, dict[str, bytes]]:
    """Return all items of a folder's tars: key → extension → content."""
    items: dict[str, dict[str, bytes]] = defaultdict(dict)
    for path in sorted(folder.glob(pattern)):
        with tarfile.open(path) as tar:
            for member in tar:
                key, extension = member.name.split(".")
                assert extension not in items[key]
                items[key][extension] = tar.extractfile(member).read()
    return items


def put(url: str, content: bytes) -> str:
    """Write a remote file and return its URL."""
    with fsspec.open(url, "wb") as file:
        file.write(content)
    return url
