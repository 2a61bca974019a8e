"""How each kind of sound is made: from a noise source, time in s (T,) and a pitch (Hz) or tempo (1/s) to a signal (T,)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Signal = NDArray[np.floating]


def _step(time: Signal) -> float:
    return float(time[1] - time[0]) if len(time) > 1 else 0.0


def _sine(time: Signal, frequency: Any) -> Signal:
    """A sine whose frequency (Hz) may change over time."""
    phase = np.cumsum(np.broadcast_to(frequency, time.shape)) * _step(time)
    return np.asarray(np.sin(2 * np.pi * phase))


def _sawtooth(time: Signal, pitch: float) -> Signal:
    since_edge = time * pitch % 1 / pitch
    return 2 * since_edge * pitch - 1 + 2 * np.exp(-20000 * since_edge)  # the edge overshoots, which makes it bright


def _struck(since: Signal, frequency: float, rate: float) -> Signal:
    """A struck body's decaying sine (Hz, 1/s), starting anew wherever the time since the stroke (s) does."""
    return np.exp(-rate * since) * np.sin(2 * np.pi * frequency * since + 0.3)


def _bell(time: Signal, pitch: float) -> Signal:
    partials = ((1.0, 1.0), (2.76, 0.6), (5.4, 0.3))  # of a struck bar: frequency ratio, strength
    rung = (gain * np.exp(-3 * k * (time % 2)) * _sine(time, min(pitch, 1400) * k) for k, gain in partials)
    return sum(rung, 0 * time)


def _plucked(time: Signal, pitch: float) -> Signal:
    harmonics = range(1, 9)
    return sum((np.exp(-2.5 * k * (time % 0.7)) / k * _sine(time, min(pitch, 440) * k) for k in harmonics), 0 * time)


def _coloured(noise: np.random.Generator, time: Signal, gain: Callable[[Signal], Signal]) -> Signal:
    """Noise whose spectrum follows `gain` of the frequency in Hz."""
    spectrum = np.fft.rfft(noise.standard_normal(len(time)))
    return np.fft.irfft(spectrum * gain(np.fft.rfftfreq(len(time), _step(time) or 1.0)), len(time))


def _pink(noise: np.random.Generator, time: Signal) -> Signal:
    spectrum = np.fft.rfft(noise.standard_normal(len(time)))
    return np.fft.irfft(spectrum / np.sqrt(np.arange(1, len(spectrum) + 1)), len(time))


def _crackle(noise: np.random.Generator, time: Signal) -> Signal:
    is_pop = noise.random(len(time)) < 25 * _step(time)  # 25 a second
    is_pop[0] = True
    strength = np.where(is_pop, noise.standard_normal(len(time)), 0.0)
    return np.convolve(strength, np.exp(-1500 * time[time < 0.003]))[: len(time)]


def _arpeggio(time: Signal, pitch: float) -> Signal:
    semitones = np.array([0, 4, 7, 12])[(time * 6).astype(int) % 4]
    return _sine(time, pitch * 2 ** (semitones / 12)) * np.exp(-4 * (time % (1 / 6)))


def _wind(noise: np.random.Generator, time: Signal) -> Signal:
    howl = _coloured(noise, time, lambda frequency: 0.01 + np.exp(-(((frequency - 450) / 90) ** 2)))
    return howl * (1.2 + np.sin(2 * np.pi * (0.8 * time + noise.random())))


def _bird(time: Signal) -> Signal:
    arch = np.sin(np.pi * (time * 7 % 1))
    return _sine(time, 3000 + 2000 * arch) * arch**2 * (time % 1 < 0.72)


def _drum(noise: np.random.Generator, time: Signal, tempo: float) -> Signal:
    since_beat = time % (1 / tempo)
    return _struck(since_beat, 110, 12) + 0.4 * noise.standard_normal(len(time)) * np.exp(-60 * since_beat)


def _bouncing(since_drop: Signal) -> Signal:
    bounces = 0.5 * np.cumsum(0.8 ** np.arange(20)) - 0.5  # ever sooner, in s
    return _struck(since_drop - bounces[np.searchsorted(bounces, since_drop, side="right") - 1], 700, 60)


SIGNALS: dict[str, Callable[[np.random.Generator, Signal, float], Signal]] = {
    "pure tone": lambda noise, time, pitch: _sine(time, pitch),
    "square wave": lambda noise, time, pitch: np.sign(_sine(time, pitch)),
    "sawtooth wave": lambda noise, time, pitch: _sawtooth(time, pitch),
    "rising chirp": lambda noise, time, pitch: _sine(time, np.geomspace(pitch / 2, pitch * 2, len(time))),
    "falling chirp": lambda noise, time, pitch: _sine(time, np.geomspace(pitch * 2, pitch / 2, len(time))),
    "tremolo": lambda noise, time, pitch: _sine(time, pitch) * (1 + 0.95 * _sine(time, 9.0)),
    "vibrato": lambda noise, time, pitch: _sine(time, pitch * (1 + 0.2 * _sine(time, 4.0))),
    "siren": lambda noise, time, pitch: _sine(time, np.where(time % 1 < 0.5, pitch, pitch * 1.5)),
    "bell": lambda noise, time, pitch: _bell(time, pitch),
    "white noise": lambda noise, time, _: noise.standard_normal(len(time)),
    "pink noise": lambda noise, time, _: _pink(noise, time),
    "clicks": lambda noise, time, tempo: (
        np.exp(-(time % (1 / tempo)) * 800) * np.cos(2 * np.pi * 3000 * (time % (1 / tempo)))
    ),
    "noise bursts": lambda noise, time, tempo: noise.standard_normal(len(time)) * (time * tempo % 1 < 0.3),
    "rumble": lambda noise, time, _: _coloured(noise, time, lambda frequency: np.exp(-frequency / 60)),
    "crackle": lambda noise, time, _: _crackle(noise, time),
    "heartbeat": lambda noise, time, _: _struck((time + 0.25) % 0.9, 60, 18) + 0.7 * _struck(time % 0.9, 50, 18),
    "arpeggio": lambda noise, time, pitch: _arpeggio(time, pitch),
    "chord": lambda noise, time, pitch: sum((_sine(time, pitch * 2 ** (k / 12)) for k in (0, 7, 16)), 0 * time),
    "telephone": lambda noise, time, _: (
        (_sine(time, 1900.0) + _sine(time, 2400.0)) * (np.sign(_sine(time, 20.0)) + 1.1) * (time % 1 < 0.6)
    ),
    "wind": lambda noise, time, _: _wind(noise, time),
    "bird": lambda noise, time, _: _bird(time),
    "drum": _drum,
    "plucked string": lambda noise, time, pitch: _plucked(time, pitch),
    "bouncing ball": lambda noise, time, _: _bouncing(time % 1.8),
    "laser": lambda noise, time, _: _sine(time, 300 + 4500 * np.exp(-14 * (time % 0.4))) * np.exp(-4 * (time % 0.4)),
    "beeping": lambda noise, time, pitch: _sine(time, max(pitch, 440)) * (time * 4 % 1 < 0.4),
}
