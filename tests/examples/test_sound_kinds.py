from __future__ import annotations

import random

import numpy as np
import pytest

from examples.synthetic_sounds.kinds import KINDS, LOUDNESS, PITCH, TEMPO, Scale

RATE = 16000


@pytest.mark.parametrize("scale", [PITCH, TEMPO, LOUDNESS])
def test_words_follow_the_values(scale: Scale) -> None:
    rng = random.Random(0)
    drawn = [scale.draw(rng) for _ in range(300)]
    assert all(scale.low <= value < scale.high for value, _ in drawn)
    ranges = [[value for value, word in drawn if word in words] for words in scale.words]
    assert max(ranges[0]) <= min(ranges[1])
    assert max(ranges[1]) <= min(ranges[2])


def signal_of(label: str, value: float, seconds: float = 2.0) -> np.ndarray:
    kind = next(kind for kind in KINDS if kind.label == label)
    return kind.synthesise(np.random.default_rng(0), np.arange(round(seconds * RATE)) / RATE, value)


def centroid(signal: np.ndarray) -> float:
    """Mean frequency of the spectrum, Hz."""
    power = np.abs(np.fft.rfft(signal * np.hanning(len(signal)))) ** 2
    return float((power * np.fft.rfftfreq(len(signal), 1 / RATE)).sum() / power.sum())


@pytest.mark.parametrize("label", ["pure tone", "square wave", "sawtooth wave", "tremolo", "bell"])
@pytest.mark.parametrize("pitch", [150.0, 600.0])
def test_pitched_sounds_have_their_pitch(label: str, pitch: float) -> None:
    spectrum = np.abs(np.fft.rfft(signal_of(label, pitch)))
    assert spectrum.argmax() / 2 == pytest.approx(pitch, abs=1)


def test_chirps_go_their_way() -> None:
    for label, direction in (("rising chirp", 1), ("falling chirp", -1)):
        thirds = [centroid(part) for part in np.array_split(signal_of(label, 800), 3)]
        assert direction * (thirds[1] - thirds[0]) > 100
        assert direction * (thirds[2] - thirds[1]) > 100


def test_pink_noise_is_darker_than_white() -> None:
    assert centroid(signal_of("white noise", 0)) == pytest.approx(RATE / 4, rel=0.1)
    assert centroid(signal_of("pink noise", 0)) < RATE / 8


@pytest.mark.parametrize("tempo", [2.0, 10.0])
def test_clicks_come_at_their_tempo(tempo: float) -> None:
    loud = np.abs(signal_of("clicks", tempo)) > 0.7
    onsets = np.flatnonzero(loud & ~np.roll(loud, 1))
    separate = onsets[np.diff(onsets, prepend=-RATE) > RATE / 100]
    assert len(separate) == 2 * tempo
