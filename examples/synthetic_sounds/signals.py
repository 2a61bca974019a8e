"""Synthesize each kind of sound (T,) from a noise source, time in s (T,), and a pitch (Hz) or tempo
(1/s)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Signal = NDArray[np.floating]


def _sine(time: Signal, frequency: Any) -> Signal:
    """Return a sine whose frequency (Hz) may change over time."""
    phase = np.cumsum(np.broadcast_to(frequency, time.shape)) * time[1]
    return np.asarray(np.sin(2 * np.pi * phase))


def _struck(since: Signal, frequency: float, rate: float) -> Signal:
    """Return a decaying sine (Hz, 1/s) that restarts with each stroke. `since`: time since the
    stroke in s (T,)."""
    return np.exp(-rate * since) * np.sin(2 * np.pi * frequency * since + 0.3)


def _bell(time: Signal, pitch: float) -> Signal:
    partials = ((1.0, 1.0), (2.76, 0.6), (5.4, 0.3))  # of a struck bar: frequency ratio, strength
    rung = (
        gain * np.exp(-3 * k * (time % 2)) * _sine(time, min(pitch, 1400) * k)
        for k, gain in partials
    )
    return sum(rung, 0 * time)


def _bird(time: Signal) -> Signal:
    arch = np.sin(np.pi * (time * 7 % 1))
    return _sine(time, 3000 + 2000 * arch) * arch**2 * (time % 1 < 0.72)


SIGNALS: dict[str, Callable[[np.random.Generator, Signal, float], Signal]] = {
    "pure tone": lambda noise, time, pitch: _sine(time, pitch),
    "square wave": lambda noise, time, pitch: np.sign(_sine(time, pitch)),
    "rising chirp": lambda noise, time, pitch: _sine(
        time, np.geomspace(pitch / 2, pitch * 2, len(time))
    ),
    "falling chirp": lambda noise, time, pitch: _sine(
        time, np.geomspace(pitch * 2, pitch / 2, len(time))
    ),
    "tremolo": lambda noise, time, pitch: _sine(time, pitch) * (1 + 0.95 * _sine(time, 9.0)),
    "siren": lambda noise, time, pitch: _sine(time, np.where(time % 1 < 0.5, pitch, pitch * 1.5)),
    "bell": lambda noise, time, pitch: _bell(time, pitch),
    "white noise": lambda noise, time, _: noise.standard_normal(len(time)),
    "clicks": lambda noise, time, tempo: (
        np.exp(-(time % (1 / tempo)) * 800) * np.cos(2 * np.pi * 3000 * (time % (1 / tempo)))
    ),
    "noise bursts": lambda noise, time, tempo: (
        noise.standard_normal(len(time)) * (time * tempo % 1 < 0.3)
    ),
    "heartbeat": lambda noise, time, _: (
        _struck((time + 0.25) % 0.9, 60, 18) + 0.7 * _struck(time % 0.9, 50, 18)
    ),
    "bird": lambda noise, time, _: _bird(time),
}
