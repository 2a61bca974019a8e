import re

import numpy as np
import pytest

from examples.synthetic_sounds.kinds import KINDS, TEMPLATES
from examples.synthetic_sounds.signals import SIGNALS

RATE = 16000


def test_held_out_nouns_can_be_understood_from_the_kind_s_own_words() -> None:
    """Held-out names are new, but all their words except short ones are in training names of the
    same kind."""
    assert [kind.label for kind in KINDS] == list(SIGNALS)
    for kind in KINDS:
        known = set(" ".join(kind.nouns["train"]).split()) | {"a", "of", "on", "the"}
        assert set(" ".join(kind.nouns["held_out"]).split()) <= known, kind.label
    every = [noun for kind in KINDS for noun in kind.nouns["train"] + kind.nouns["held_out"]]
    assert len(every) == len(set(every))
    assert not set(TEMPLATES["train"]) & set(TEMPLATES["held_out"])
    said = " ".join(noun for kind in KINDS for noun in kind.nouns["train"])
    words = {
        wordings: set(re.findall(r"\w+", " ".join(TEMPLATES[wordings]))) for wordings in TEMPLATES
    }
    assert words["held_out"] <= words["train"] | set(said.split())


def signal_of(label: str, value: float) -> np.ndarray:
    return SIGNALS[label](np.random.default_rng(0), np.arange(2 * RATE) / RATE, value)


def centroid(signal: np.ndarray) -> float:
    """Return the mean frequency of the spectrum in Hz."""
    power = np.abs(np.fft.rfft(signal * np.hanning(len(signal)))) ** 2
    return float((power * np.fft.rfftfreq(len(signal), 1 / RATE)).sum() / power.sum())


def test_sounds_are_what_they_are_called() -> None:
    for label in ("pure tone", "square wave", "tremolo", "bell"):
        for pitch in (150.0, 600.0):
            assert np.abs(np.fft.rfft(signal_of(label, pitch))).argmax() / 2 == pytest.approx(
                pitch, abs=1
            ), label
    for label, direction in (("rising chirp", 1), ("falling chirp", -1)):
        thirds = [centroid(part) for part in np.array_split(signal_of(label, 800), 3)]
        assert (direction * np.diff(thirds) > 100).all()
    assert centroid(signal_of("white noise", 0)) == pytest.approx(RATE / 4, rel=0.1)
