"""Makes real encoded audio with captions, so that the shard path can be tried and tested without downloading a data set.

`python -m examples.synthetic_sounds DIR` writes WebDataset tars of short synthetic sounds in varied formats, sample rates and
channel counts, a small tokenizer trained on their captions and `classes.json` with the classes' names. Each clip's class stands
in its json, for zero-shot evaluation. For unseen clips take another seed, for captions `--wordings train` and `held_out`:

    python -m examples.synthetic_sounds sounds/train --wordings train --clips 4000
    python -m examples.synthetic_sounds sounds/held_out --wordings held_out --clips 520 --seed 1

What the classes are and how they sound is left to `sound_kinds`, what captions say to `sound_captions`.
"""

from __future__ import annotations

import argparse
import io
import json
import random
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import numpy as np
import soundfile
from tqdm import tqdm
from webdataset.writer import TarWriter

from clap_ds.model.tokenizer import train_tokenizer
from examples.synthetic_sounds.captions import Wordings, class_names, describe
from examples.synthetic_sounds.kinds import KINDS, LOUDNESS, Kind
from examples.synthetic_sounds.signals import Signal

ENCODINGS = (
    ("flac", "PCM_16"),
    ("flac", "PCM_24"),
    ("wav", "PCM_16"),
    ("wav", "FLOAT"),
    ("ogg", "VORBIS"),
    ("mp3", "MPEG_LAYER_III"),
)
SAMPLE_RATES = (16000, 22050, 44100, 48000)


@dataclass(frozen=True)
class Variety:
    """What clips may be like.

    Attributes:
        min_seconds, max_seconds: length.
        sample_rates: Hz, to draw from.
        encodings: format and subtype in libsndfile's words, to draw from.
        wordings: of the captions.
    """

    min_seconds: float = 1.0
    max_seconds: float = 15.0
    sample_rates: tuple[int, ...] = SAMPLE_RATES
    encodings: tuple[tuple[str, str], ...] = ENCODINGS
    wordings: Wordings = "all"


@dataclass(frozen=True)
class Clip:
    """One sound with its captions, before encoding. `waveform`: (T, channels) within [-1, 1]."""

    kind: Kind
    waveform: Signal
    sample_rate: int
    captions: list[str]


def make_clip(kind: Kind, rng: random.Random, variety: Variety) -> Clip:
    """A sound of `kind` with everything else (pitch, loudness, length, sample rate, channels, wording) drawn from `rng`."""
    sample_rate = rng.choice(variety.sample_rates)
    seconds = rng.uniform(variety.min_seconds, variety.max_seconds)
    time = np.arange(max(1, round(seconds * sample_rate))) / sample_rate
    value, quality = kind.scale.draw(rng) if kind.scale else (0.0, "")
    amplitude, loudness = LOUDNESS.draw(rng)
    signal = kind.synthesise(np.random.default_rng(rng.getrandbits(64)), time, value)
    signal = signal * (amplitude / np.abs(signal).max())
    if rng.random() < 0.5:
        signal = np.stack([signal, signal * rng.uniform(0.3, 1.0)], axis=1)
    captions = [
        describe(kind, variety.wordings, rng, quality=quality, loudness=loudness, seconds=seconds)
        for _ in range(rng.choice((1, 1, 3)))
    ]
    return Clip(kind, signal.reshape(len(time), -1), sample_rate, captions)


def encode(waveform: Signal, sample_rate: int, file_format: str, subtype: str) -> bytes:
    """A whole audio file. `waveform`: (T, channels)."""
    buffer = io.BytesIO()
    with soundfile.SoundFile(
        buffer, "w", sample_rate, waveform.shape[1], subtype=subtype, format=file_format.upper()
    ) as file:
        for start in range(
            0, len(waveform), sample_rate
        ):  # libsndfile's Vorbis encoder overflows its stack on long writes
            file.write(waveform[start : start + sample_rate])
    return buffer.getvalue()


def pack(clip: Clip, key: str, encoding: tuple[str, str], *, caption_as_text: bool) -> dict[str, object]:
    """The clip as a WebDataset item. Its json always names the kind; a caption goes into it or into a txt of its own."""
    description: dict[str, object] = {"kind": clip.kind.label}
    item: dict[str, object] = {"__key__": key, encoding[0]: encode(clip.waveform, clip.sample_rate, *encoding)}
    if caption_as_text:
        item["txt"] = clip.captions[0].encode()
    else:
        description["caption"] = clip.captions[0] if len(clip.captions) == 1 else clip.captions
    item["json"] = json.dumps(description).encode()
    return item


def write_sounds(directory: Path, *, num_clips: int, num_shards: int, seed: int, variety: Variety) -> list[Path]:
    """Writes `sounds-000.tar`, …, `tokenizer/` and `classes.json` into `directory`. Returns the tars.

    The same arguments give the same sounds and captions. Not the same bytes: libsndfile draws a number for each Ogg stream and
    puts the time into floating-point WAVs.

    Args:
        num_clips: kinds take turns, so that each shard has all of them when it has clips enough.
    """
    directory.mkdir(parents=True, exist_ok=True)
    digits = max(3, len(str(num_shards - 1)))
    paths = [directory / f"sounds-{shard:0{digits}d}.tar" for shard in range(num_shards)]
    captions: list[str] = []
    with tqdm(total=num_clips, unit="clip", disable=None) as progress:
        for shard, path in enumerate(paths):
            with path.open("wb") as file, TarWriter(file, encoder=False, mtime=0, user="clap", group="clap") as tar:
                for number in range(shard * num_clips // num_shards, (shard + 1) * num_clips // num_shards):
                    rng = random.Random(f"seed {seed}, clip {number}")
                    clip = make_clip(KINDS[number % len(KINDS)], rng, variety)
                    captions += clip.captions
                    encoding = rng.choice(variety.encodings)
                    tar.write(pack(clip, f"{number:06d}", encoding, caption_as_text=rng.random() < 0.5))
                    progress.update()
    train_tokenizer(captions, directory / "tokenizer")
    (directory / "classes.json").write_text(json.dumps(class_names(), indent=1) + "\n")
    return paths


def _seconds_range(text: str) -> tuple[float, float]:
    try:
        bounds = [float(part) for part in text.split("-")]
    except ValueError:
        bounds = []
    if len(bounds) not in (1, 2) or not 0.1 <= bounds[0] <= bounds[-1] <= 600:
        raise argparse.ArgumentTypeError(f"expected seconds such as 10 or 1-15, from 0.1 to 600, found {text!r}")
    return bounds[0], bounds[-1]


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"expected a whole number above 0, found {text!r}")
    return int(text)


def _snippet(directory: Path, paths: list[Path]) -> str:
    last = paths[-1].stem.removeprefix("sounds-")
    pattern = paths[0].name if len(paths) == 1 else f"sounds-{{{'0' * len(last)}..{last}}}.tar"
    settings = {"source": "shards", "shards": str(directory / pattern), "tokenizer": str(directory / "tokenizer")}
    return json.dumps({**settings, "num_workers": min(len(paths), 2)}, indent=2)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m examples.synthetic_sounds",
        description="Make audio–caption shards of synthetic sounds, and a tokenizer.",
    )
    parser.add_argument("directory", type=Path, metavar="DIR", help="new or empty folder to write to")
    parser.add_argument("--clips", type=_positive, default=256, metavar="N", help="sounds to make (default 256)")
    parser.add_argument("--shards", type=_positive, default=4, metavar="S", help="tar files to put them in (default 4)")
    parser.add_argument("--seed", type=int, default=0, metavar="K", help="another seed, other sounds (default 0)")
    parser.add_argument(
        "--seconds", type=_seconds_range, default=(1.0, 15.0), metavar="1-15", help="length of the clips"
    )
    parser.add_argument(
        "--wordings",
        choices=get_args(Wordings),
        default="all",
        help="of the captions: those to train on, those held out for evaluation (the same words, newly combined), or all",
    )
    parser.add_argument("--sample_rate", type=_positive, metavar="HZ", help="one for all clips (default: varied)")
    parser.add_argument(
        "--format", choices=sorted({name for name, _ in ENCODINGS}), help="one for all clips (default: varied)"
    )
    return parser


def _variety(options: argparse.Namespace) -> Variety:
    first = next((encoding for encoding in ENCODINGS if encoding[0] == options.format), None)
    return Variety(
        min_seconds=options.seconds[0],
        max_seconds=options.seconds[1],
        sample_rates=(options.sample_rate,) if options.sample_rate else SAMPLE_RATES,
        encodings=(first,) if first else ENCODINGS,
        wordings=options.wordings,
    )


def main(arguments: Iterable[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(None if arguments is None else list(arguments))
    directory: Path = options.directory
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        parser.error(f"{directory} exists and isn't an empty folder; name a new one, or empty it first")
    if options.clips < options.shards:
        parser.error(f"--clips {options.clips} is fewer than --shards {options.shards}: a shard would be empty")
    if options.sample_rate and not 8000 <= options.sample_rate <= 48000:
        parser.error(f"--sample_rate {options.sample_rate}: expected 8000 to 48000 Hz")
    try:
        paths = write_sounds(
            directory,
            num_clips=options.clips,
            num_shards=options.shards,
            seed=options.seed,
            variety=_variety(options),
        )
    except OSError as error:
        parser.error(f"{directory} can't be written: {error}")
    except soundfile.SoundFileError as error:
        parser.error(f"--format {options.format}, --sample_rate {options.sample_rate}: {error}")
    size = sum(path.stat().st_size for path in paths) / 1e6
    print(
        f"{options.clips} clips of {len(KINDS)} kinds in {len(paths)} shard(s), {size:.1f} MB, and a tokenizer: {directory}"
    )
    print(f'For a run\'s JSON, in "clap":\n"data": {_snippet(directory, paths)}')
    return 0


if __name__ == "__main__":
    sys.exit(main())
