"""Test that every command judges silence on what the model gets: the mean of the channels, in 16
bits."""

import io
import random
from collections.abc import Callable

import numpy as np
import pytest
import soundfile
import torch

from clap_ds.config.model import load_preset
from clap_ds.data.build_shards.prepare import Preparation, keep_file
from clap_ds.data.decoding import BrokenItemError, decode_audio
from clap_ds.evaluation.clips import Middle
from clap_ds.inference.audio_windows import Sound, read_windows

AUDIO = load_preset("micro").audio  # clips of one second
RATE = AUDIO.sample_rate


def decode(content: bytes, dtype: torch.dtype, rng: random.Random) -> None:
    decode_audio(content, torch.zeros(RATE, dtype=dtype), sample_rate=RATE, rng=rng)


def embed(content: bytes) -> None:
    *_, (row, _) = read_windows([Sound("a", content)], AUDIO, "none", 0, num_workers=0, ahead=1)
    if row.error:
        raise BrokenItemError(row.error)


COMMANDS: dict[str, Callable[[bytes], object]] = {
    "build": lambda content: keep_file(content, "wav"),
    "build --kind waveform": lambda content: Preparation("waveform", AUDIO).convert(content),
    "prepare --kind mel": lambda content: Preparation("mel", AUDIO).convert(content),
    "train": lambda content: decode(content, torch.int16, random.Random(0)),
    "train in float32": lambda content: decode(content, torch.float32, random.Random(0)),
    "evaluate": lambda content: decode(content, torch.int16, Middle()),
    "embed": embed,
}


def tone(num_samples: int) -> np.ndarray:
    return 0.3 * np.sin(0.1 * np.arange(num_samples))


def stereo(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    return np.stack([left, right], axis=1)


SILENT: dict[str, Callable[[int], np.ndarray]] = {
    "zeros": np.zeros,
    "antiphase": lambda number: stereo(tone(number), -tone(number)),
    "three channels that cancel": lambda number: np.outer(tone(number), [1, 0.5, -1.5]),
    "less than 16 bits": lambda number: 1e-5 * tone(number),
}
HEARD: dict[str, Callable[[int], np.ndarray]] = {
    "one channel": lambda number: stereo(tone(number), np.zeros(number)),
    "constant": lambda number: np.full(number, 0.25),
    "antiphase, then a quieter tone": lambda number: np.concatenate(
        [stereo(tone(number), -tone(number)), 0.1 * stereo(tone(number), tone(number))]
    ),
}


def wav(samples: np.ndarray, rate: int) -> bytes:
    buffer = io.BytesIO()
    soundfile.write(buffer, samples, rate, format="WAV", subtype="FLOAT")
    return buffer.getvalue()


@pytest.mark.parametrize("rate", [RATE, RATE // 3])
@pytest.mark.parametrize("seconds", [0.5, 3.3])
@pytest.mark.parametrize("name", SILENT)
def test_sound_that_the_model_does_not_get_is_silence_in_every_command(
    name: str, seconds: float, rate: int
) -> None:
    content = wav(SILENT[name](int(seconds * rate)), rate)
    for run in COMMANDS.values():
        with pytest.raises(BrokenItemError, match="silent"):
            run(content)


@pytest.mark.parametrize("rate", [RATE, RATE // 3])
@pytest.mark.parametrize("name", HEARD)
def test_sound_that_the_model_gets_is_used_by_every_command(name: str, rate: int) -> None:
    content = wav(HEARD[name](5 * rate // 2), rate)
    for run in COMMANDS.values():
        run(content)


def test_sound_above_half_of_the_models_rate_is_silence() -> None:
    rate = 4 * RATE
    content = wav(0.3 * np.sin(np.pi * 0.7 * np.arange(rate)) * np.hanning(rate), rate)
    for name in (
        "build --kind waveform",
        "prepare --kind mel",
        "train",
        "train in float32",
        "evaluate",
    ):
        with pytest.raises(BrokenItemError, match="silent"):
            COMMANDS[name](content)
