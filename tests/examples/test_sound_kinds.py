import re

import numpy as np
import pytest

from examples.synthetic_sounds.kinds import KINDS, TEMPLATES
from examples.synthetic_sounds.signals import SIGNALS

RATE = 16000


def words_of(texts: tuple[str, ...]) -> set[str]:
    return set(re.findall(r"[\w-]+", " ".join(texts)))


def test_held_out_names_are_new_with_words_of_training_names() -> None:
    assert [kind.label for kind in KINDS] == list(SIGNALS)
    nouns: list[str] = []
    training_words = words_of(TEMPLATES["train"])
    for kind in KINDS:
        nouns += kind.nouns["train"] + kind.nouns["held_out"]
        kind_words = words_of(kind.nouns["train"])
        assert words_of(kind.nouns["held_out"]) <= kind_words | {"a", "of", "on", "the"}
        training_words |= kind_words
    assert len(nouns) == len(set(nouns))
    assert not set(TEMPLATES["train"]) & set(TEMPLATES["held_out"])
    assert words_of(TEMPLATES["held_out"]) <= training_words


def synthesize(label: str, value: float) -> np.ndarray:
    return SIGNALS[label](np.random.default_rng(0), np.arange(2 * RATE) / RATE, value)




@pytest.mark.parametrize("label", ["pure tone", "square wave", "tremolo", "bell"])
@pytest.mark.parametrize("pitch", [150.0, 600.0])
def test_strongest_frequency_is_pitch(label: str, pitch: float) -> None:
    # Two seconds have a bin per 0.5 Hz.
    peak = np.abs(np.fft.rfft(synthesize(label, pitch))).argmax() / 2
    assert peak == pytest.approx(pitch, abs=1)




