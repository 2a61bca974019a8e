"""Make encoded synthetic audio with captions, to try and test training from shards without a
download.

`python -m examples.synthetic_sounds DIR` writes WebDataset tars of short sounds in varied formats,
sample rates and channel counts. It also writes a tokenizer trained on the captions, and
`classes.json` with the class names. Each clip's json has its class, for zero-shot evaluation. For
held-out data, use another seed and `--wordings held_out`:

    python -m examples.synthetic_sounds sounds/train --wordings train --clips 4800
    python -m examples.synthetic_sounds sounds/held_out --wordings held_out --clips 480 --seed 1

With `--files` it writes audio files and `clips.csv` instead, as you may have them:

    python -m examples.synthetic_sounds household --files --wordings household --clips 600 --seed 2
"""

import argparse
import csv
import io
import json
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import soundfile
from tqdm import tqdm
from webdataset.writer import TarWriter

from clap_ds.config.arguments import make_parser, whole_number
from clap_ds.data.build_shards.shard_writer import print_settings
from clap_ds.utils.errors import UserError, run_alone
from clap_ds.utils.files import open_atomically, replace_files, write_atomically
from clap_ds.weights.hub import train_tokenizer
from examples.synthetic_sounds.kinds import KINDS, LOUDNESS, TEMPLATES, Kind, class_names
from examples.synthetic_sounds.signals import SIGNALS, Signal

# formats and subtypes of libsndfile
ENCODINGS: tuple[tuple[str, str], ...] = (
    ("flac", "PCM_16"),
    ("flac", "PCM_24"),
    ("wav", "PCM_16"),
    ("wav", "FLOAT"),
    ("ogg", "VORBIS"),
    ("mp3", "MPEG_LAYER_III"),
)
SAMPLE_RATES = (16000, 22050, 44100, 48000)


def make_clip(
    kind: Kind, rng: random.Random, options: argparse.Namespace
) -> tuple[Signal, int, list[str]]:
    """Return a sound (T, channels) in [-1, 1], its sample rate and captions, drawn from `rng`."""
    sample_rate = rng.choice([options.sample_rate] if options.sample_rate else SAMPLE_RATES)
    seconds = rng.uniform(*options.seconds)
    time = np.arange(round(seconds * sample_rate)) / sample_rate
    # a pitch in Hz or a tempo in 1/s, and a word for it
    value, quality = kind.scale.draw(rng) if kind.scale else (0.0, "")
    amplitude, loudness = LOUDNESS.draw(rng)
    noise = np.random.default_rng(rng.getrandbits(64))
    signal = SIGNALS[kind.label](noise, time, value)
    # to this peak
    signal = signal * (amplitude / np.abs(signal).max())
    if rng.random() < 0.5:
        # stereo, with a quieter second channel
        signal = np.stack([signal, signal * rng.uniform(0.3, 1.0)], axis=1)
    # A third of the clips have three captions.
    num_captions = rng.choice((1, 1, 3))
    qualities = loudness, quality
    captions = [
        kind.caption(options.wordings, rng, qualities, seconds) for _ in range(num_captions)
    ]
    return signal.reshape(len(time), -1), sample_rate, captions


def encode(waveform: Signal, sample_rate: int, file_format: str, subtype: str) -> bytes:
    """Return the bytes of an audio file. `waveform`: (T, channels)."""
    buffer = io.BytesIO()
    with soundfile.SoundFile(
        buffer, "w", sample_rate, waveform.shape[1], subtype, format=file_format.upper()
    ) as file:
        # libsndfile's Vorbis encoder overflows its stack on long writes.
        for start in range(0, len(waveform), sample_rate):
            file.write(waveform[start : start + sample_rate])
    return buffer.getvalue()


def write_sounds(options: argparse.Namespace) -> None:
    """Write `sounds-000.tar`, …, `tokenizer/` and `classes.json`.

    The same options give the same sounds and captions, but not the same bytes: libsndfile writes
    random Ogg stream numbers and the time into floating-point WAVs. Kinds alternate, so every shard
    with enough clips has all of them.
    """
    directory = options.directory
    directory.mkdir(parents=True, exist_ok=True)
    all_captions: list[str] = []
    for shard in tqdm(range(options.shards), unit="shard", disable=None):
        start = shard * options.clips // options.shards
        stop = (shard + 1) * options.clips // options.shards
        with (
            open_atomically(directory / f"sounds-{shard:03d}.tar") as file,
            TarWriter(file, encoder=False, mtime=0, user="clap", group="clap") as tar,
        ):
            for number in range(start, stop):
                item, captions = make_item(number, options)
                tar.write(item)
                all_captions += captions
    # Small models train from scratch with a small vocabulary.
    with replace_files(directory / "tokenizer") as draft:
        train_tokenizer(all_captions, draft)
    classes = {wordings: class_names(wordings) for wordings in TEMPLATES}
    write_atomically(directory / "classes.json", json.dumps(classes, indent=1) + "\n")


def write_files(options: argparse.Namespace) -> None:
    """Write `sounds/000000.flac`, … and `clips.csv` with columns of the path, a caption and the
    class."""
    (options.directory / "sounds").mkdir(parents=True, exist_ok=True)
    rows = [("path", "caption", "class")]
    for number in tqdm(range(options.clips), unit="file", disable=None):
        item, captions = make_item(number, options)
        (suffix,) = item.keys() & {file_format for file_format, _ in ENCODINGS}
        path = f"sounds/{number:06d}.{suffix}"
        sound = item[suffix]
        assert isinstance(sound, bytes)
        (options.directory / path).write_bytes(sound)
        noun = KINDS[number % len(KINDS)].nouns[options.wordings][0]
        rows.append((path, captions[0], noun))
    table = io.StringIO()
    csv.writer(table).writerows(rows)
    write_atomically(options.directory / "clips.csv", table.getvalue())


def make_item(number: int, options: argparse.Namespace) -> tuple[dict[str, object], list[str]]:
    """Return a tar's item with its `__key__`, and its captions."""
    rng = random.Random(f"seed {options.seed}, clip {number}")
    kind = KINDS[number % len(KINDS)]
    waveform, sample_rate, captions = make_clip(kind, rng, options)
    encodings = ENCODINGS
    if options.format:
        # the first subtype of the format
        encodings = tuple(encoding for encoding in ENCODINGS if encoding[0] == options.format)[:1]
    file_format, subtype = rng.choice(encodings)
    item: dict[str, object] = {
        "__key__": f"{number:06d}",
        file_format: encode(waveform, sample_rate, file_format, subtype),
    }
    fields: dict[str, object] = {"kind": kind.label}
    # Half of the captions are in the json.
    if rng.random() < 0.5:
        item["txt"] = captions[0].encode()
    else:
        fields["caption"] = captions[0] if len(captions) == 1 else captions
    return item | {"json": json.dumps(fields).encode()}, captions


def seconds(text: str) -> tuple[float, float]:
    """Parse `10` or `1-15`."""
    low, _, high = text.partition("-")
    return float(low), float(high or low)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("directory", type=Path, metavar="DIR", help="new or empty output folder")
    add(
        "--clips",
        type=whole_number(),
        default=256,
        metavar="N",
        help="number of sounds (default: 256)",
    )
    add(
        "--shards",
        type=whole_number(),
        default=4,
        metavar="S",
        help="number of tar files (default: 4)",
    )
    add("--seed", type=int, default=0, metavar="K", help="random seed of the sounds (default: 0)")
    add(
        "--seconds",
        type=seconds,
        default=(1.0, 15.0),
        metavar="1-15",
        help="length of clips in s (default: 1-15)",
    )
    add(
        "--wordings",
        choices=TEMPLATES,
        default="train",
        help=(
            "captions: for training (default), held out (new combinations of the same words), or "
            "of a household (new words)"
        ),
    )
    add(
        "--sample_rate",
        type=whole_number(8000, 48000),
        metavar="HZ",
        help="rate of all clips (default: varied)",
    )
    formats = sorted({file_format for file_format, _ in ENCODINGS})
    add("--format", choices=formats, help="format of all clips (default: varied)")
    add("--files", action="store_true", help="write audio files and clips.csv instead of tars")
    options = parser.parse_args(arguments)
    # Tars of earlier sounds would mix with new ones.
    directory: Path = options.directory
    if directory.exists() and any(directory.iterdir()):
        raise UserError(
            f"{directory} exists and isn't an empty folder: pass a new folder, or empty it"
        )
    if options.files:
        write_files(options)
        print(f"{options.clips} clips of {len(KINDS)} kinds: {directory / 'clips.csv'}")
        return
    write_sounds(options)
    print(
        f"{options.clips} clips of {len(KINDS)} kinds and a tokenizer, {options.shards} "
        f"shard(s): {directory}"
    )
    print_settings(str(directory / "sounds-*.tar"), str(directory / "tokenizer"), None)


if __name__ == "__main__":
    run_alone(main)
