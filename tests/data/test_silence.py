"""Test that every command judges silence on what the model gets: the mean of the channels, in 16
bits."""

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch

from clap_ds.config.model import load_preset
from clap_ds.data.build_shards.prepare import Preparation, keep_file
from clap_ds.data.decoding import BrokenItemError, decode_audio
from clap_ds.inference.audio_windows import AudioInput, read_windows
from tests.data.tars import wav

AUDIO = load_preset("micro").audio
"""Clips of one second."""
RATE = AUDIO.sample_rate


def decode(content: bytes, dtype: torch.dtype) -> None:
    row = torch.zeros(RATE, dtype=dtype)
    decode_audio(content, row, sample_rate=RATE, rng=random.Random(0))


def embed(content: bytes) -> None:
    *_, (row, _) = read_windows(
        [AudioInput("a", content)], AUDIO, "none", 0, num_workers=0, ahead=1
    )
    if row.error:
        raise BrokenItemError(row.error)


RESAMPLING_COMMANDS: dict[str, Callable[[bytes], object]] = {
    "prepare": Preparation("waveform", AUDIO).convert,
    "train": lambda content: decode(content, torch.int16),
    "train in float32": lambda content: decode(content, torch.float32),
}
COMMANDS = {
    "build": lambda content: keep_file(content, "wav"),
    "embed": embed,
    **RESAMPLING_COMMANDS,
}


def tone(num_samples: int) -> np.ndarray:
    return 0.3 * np.sin(0.1 * np.arange(num_samples))


def stereo(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    return np.stack([left, right], axis=1)


Synthesize = Callable[[int], np.ndarray]
SILENT: dict[str, Synthesize] = {
    "zeros": np.zeros,
    "antiphase": lambda number: stereo(tone(number), -tone(number)),
    "three channels that cancel": lambda number: np.outer(tone(number), [1, 0.5, -1.5]),
    # rounded to 0 in 16 bits
    "faint": lambda number: 1e-5 * tone(number),
}
AUDIBLE: dict[str, Synthesize] = {
    "one channel": lambda number: stereo(tone(number), np.zeros(number)),
    "constant": lambda number: np.full(number, 0.25),
    "antiphase, then a quieter tone": lambda number: np.concatenate(
        [stereo(tone(number), -tone(number)), 0.1 * stereo(tone(number), tone(number))]
    ),
}


@pytest.mark.parametrize(("rate", "seconds"), [(RATE, 0.5), (RATE, 3.3), (RATE // 3, 3.3)])
@pytest.mark.parametrize("name", SILENT)
def test_silence_for_model_is_refused_by_every_command(
    name: str, seconds: float, rate: int
) -> None:
    content = wav(SILENT[name](int(seconds * rate)), rate)
    for command in COMMANDS.values():
        with pytest.raises(BrokenItemError, match="silent"):
            command(content)


@pytest.mark.parametrize("rate", [RATE, RATE // 3])
@pytest.mark.parametrize("name", AUDIBLE)
def test_audible_mean_is_used_by_every_command(name: str, rate: int) -> None:
    content = wav(AUDIBLE[name](5 * rate // 2), rate)
    for command in COMMANDS.values():
        command(content)


def test_sound_above_nyquist_of_model_is_silence() -> None:
    rate = 4 * RATE
    content = wav(0.3 * np.sin(np.pi * 0.7 * np.arange(rate)) * np.hanning(rate), rate)
    for command in RESAMPLING_COMMANDS.values():
        with pytest.raises(BrokenItemError, match="silent"):
            command(content)
