"""Classes of synthetic sounds: their names in captions, and the quantity that captions may
describe.

To add a class, add a line to the table and a signal of the same name to `signals`. Held-out
wordings are new templates and nouns that combine words of the training wordings, because a model
trained from scratch can't understand unseen words. The household's names are such unseen words, for
fine-tuning.
"""

import random
from dataclasses import dataclass
from typing import Literal

Wordings = Literal["train", "held_out", "household"]


@dataclass(frozen=True)
class Scale:
    """An audible quantity, drawn log-uniformly from [low, high). Each third of the range has its
    own words."""

    low: float
    high: float
    words: tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]

    def draw(self, rng: random.Random) -> tuple[float, str]:
        """Return a value and a word for it."""
        position = rng.random()
        value = self.low * (self.high / self.low) ** position
        return value, rng.choice(self.words[int(3 * position)])


SCALES = {
    # Hz
    "pitch": Scale(
        110,
        1760,
        (("low", "deep", "low-pitched"), ("medium", "mid-range"), ("high", "high-pitched")),
    ),
    # events per second
    "tempo": Scale(1, 16, (("slow", "unhurried"), ("steady", "regular"), ("fast", "rapid"))),
}
# peak amplitude
LOUDNESS = Scale(0.01, 0.9, (("quiet", "faint", "soft"), ("moderate", "clear"), ("loud", "strong")))

TEMPLATES = {
    "train": (
        "{sound}",
        "the sound of {sound}",
        "a recording of {sound}",
        "{sound} can be heard",
        "{sound}, about {seconds} seconds long",
        "someone plays back {sound}",
        "{sound} in an otherwise silent room",
    ),
    "held_out": (
        "a recording of the sound of {sound}",
        "{sound} can be heard in a silent room",
        "someone plays back a recording of {sound}",
        "about {seconds} seconds of {sound}",
    ),
    "household": ("{sound}", "the sound of {sound}", "{sound} at home", "{sound} next door"),
}


@dataclass(frozen=True)
class Kind:
    """A class of sounds. `nouns`: its names in captions, by wordings."""

    label: str
    nouns: dict[str, tuple[str, ...]]
    scale: Scale | None

    def caption(
        self, wordings: Wordings, rng: random.Random, qualities: tuple[str, str], seconds: float
    ) -> str:
        """Return a caption. It includes each of the words for loudness and for pitch or tempo at
        random."""
        # Kinds without a scale have an empty second word.
        words = [word for word in qualities if word and rng.random() < 0.7]
        rng.shuffle(words)
        sound = with_article(" ".join([*words, rng.choice(self.nouns[wordings])]))
        return rng.choice(TEMPLATES[wordings]).format(sound=sound, seconds=max(1, round(seconds)))


# Scale, label: training nouns / held-out nouns / what it may be in a household
_TABLE = """
pitch pure tone: pure tone, sine tone, steady whistle / pure sine whistle, steady sine tone / hearing test
pitch square wave: square wave, harsh electronic buzz, harsh square tone / harsh square wave, electronic square buzz / alarm clock
pitch rising chirp: rising chirp, upward sweep, tone gliding up / chirp gliding up, rising sweep / washing machine that starts
pitch falling chirp: falling chirp, downward sweep, tone gliding down / chirp gliding down, falling sweep / washing machine that stops
pitch tremolo: tremolo tone, tone fluttering in volume, fluttering tremolo / fluttering tone, tremolo fluttering in volume / microwave oven
pitch siren: two-tone siren, alarm switching between two notes, siren alarm / siren switching between two notes, two-tone alarm / smoke detector
pitch bell: bell, struck metal bar, ringing chime / ringing metal bell, struck chime / doorbell
- white noise: white noise, hiss, static / static hiss, white static noise / shower
tempo clicks: train of clicks, ticking, series of ticking clicks / series of clicks, train of ticking clicks / kitchen timer
tempo noise bursts: pulsing noise, series of noise bursts, steam-engine puffing / series of pulsing bursts, puffing steam-engine noise / coffee maker
- heartbeat: heartbeat, beating heart, double thump / thump of a heart, double heartbeat / footstep
- bird: bird, twittering songbird, bird song / twittering bird, song of a songbird / cell phone
"""  # noqa: E501


def _parse(line: str) -> Kind:
    kind, _, nouns = line.partition(": ")
    scale, _, label = kind.partition(" ")
    nouns_by_wordings = [tuple(part.split(", ")) for part in nouns.split(" / ")]
    return Kind(label, dict(zip(TEMPLATES, nouns_by_wordings, strict=True)), SCALES.get(scale))


KINDS = [_parse(line) for line in _TABLE.strip().splitlines()]


def with_article(sound: str) -> str:
    return f"{'an' if sound[0] in 'aeiou' else 'a'} {sound}"


def class_names(wordings: str) -> dict[str, list[str]]:
    """Return each class's names with articles, in the format of
    `clap.evaluation.zero_shot.classes`."""
    return {kind.label: [with_article(noun) for noun in kind.nouns[wordings]] for kind in KINDS}
