"""The classes of synthetic sounds: how each is made and what a caption may call it.

To add a class, write its signal into `sound_signals` and put a `Kind` into `KINDS`. Length, loudness and encoding are left to
`sounds`, the wording of whole captions to `sound_captions`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from examples.synthetic_sounds import signals
from examples.synthetic_sounds.signals import Signal


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


PITCH = Scale(110, 1760, (("low", "deep", "low-pitched"), ("medium", "mid-range"), ("high", "high-pitched")))  # Hz
TEMPO = Scale(1, 16, (("slow", "unhurried"), ("steady", "regular"), ("fast", "rapid")))  # events per second
LOUDNESS = Scale(0.01, 0.9, (("quiet", "faint", "soft"), ("moderate", "clear"), ("loud", "strong")))  # peak amplitude


@dataclass(frozen=True)
class Kind:
    """A class of sounds.

    Attributes:
        label: class name.
        nouns: ways a caption may call it.
        held_out_nouns: more of them, kept for evaluation: new combinations of words of `nouns`, as a model trained from nothing
            can't know words it never met.
        scale: of the quantity handed to `synthesise`, if there is one worth naming.
        synthesise: (noise source, time in s (T,), value on `scale`) → signal (T,) of any amplitude.
    """

    label: str
    nouns: tuple[str, ...]
    held_out_nouns: tuple[str, ...]
    scale: Scale | None
    synthesise: Callable[[np.random.Generator, Signal, float], Signal]


KINDS = (
    Kind(
        "pure tone",
        ("pure tone", "sine tone", "steady whistle"),
        ("pure sine whistle", "steady sine tone"),
        PITCH,
        signals.tone,
    ),
    Kind(
        "square wave",
        ("square wave", "harsh electronic buzz", "harsh square tone"),
        ("harsh square wave", "electronic square buzz"),
        PITCH,
        signals.square,
    ),
    Kind(
        "sawtooth wave",
        ("sawtooth wave", "bright synthesizer buzz", "bright sawtooth"),
        ("bright sawtooth buzz", "synthesizer sawtooth wave"),
        PITCH,
        signals.sawtooth,
    ),
    Kind(
        "rising chirp",
        ("rising chirp", "upward sweep", "tone gliding up"),
        ("chirp gliding up", "rising sweep"),
        PITCH,
        signals.rising,
    ),
    Kind(
        "falling chirp",
        ("falling chirp", "downward sweep", "tone gliding down"),
        ("chirp gliding down", "falling sweep"),
        PITCH,
        signals.falling,
    ),
    Kind(
        "tremolo",
        ("tremolo tone", "tone fluttering in volume", "fluttering tremolo"),
        ("fluttering tone", "tremolo fluttering in volume"),
        PITCH,
        signals.tremolo,
    ),
    Kind(
        "vibrato",
        ("vibrato tone", "tone wavering in pitch", "wavering vibrato"),
        ("wavering tone", "vibrato wavering in pitch"),
        PITCH,
        signals.vibrato,
    ),
    Kind(
        "siren",
        ("two-tone siren", "alarm switching between two notes", "siren alarm"),
        ("siren switching between two notes", "two-tone alarm"),
        PITCH,
        signals.siren,
    ),
    Kind(
        "bell",
        ("bell", "struck metal bar", "ringing chime"),
        ("ringing metal bell", "struck chime"),
        PITCH,
        signals.bell,
    ),
    Kind(
        "white noise",
        ("white noise", "hiss", "static"),
        ("static hiss", "white static noise"),
        None,
        signals.white_noise,
    ),
    Kind(
        "pink noise",
        ("pink noise", "rushing noise like a waterfall", "rushing waterfall"),
        ("pink noise like a waterfall", "rushing pink noise"),
        None,
        signals.pink_noise,
    ),
    Kind(
        "clicks",
        ("train of clicks", "ticking", "series of ticking clicks"),
        ("series of clicks", "train of ticking clicks"),
        TEMPO,
        signals.clicks,
    ),
    Kind(
        "noise bursts",
        ("pulsing noise", "series of noise bursts", "steam-engine puffing"),
        ("series of pulsing bursts", "puffing steam-engine noise"),
        TEMPO,
        signals.bursts,
    ),
    Kind(
        "rumble",
        ("rumble", "distant thunder", "earth rumbling"),
        ("rumbling thunder", "distant earth rumble"),
        None,
        signals.rumble,
    ),
    Kind(
        "crackle",
        ("crackle", "crackling fire", "popping fire"),
        ("popping crackle", "fire crackle"),
        None,
        signals.crackle,
    ),
    Kind(
        "heartbeat",
        ("heartbeat", "beating heart", "double thump"),
        ("thump of a heart", "double heartbeat"),
        None,
        signals.heartbeat,
    ),
    Kind(
        "arpeggio",
        ("arpeggio", "climbing melody", "run of climbing notes"),
        ("climbing arpeggio", "melody of climbing notes"),
        PITCH,
        signals.arpeggio,
    ),
    Kind(
        "chord",
        ("chord", "three tones held together", "organ chord"),
        ("three organ tones", "chord held together"),
        PITCH,
        signals.chord,
    ),
    Kind(
        "telephone",
        ("telephone", "phone call", "old telephone call"),
        ("old phone", "telephone call"),
        None,
        signals.telephone,
    ),
    Kind("wind", ("wind", "howling gale", "gusts of wind"), ("howling wind", "gusts of a gale"), None, signals.wind),
    Kind(
        "bird",
        ("bird", "twittering songbird", "bird song"),
        ("twittering bird", "song of a songbird"),
        None,
        signals.bird,
    ),
    Kind(
        "drum",
        ("drum", "drum beat", "pounding drum"),
        ("pounding beat", "beat of a pounding drum"),
        TEMPO,
        signals.drum,
    ),
    Kind(
        "plucked string",
        ("plucked string", "guitar", "strummed guitar string"),
        ("plucked guitar", "strummed string"),
        PITCH,
        signals.plucked,
    ),
    Kind(
        "bouncing ball",
        ("bouncing ball", "ball dropped on a table", "ping-pong ball"),
        ("dropped ping-pong ball", "ball bouncing on a table"),
        None,
        signals.bouncing,
    ),
    Kind(
        "laser", ("laser", "ray gun firing", "laser shots"), ("firing laser gun", "ray gun shots"), None, signals.laser
    ),
    Kind(
        "beeping",
        ("beeping", "repeated beeps", "beeping machine"),
        ("machine beeps", "repeated beeping"),
        PITCH,
        signals.beeping,
    ),
)
