"""The classes of synthetic sounds: how each is made and what a caption may call it.

To add a class, write its signal and put a `Kind` into `KINDS`. Length, loudness, encoding and the wording of whole captions are
left to `sounds`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Signal = NDArray[np.float64]


@dataclass(frozen=True)
class Scale:
    """A quantity a listener can name: drawn log-uniformly from [low, high), and called by the third it falls in."""

    low: float
    high: float
    words: tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]

    def draw(self, rng: random.Random) -> tuple[float, str]:
        """A value and a word for it."""
        position = rng.random()
        return self.low * (self.high / self.low) ** position, rng.choice(self.words[int(3 * position)])


PITCH = Scale(110, 3520, (("low", "deep", "low-pitched"), ("medium", "mid-range"), ("high", "high-pitched")))  # Hz
TEMPO = Scale(1, 16, (("slow", "unhurried"), ("steady", "regular"), ("fast", "rapid")))  # events per second
LOUDNESS = Scale(0.01, 0.9, (("quiet", "faint", "soft"), ("moderate", "clear"), ("loud", "strong")))  # peak amplitude


@dataclass(frozen=True)
class Kind:
    """A class of sounds.

    Attributes:
        label: class name.
        nouns: ways a caption may call it.
        scale: of the quantity handed to `synthesise`, if there is one worth naming.
        synthesise: (noise source, time in s (T,), value on `scale`) → signal (T,) of any amplitude.
    """

    label: str
    nouns: tuple[str, ...]
    scale: Scale | None
    synthesise: Callable[[np.random.Generator, Signal, float], Signal]


def _sine(time: Signal, frequency: float | Signal) -> Signal:
    """A sine whose frequency (Hz) may change over time."""
    step = time[1] - time[0] if len(time) > 1 else 0.0
    phase = np.cumsum(np.broadcast_to(frequency, time.shape)) * step
    return np.asarray(np.sin(2 * np.pi * phase))


def _tone(noise: np.random.Generator, time: Signal, pitch: float) -> Signal:
    return _sine(time, pitch)


def _square(noise: np.random.Generator, time: Signal, pitch: float) -> Signal:
    return np.sign(_sine(time, pitch))


def _sawtooth(noise: np.random.Generator, time: Signal, pitch: float) -> Signal:
    return 2 * (time * pitch % 1) - 1


def _rising(noise: np.random.Generator, time: Signal, pitch: float) -> Signal:
    return _sine(time, np.geomspace(pitch / 2, pitch * 2, len(time)))


def _falling(noise: np.random.Generator, time: Signal, pitch: float) -> Signal:
    return _sine(time, np.geomspace(pitch * 2, pitch / 2, len(time)))


def _tremolo(noise: np.random.Generator, time: Signal, pitch: float) -> Signal:
    return _sine(time, pitch) * (1 + 0.9 * _sine(time, 6.0))


def _vibrato(noise: np.random.Generator, time: Signal, pitch: float) -> Signal:
    return _sine(time, pitch * (1 + 0.08 * _sine(time, 5.0)))


def _siren(noise: np.random.Generator, time: Signal, pitch: float) -> Signal:
    return _sine(time, np.where(time % 1 < 0.5, pitch, pitch * 1.5))


def _bell(noise: np.random.Generator, time: Signal, pitch: float) -> Signal:
    partials = ((1.0, 1.0), (2.76, 0.6), (5.4, 0.3))  # of a struck bar: frequency ratio, strength
    since_strike = time % 2
    return sum(
        (gain * np.exp(-3 * k * since_strike) * _sine(time, min(pitch, 1400) * k) for k, gain in partials), 0 * time
    )


def _white_noise(noise: np.random.Generator, time: Signal, _: float) -> Signal:
    return noise.standard_normal(len(time))


def _pink_noise(noise: np.random.Generator, time: Signal, _: float) -> Signal:
    spectrum = np.fft.rfft(noise.standard_normal(len(time)))
    return np.fft.irfft(spectrum / np.sqrt(np.arange(1, len(spectrum) + 1)), len(time))


def _clicks(noise: np.random.Generator, time: Signal, tempo: float) -> Signal:
    since_click = time % (1 / tempo)
    return np.exp(-since_click * 800) * np.cos(2 * np.pi * 3000 * since_click)


def _bursts(noise: np.random.Generator, time: Signal, tempo: float) -> Signal:
    return noise.standard_normal(len(time)) * (time * tempo % 1 < 0.3)


KINDS = (
    Kind("pure tone", ("pure tone", "sine tone", "steady beep"), PITCH, _tone),
    Kind("square wave", ("square wave", "harsh electronic buzz"), PITCH, _square),
    Kind("sawtooth wave", ("sawtooth wave", "bright synthesizer buzz"), PITCH, _sawtooth),
    Kind("rising chirp", ("rising chirp", "upward sweep", "tone gliding up"), PITCH, _rising),
    Kind("falling chirp", ("falling chirp", "downward sweep", "tone gliding down"), PITCH, _falling),
    Kind("tremolo", ("tremolo tone", "tone fluttering in volume"), PITCH, _tremolo),
    Kind("vibrato", ("vibrato tone", "tone wavering in pitch"), PITCH, _vibrato),
    Kind("siren", ("two-tone siren", "alarm switching between two notes"), PITCH, _siren),
    Kind("bell", ("bell", "struck metal bar", "ringing chime"), PITCH, _bell),
    Kind("white noise", ("white noise", "hiss", "static"), None, _white_noise),
    Kind("pink noise", ("pink noise", "rushing noise like a waterfall"), None, _pink_noise),
    Kind("clicks", ("train of clicks", "ticking", "series of clicks"), TEMPO, _clicks),
    Kind("noise bursts", ("pulsing noise", "series of noise bursts", "steam-engine puffing"), TEMPO, _bursts),
)
