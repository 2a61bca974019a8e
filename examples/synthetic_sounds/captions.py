"""What the captions of synthetic sounds say, with some of the wordings kept for evaluation.

Held-out wordings are new templates and, for each kind, new nouns, made of words that the training wordings have too: what is
tested is whether a model understands combinations it never saw. Words it never saw it can't understand when it starts from
nothing, so there are none. What the kinds are called is left to `sound_kinds`.
"""

from __future__ import annotations

import random
from typing import Literal

from examples.synthetic_sounds.kinds import KINDS, Kind

Wordings = Literal["train", "held_out", "all"]

TEMPLATES = (
    "{sound}",
    "the sound of {sound}",
    "a recording of {sound}",
    "{sound} can be heard",
    "{sound}, about {seconds} seconds long",
    "someone plays back {sound}",
    "{sound} in an otherwise silent room",
)
HELD_OUT_TEMPLATES = (
    "a recording of the sound of {sound}",
    "{sound} can be heard in a silent room",
    "someone plays back a recording of {sound}",
    "about {seconds} seconds of {sound}",
)


def templates_of(wordings: Wordings) -> tuple[str, ...]:
    return {"train": TEMPLATES, "held_out": HELD_OUT_TEMPLATES, "all": TEMPLATES + HELD_OUT_TEMPLATES}[wordings]


def nouns_of(kind: Kind, wordings: Wordings) -> tuple[str, ...]:
    return {
        "train": kind.nouns,
        "held_out": kind.held_out_nouns,
        "all": kind.nouns + kind.held_out_nouns,
    }[wordings]


def describe(kind: Kind, wordings: Wordings, rng: random.Random, *, quality: str, loudness: str, seconds: float) -> str:
    """A caption of a sound.

    Args:
        quality, loudness: words for its pitch or tempo (none: empty) and for its loudness; each is said at times.
        seconds: its length.
    """
    words = [word for word in (loudness, quality) if word and rng.random() < 0.7]
    rng.shuffle(words)
    sound = with_article(" ".join([*words, rng.choice(nouns_of(kind, wordings))]))
    return rng.choice(templates_of(wordings)).format(sound=sound, seconds=max(1, round(seconds)))


def with_article(sound: str) -> str:
    return f"{'an' if sound[0] in 'aeiou' else 'a'} {sound}"


def class_names() -> dict[Wordings, dict[str, list[str]]]:
    """Wordings → class → its names with their articles, each as `clap.evaluation.zero_shot.classes` takes it."""
    choices: tuple[Wordings, ...] = ("train", "held_out", "all")
    return {
        wordings: {kind.label: [with_article(noun) for noun in nouns_of(kind, wordings)] for kind in KINDS}
        for wordings in choices
    }
