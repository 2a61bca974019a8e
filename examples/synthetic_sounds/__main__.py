"""Makes real encoded audio with captions, so that the shard path can be tried and tested without downloading a data set.

`python -m examples.synthetic_sounds DIR` writes WebDataset tars of short synthetic sounds in varied formats, sample rates and
channel counts, a small tokenizer trained on their captions and `classes.json` with the classes' names. Each clip's class stands
in its json, for zero-shot evaluation. For unseen clips take another seed, for captions `--wordings train` and `held_out`:

    python -m examples.synthetic_sounds sounds/train --wordings train --clips 4800
    python -m examples.synthetic_sounds sounds/held_out --wordings held_out --clips 480 --seed 1
"""

from __future__ import annotations

import argparse
import io
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import numpy as np
import soundfile
from tqdm import tqdm
from webdataset.writer import TarWriter

from clap_ds.config.arguments import whole_number
from clap_ds.config.errors import UserError, run_alone
from clap_ds.model.tokenizer import train_tokenizer
from examples.synthetic_sounds.kinds import KINDS, LOUDNESS, TEMPLATES, Kind, Wordings, class_names
from examples.synthetic_sounds.signals import SIGNALS, Signal

ENCODINGS = (("flac", "PCM_16"), ("flac", "PCM_24"), ("wav", "PCM_16"), ("wav", "FLOAT"), ("ogg", "VORBIS"),
             ("mp3", "MPEG_LAYER_III"))  # fmt: skip
"""In libsndfile's words."""
SAMPLE_RATES = (16000, 22050, 44100, 48000)


def make_clip(
    kind: Kind, rng: random.Random, length: tuple[float, float], rates: Sequence[int], wordings: Wordings
) -> tuple[Signal, int, list[str]]:
    """A sound (T, channels) within [-1, 1] between two lengths in s, its sample rate and captions; everything but its kind is
    drawn from `rng`."""
    sample_rate, seconds = rng.choice(rates), rng.uniform(*length)
    time = np.arange(max(1, round(seconds * sample_rate))) / sample_rate
    value, quality = kind.scale.draw(rng) if kind.scale else (0.0, "")
    amplitude, loudness = LOUDNESS.draw(rng)
    signal = SIGNALS[kind.label](np.random.default_rng(rng.getrandbits(64)), time, value)
    signal = signal * (amplitude / np.abs(signal).max())
    if rng.random() < 0.5:
        signal = np.stack([signal, signal * rng.uniform(0.3, 1.0)], axis=1)
    captions = [kind.caption(wordings, rng, (loudness, quality), seconds) for _ in range(rng.choice((1, 1, 3)))]
    return signal.reshape(len(time), -1), sample_rate, captions


def encode(waveform: Signal, sample_rate: int, file_format: str, subtype: str) -> bytes:
    """A whole audio file. `waveform`: (T, channels)."""
    buffer = io.BytesIO()
    with soundfile.SoundFile(buffer, "w", sample_rate, waveform.shape[1], subtype, format=file_format.upper()) as file:
        # libsndfile's Vorbis encoder overflows its stack on long writes.
        for start in range(0, len(waveform), sample_rate):
            file.write(waveform[start : start + sample_rate])
    return buffer.getvalue()


def write_sounds(options: argparse.Namespace) -> list[Path]:
    """Write `sounds-000.tar`, …, `tokenizer/` and `classes.json`, as the command's options say. Returns the tars.

    The same options give the same sounds and captions. Not the same bytes: libsndfile draws a number for each Ogg stream and
    puts the time into floating-point WAVs. Kinds take turns, so that each shard has all of them when it has clips enough.
    """
    directory, count = options.directory, options.shards
    directory.mkdir(parents=True, exist_ok=True)
    paths = [directory / f"sounds-{shard:0{max(3, len(str(count - 1)))}d}.tar" for shard in range(count)]
    encodings = [each for each in ENCODINGS if each[0] == options.format][:1] or ENCODINGS
    rates = [options.sample_rate] if options.sample_rate else SAMPLE_RATES
    all_captions: list[str] = []
    with tqdm(total=options.clips, unit="clip", disable=None) as progress:
        for shard, path in enumerate(paths):
            with path.open("wb") as file, TarWriter(file, encoder=False, mtime=0, user="clap", group="clap") as tar:
                for number in range(shard * options.clips // count, (shard + 1) * options.clips // count):
                    rng, kind = random.Random(f"seed {options.seed}, clip {number}"), KINDS[number % len(KINDS)]
                    waveform, sample_rate, captions = make_clip(kind, rng, options.seconds, rates, options.wordings)
                    all_captions += captions
                    encoding = rng.choice(encodings)
                    audio = {encoding[0]: encode(waveform, sample_rate, *encoding)}
                    described: dict[str, object] = {"kind": kind.label}
                    if rng.random() < 0.5:
                        audio["txt"] = captions[0].encode()
                    else:
                        described["caption"] = captions[0] if len(captions) == 1 else captions
                    tar.write({"__key__": f"{number:06d}", **audio, "json": json.dumps(described).encode()})
                    progress.update()
    train_tokenizer(all_captions, directory / "tokenizer")
    classes = {wordings: class_names(wordings) for wordings in TEMPLATES}
    (directory / "classes.json").write_text(json.dumps(classes, indent=1) + "\n")
    return paths


def seconds(text: str) -> tuple[float, float]:
    """`10` or `1-15`, from 0.1 to 600; ValueError for others."""
    low, _, high = text.partition("-")
    if not 0.1 <= float(low) <= float(high or low) <= 600:
        raise ValueError
    return float(low), float(high or low)


def main(arguments: Sequence[str] | None = None) -> int:
    description = "Make audio–caption shards of synthetic sounds, and a tokenizer."
    parser = argparse.ArgumentParser("python -m examples.synthetic_sounds", description=description)
    add = parser.add_argument
    wordings = "of the captions: to train on, held out for evaluation (the same words newly combined), or all (default)"
    add("directory", type=Path, metavar="DIR", help="new or empty folder to write to")
    add("--clips", type=whole_number(), default=256, metavar="N", help="sounds to make (default 256)")
    add("--shards", type=whole_number(), default=4, metavar="S", help="tar files to put them in (default 4)")
    add("--seed", type=int, default=0, metavar="K", help="another seed, other sounds (default 0)")
    add("--seconds", type=seconds, default=(1.0, 15.0), metavar="1-15", help="length of the clips, from 0.1 to 600")
    add("--wordings", choices=get_args(Wordings), default="all", help=wordings)
    add("--sample_rate", type=whole_number(8000, 48000), metavar="HZ", help="one for all clips (default: varied)")
    add("--format", choices=sorted({name for name, _ in ENCODINGS}), help="one for all clips (default: varied)")
    options = parser.parse_args(arguments)
    directory: Path = options.directory
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise UserError(f"{directory} exists and isn't an empty folder; name a new one, or empty it first")
    if options.clips < options.shards:
        raise UserError(f"--clips {options.clips} is fewer than --shards {options.shards}: a shard would be empty")
    paths = write_sounds(options)
    print(f"{options.clips} clips of {len(KINDS)} kinds and a tokenizer, {len(paths)} shard(s): {directory}")
    places = {"shards": str(directory / "sounds-*.tar"), "tokenizer": str(directory / "tokenizer")}
    settings = json.dumps({"source": "webdataset", **places, "num_workers": min(len(paths), 2)}, indent=2)
    print(f'For a run\'s JSON, in "clap":\n"data": {settings}')
    return 0


if __name__ == "__main__":
    run_alone(main)
