"""`clap-shards size`: what shards take of disks, links and file systems, before any is made.

Prepared kinds have their sizes by formula, to the byte; audio files as people have them by typical rates, which are stated, or
by shards that are there. Without torch, unless such shards are looked into.
"""

from __future__ import annotations

import argparse
import math
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from clap_ds.config.arguments import number, whole_number
from clap_ds.config.errors import UserError
from clap_ds.config.model import AudioConfig, load_preset
from clap_ds.config.model_names import preset_names
from clap_ds.data.front_end import KINDS, Kind

ENCODED = {
    "flac": (105_600, "55 % of 16-bit stereo at 48 kHz"),
    "wav": (192_000, "16-bit stereo at 48 kHz"),
    "mp3": (16_000, "128 kbit/s"),
    "ogg": (14_000, "112 kbit/s"),
}
"""Formats of encoded audio: bytes that a second typically takes, and what that is."""
RATES = (624.0, 3300.0, 4500.0)
"""Samples per second of one GPU: the published rate, and this project's goals for one H200."""
WAV_HEADER, NPY_HEADER = 44, 128
FOLDER_INODES = 5
"""The folder, its manifest, its list of broken items, and `.build` with the plan; each tar has a record in `.build` besides."""
LONGEST_S = 40_000  # a WAV holds 4 GiB

_RATE = number(0.001, 1e9)


class Known(NamedTuple):
    """Shards that are there: items, bytes of their tars, seconds of audio (None where no manifest says), kind."""

    items: int
    bytes: int
    seconds: float | None
    kind: Kind


def clip_bytes(kind: Kind, audio: AudioConfig, seconds: float, encoded: str = "flac") -> int:
    """Bytes of a clip's file: a WAV of 16-bit mono, features in float16, of the model's length at least, or an encoded one."""
    samples = round(seconds * audio.sample_rate)
    if kind == "encoded":
        return math.ceil(seconds * ENCODED[encoded][0])
    if kind == "waveform":
        return WAV_HEADER + 2 * samples
    frames = max(samples, audio.num_samples) // audio.hop_size + 1
    return NPY_HEADER + 2 * frames * audio.mel_bins


def item_bytes(clip: int) -> int:
    """Bytes of an item in a tar: a clip's file and its JSON, up to 512 bytes of it, each after a header and in whole blocks."""
    block = tarfile.BLOCKSIZE
    return block + math.ceil(clip / block) * block + 2 * block


def set_bytes(clips: int, tars: int, item: int) -> int:
    """Bytes of tars among which clips are shared out evenly. A tar ends with two blocks of zeros, and fills whole records."""

    def one(items: int) -> int:
        return -(-(items * item + 2 * tarfile.BLOCKSIZE) // tarfile.RECORDSIZE) * tarfile.RECORDSIZE

    fewer, with_more = divmod(clips, tars)
    return with_more * one(fewer + 1) + (tars - with_more) * one(fewer)


def look_into(shards: Sequence[str]) -> Known:
    """What tars hold, by the manifests beside them; of local ones without, by their headers. UserError for others, and for
    shards of several kinds or without items."""
    from clap_ds.data.shard_manifest import read_manifest, samples_of

    names = {shard: shard.rpartition("/") for shard in shards}
    manifests = {folder or ".": read_manifest(folder or ".") for folder, _, _ in names.values()}
    kinds = {manifest.kind for manifest in manifests.values()}
    if len(kinds) > 1:
        raise UserError(f"{', '.join(sorted(manifests))} hold shards of several kinds: {', '.join(sorted(kinds))}")
    items = samples_of(shards)
    if items is None:
        raise UserError(f"{shards[0]} or others: how many items it has isn't known: expected a manifest.json beside it")
    if not any(items):
        raise UserError(f"{shards[0]}: no items in it, nor in the others")
    records = {shard: manifests[folder or "."].shards.get(name) for shard, (folder, _, name) in names.items()}
    size = sum(record.bytes if record else Path(shard).stat().st_size for shard, record in records.items())
    known = [record.seconds for record in records.values() if record]
    return Known(sum(items), size, sum(known) if len(known) == len(records) else None, kinds.pop())


def add_size_options(parser: argparse.ArgumentParser) -> None:
    count, most = whole_number(1, 10**15), whole_number(1, 10**7)
    add = parser.add_argument_group("clips").add_argument
    add("--clips", type=count, metavar="N", help="how many (default: as many as --like has)")
    add("--kind", nargs="+", choices=KINDS, default=KINDS, metavar="K", help=f"of {', '.join(KINDS)} (default: all)")
    length = "length of a clip in seconds (default: 10, or as those of --like)"
    add("--seconds", type=number(0.001, LONGEST_S), metavar="S", help=length)
    tiny = "htsat_tiny_roberta_base"
    add("--preset", choices=preset_names(), default=tiny, metavar="NAME", help=f"model they are for (default {tiny})")
    encoded = parser.add_argument_group("encoded clips").add_mutually_exclusive_group()
    rates = ", ".join(f"{name} {rate:,}" for name, (rate, _) in ENCODED.items())
    encoded.add_argument("--format", choices=ENCODED, default="flac", help=f"bytes a second: {rates} (default flac)")
    encoded.add_argument("--like", nargs="+", metavar="TARS", help="shards that are there: paths, patterns or URLs")
    add = parser.add_argument_group("storage").add_argument
    add("--shard_mb", type=_RATE, default=500.0, metavar="MB", help="size of a tar, about (default 500)")
    add("--link", type=_RATE, metavar="GBIT", help="Gbit/s of the link to copy them over")
    add("--disk_mb_per_s", type=_RATE, default=1000.0, metavar="MB", help="at which they are written (default 1000)")
    add = parser.add_argument_group("training").add_argument
    add("--rate", type=_RATE, nargs="+", default=list(RATES), metavar="R", help="samples/s of one GPU (624 3300 4500)")
    add("--gpus", type=most, default=4, metavar="N", help="in all (default 4)")
    add("--gpus_per_node", type=most, default=4, metavar="N", help="(default 4)")


def run_size(options: argparse.Namespace) -> None:
    """Work out and print. UserError where the number of clips isn't known, or shards can't be looked into."""
    like = None
    if options.like:
        from clap_ds.data.shard_list import expand_shards

        try:
            like = look_into(expand_shards(options.like))
        except ValueError as error:
            raise UserError(f"--like: {error}") from None
    clips = options.clips or (like and like.items)
    if not clips:
        raise UserError("--clips: expected how many clips there are, or --like with shards that are there")
    seconds = options.seconds or (like and like.seconds and like.seconds / like.items) or 10.0
    kinds = {kind: figures(kind, clips, seconds, like, options) for kind in options.kind}
    rows = [(f"{clips:,} clips of {digits(seconds)} s", *kinds)]
    rows += [(label, *(found[label] for found in kinds.values())) for label in kinds[options.kind[0]]]
    width = max(len(label) for label, *_ in rows)
    print("\n".join(label.ljust(width) + "".join(f"{cell:>18}" for cell in cells) for label, *cells in rows))
    gpus = f"{options.gpus:,} GPU(s) on {math.ceil(options.gpus / options.gpus_per_node):,} node(s)"
    print(f"\nRates are what {gpus} ask of the file system: whole items, none in memory.")
    if like:
        print(f"{like.kind}: as in {like.items:,} items of {amount(like.bytes)} that are there")
    if not (like and like.kind == "encoded"):
        per_s, what = ENCODED[options.format]
        print(f"encoded: {options.format} of {per_s:,} bytes a second ({what}); --like measures shards that are there")
    print("Prepared kinds are exact, with two headers and a JSON of up to 512 bytes an item. Units: GB = 10⁹ bytes.")


def figures(kind: Kind, clips: int, seconds: float, like: Known | None, options: argparse.Namespace) -> dict[str, str]:
    """What `clips` of a kind take: bytes (a clip's with headers, padding and caption), files, and seconds; and what a file
    system must deliver a second for GPUs of each rate, in all and to a node."""
    if like and like.kind == kind:
        size = -(-clips * like.bytes // like.items)
        tars = min(clips, max(1, round(size / (options.shard_mb * 1e6))))
    else:
        clip = clip_bytes(kind, load_preset(options.preset).audio, seconds, options.format)
        tars = min(clips, max(1, round(clips * clip / (options.shard_mb * 1e6))))
        size = set_bytes(clips, tars, item_bytes(clip))
    found = {
        "a clip, in its tar": f"{round(size / clips):,} B",
        "all": amount(size),
        f"tars of about {digits(options.shard_mb)} MB": f"{tars:,}",
        f"inodes ({2 * clips:,} as single files)": f"{2 * tars + FOLDER_INODES:,}",
    }
    if options.link:
        found[f"copied at {digits(options.link)} Gbit/s in"] = duration(8 * size / (options.link * 1e9))
    found[f"written at {digits(options.disk_mb_per_s)} MB/s in"] = duration(size / (options.disk_mb_per_s * 1e6))
    for rate in options.rate:
        in_all, at = rate * options.gpus * size / clips, f"at {digits(rate)} samples/s a GPU"
        found[at] = f"{digits(rate * options.gpus)} items/s"
        found[f"{at}, bytes"] = f"{amount(in_all)}/s"
        found[f"{at}, to a node"] = f"{amount(in_all * min(options.gpus_per_node, options.gpus) / options.gpus)}/s"
    return found


def digits(value: float) -> str:
    """A number with three significant digits or more, without an exponent or zeros that say nothing."""
    decimals = max(0, 2 - math.floor(math.log10(value))) if value else 0
    text = f"{value:,.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def amount(size: float) -> str:
    """Bytes in the unit that suits, of powers of 1000."""
    power = next((k for k in range(4) if size < 1000 ** (k + 1)), 4)
    return f"{digits(size / 1000**power)} {('B', 'kB', 'MB', 'GB', 'TB')[power]}"


def duration(seconds: float) -> str:
    for unit, length in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{digits(seconds / length)} {unit}"
    return f"{digits(seconds)} s"
