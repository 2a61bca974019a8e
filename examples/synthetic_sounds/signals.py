"""Synthesize each kind of sound (T,) from a noise source, time in s (T,), and a pitch (Hz) or tempo
(1/s)."""

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
    """Return a struck bar that is struck every 2 s."""
    sound = 0 * time
    # frequency ratio, strength
    for ratio, gain in ((1.0, 1.0), (2.76, 0.6), (5.4, 0.3)):
        sound = sound + gain * np.exp(-3 * ratio * (time % 2)) * _sine(
            time, min(pitch, 1400) * ratio
        )
    return sound


def _bird(time: Signal) -> Signal:
    """Return seven calls a second, of which the last two are left out."""
    # Each call rises by 2 kHz and falls.
    arch = np.sin(np.pi * (time * 7 % 1))
    return np.where(time % 1 < 0.72, _sine(time, 3000 + 2000 * arch) * arch**2, 0)


def _clicks(time: Signal, tempo: float) -> Signal:
    since = time % (1 / tempo)
    return np.exp(-since * 800) * np.cos(2 * np.pi * 3000 * since)


def _bursts(noise: np.random.Generator, time: Signal, tempo: float) -> Signal:
    return np.where(time * tempo % 1 < 0.3, noise.standard_normal(len(time)), 0)


def _heartbeat(time: Signal) -> Signal:
    return _struck((time + 0.25) % 0.9, 60, 18) + 0.7 * _struck(time % 0.9, 50, 18)


# (noise source, time, pitch or tempo) → signal
SIGNALS: dict[str, Callable[[np.random.Generator, Signal, float], Signal]] = {
    "pure tone": lambda _, time, pitch: _sine(time, pitch),
    "square wave": lambda _, time, pitch: np.sign(_sine(time, pitch)),
    # from an octave below to an octave above, and back
    "rising chirp": lambda _, time, pitch: _sine(
        time, np.geomspace(pitch / 2, pitch * 2, len(time))
    ),
    "falling chirp": lambda _, time, pitch: _sine(
        time, np.geomspace(pitch * 2, pitch / 2, len(time))
    ),
    "tremolo": lambda _, time, pitch: _sine(time, pitch) * (1 + 0.95 * _sine(time, 9.0)),
    # a fifth apart
    "siren": lambda _, time, pitch: _sine(time, np.where(time % 1 < 0.5, pitch, pitch * 1.5)),
    "bell": lambda _, time, pitch: _bell(time, pitch),
    "white noise": lambda noise, time, _: noise.standard_normal(len(time)),
    "clicks": lambda _, time, tempo: _clicks(time, tempo),
    "noise bursts": _bursts,
    "heartbeat": lambda _, time, __: _heartbeat(time),
    "bird": lambda _, time, __: _bird(time),
}
