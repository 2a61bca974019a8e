"""How the synthetic sounds are made: a function for each kind, from a noise source, time and a value to a signal.

The value is a pitch in Hz or a tempo in events per second; kinds without one ignore it. What the kinds are called, and the
range of values, is left to `sound_kinds`; length, loudness and encoding to `sounds`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Signal = NDArray[np.float64]
_Real = NDArray[np.floating[Any]]


def _step(time: Signal) -> float:
    return float(time[1] - time[0]) if len(time) > 1 else 0.0


def _sine(time: Signal, frequency: float | Signal) -> Signal:
    """A sine whose frequency (Hz) may change over time."""
    phase = np.cumsum(np.broadcast_to(frequency, time.shape)) * _step(time)
    return np.asarray(np.sin(2 * np.pi * phase))


def tone(noise: np.random.Generator, time: Signal, pitch: float) -> Signal:
    return _sine(time, pitch)


def square(noise: np.random.Generator, time: Signal, pitch: float) -> Signal:
    return np.sign(_sine(time, pitch))


def sawtooth(noise: np.random.Generator, time: Signal, pitch: float) -> Signal:
    since_edge = time * pitch % 1 / pitch
    return 2 * since_edge * pitch - 1 + 2 * np.exp(-20000 * since_edge)  # the edge overshoots, which makes it bright


def rising(noise: np.random.Generator, time: Signal, pitch: float) -> Signal:
    return _sine(time, np.geomspace(pitch / 2, pitch * 2, len(time)))


def falling(noise: np.random.Generator, time: Signal, pitch: float) -> Signal:
    return _sine(time, np.geomspace(pitch * 2, pitch / 2, len(time)))


def tremolo(noise: np.random.Generator, time: Signal, pitch: float) -> Signal:
    return _sine(time, pitch) * (1 + 0.95 * _sine(time, 9.0))


def vibrato(noise: np.random.Generator, time: Signal, pitch: float) -> Signal:
    return _sine(time, pitch * (1 + 0.2 * _sine(time, 4.0)))


def siren(noise: np.random.Generator, time: Signal, pitch: float) -> Signal:
    return _sine(time, np.where(time % 1 < 0.5, pitch, pitch * 1.5))


def bell(noise: np.random.Generator, time: Signal, pitch: float) -> Signal:
    partials = ((1.0, 1.0), (2.76, 0.6), (5.4, 0.3))  # of a struck bar: frequency ratio, strength
    since_strike = time % 2
    return sum(
        (gain * np.exp(-3 * k * since_strike) * _sine(time, min(pitch, 1400) * k) for k, gain in partials), 0 * time
    )


def white_noise(noise: np.random.Generator, time: Signal, _: float) -> Signal:
    return noise.standard_normal(len(time))


def pink_noise(noise: np.random.Generator, time: Signal, _: float) -> Signal:
    spectrum = np.fft.rfft(noise.standard_normal(len(time)))
    return np.fft.irfft(spectrum / np.sqrt(np.arange(1, len(spectrum) + 1)), len(time))


def clicks(noise: np.random.Generator, time: Signal, tempo: float) -> Signal:
    since_click = time % (1 / tempo)
    return np.exp(-since_click * 800) * np.cos(2 * np.pi * 3000 * since_click)


def bursts(noise: np.random.Generator, time: Signal, tempo: float) -> Signal:
    return noise.standard_normal(len(time)) * (time * tempo % 1 < 0.3)


def rumble(noise: np.random.Generator, time: Signal, _: float) -> Signal:
    return _coloured(noise, time, lambda frequency: np.exp(-frequency / 60))


def crackle(noise: np.random.Generator, time: Signal, _: float) -> Signal:
    is_pop = noise.random(len(time)) < 25 * _step(time)  # 25 a second
    is_pop[0] = True
    strength = np.where(is_pop, noise.standard_normal(len(time)), 0.0)
    decay = np.exp(-1500 * time[time < 0.003])
    return np.convolve(strength, decay)[: len(time)]


def heartbeat(noise: np.random.Generator, time: Signal, _: float) -> Signal:
    return _struck((time + 0.25) % 0.9, 60, 18) + 0.7 * _struck(time % 0.9, 50, 18)


def arpeggio(noise: np.random.Generator, time: Signal, pitch: float) -> Signal:
    semitones = np.array([0, 4, 7, 12])[(time * 6).astype(int) % 4]
    return _sine(time, pitch * 2 ** (semitones / 12)) * np.exp(-4 * (time % (1 / 6)))


def chord(noise: np.random.Generator, time: Signal, pitch: float) -> Signal:
    return sum((_sine(time, pitch * 2 ** (semitones / 12)) for semitones in (0, 7, 16)), 0 * time)


def telephone(noise: np.random.Generator, time: Signal, _: float) -> Signal:
    rattle = np.sign(_sine(time, 20.0)) + 1.1
    return (_sine(time, 1900.0) + _sine(time, 2400.0)) * rattle * (time % 1 < 0.6)


def wind(noise: np.random.Generator, time: Signal, _: float) -> Signal:
    howl = _coloured(noise, time, lambda frequency: 0.01 + np.exp(-(((frequency - 450) / 90) ** 2)))
    return howl * (1.2 + np.sin(2 * np.pi * (0.8 * time + noise.random())))


def bird(noise: np.random.Generator, time: Signal, _: float) -> Signal:
    arch = np.sin(np.pi * (time * 7 % 1))
    return _sine(time, 3000 + 2000 * arch) * arch**2 * (time % 1 < 0.72)


def drum(noise: np.random.Generator, time: Signal, tempo: float) -> Signal:
    since_beat = time % (1 / tempo)
    return _struck(since_beat, 110, 12) + 0.4 * noise.standard_normal(len(time)) * np.exp(-60 * since_beat)


def plucked(noise: np.random.Generator, time: Signal, pitch: float) -> Signal:
    since_pluck = time % 0.7
    return sum((np.exp(-2.5 * k * since_pluck) / k * _sine(time, min(pitch, 440) * k) for k in range(1, 9)), 0 * time)


def bouncing(noise: np.random.Generator, time: Signal, _: float) -> Signal:
    since_drop = time % 1.8
    bounces = 0.5 * np.cumsum(0.8 ** np.arange(20)) - 0.5  # ever sooner, in s
    since_bounce = since_drop - bounces[np.searchsorted(bounces, since_drop, side="right") - 1]
    return _struck(since_bounce, 700, 60)


def laser(noise: np.random.Generator, time: Signal, _: float) -> Signal:
    since_shot = time % 0.4
    return _sine(time, 300 + 4500 * np.exp(-14 * since_shot)) * np.exp(-4 * since_shot)


def beeping(noise: np.random.Generator, time: Signal, pitch: float) -> Signal:
    return _sine(time, max(pitch, 440)) * (time * 4 % 1 < 0.4)


def _coloured(noise: np.random.Generator, time: Signal, gain: Callable[[_Real], _Real]) -> Signal:
    """Noise whose spectrum follows `gain` of the frequency in Hz."""
    spectrum = np.fft.rfft(noise.standard_normal(len(time)))
    return np.fft.irfft(spectrum * gain(np.fft.rfftfreq(len(time), _step(time) or 1.0)), len(time))


def _struck(since: _Real, frequency: float, rate: float) -> Signal:
    """A struck body's decaying sine (Hz, 1/s), starting anew wherever the time since the stroke (s) does."""
    return np.exp(-rate * since) * np.sin(2 * np.pi * frequency * since + 0.3)
