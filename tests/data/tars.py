"""Tars and items made by hand with the standard library, for the shard tests."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import soundfile
import torch


def wav(samples: np.ndarray, sample_rate: int = 48000, subtype: str = "FLOAT") -> bytes:
    buffer = io.BytesIO()
    soundfile.write(buffer, samples, sample_rate, format="WAV", subtype=subtype)
    return buffer.getvalue()


def marked_item(number: int, suffix: str = "") -> list[tuple[str, bytes]]:
    """An item recognisable after loading by `number_of`: its 480 samples are all alike."""
    name = f"{number:04d}{suffix}"
    return [
        (f"{name}.wav", wav(np.full(480, (number + 1) / 1000, dtype=np.float32))),
        (f"{name}.txt", f"tone {number}".encode()),
    ]


def number_of(waveform: torch.Tensor) -> int:
    """Which marked item a waveform is of."""
    return round(float(waveform[0]) * 1000) - 1


def write_tar(path: Path, members: Sequence[tuple[str, bytes]]) -> Path:
    with tarfile.open(path, "w") as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path
