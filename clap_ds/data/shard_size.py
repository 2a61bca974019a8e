"""`clap-shards size`: what shards take of disks, links and file systems, before any is made. Without torch."""

from __future__ import annotations

import argparse
import math
import tarfile

from clap_ds.config.arguments import number, whole_number
from clap_ds.config.model import AudioConfig, load_preset, preset_argument
from clap_ds.data.front_end import KINDS, Kind

ENCODED = {"flac": 105_600, "wav": 192_000, "mp3": 16_000, "ogg": 14_000}
"""Bytes that a second typically takes: of 48 kHz stereo in 16 bits (FLAC 55 % of it), at 128 and 112 kbit/s."""
RATES = (624.0, 3300.0, 4500.0)
"""Samples per second of one GPU: the published rate, and this project's goals for one H200."""
WAV_HEADER, NPY_HEADER = 44, 128


def clip_bytes(kind: Kind, audio: AudioConfig, seconds: float, encoded: str = "flac") -> int:
    """Count bytes of a clip's file: a 16-bit mono WAV, features in float16 of the model's length at least, or encoded."""
    samples = round(seconds * audio.sample_rate)
    if kind == "encoded":
        return math.ceil(seconds * ENCODED[encoded])
    if kind == "waveform":
        return WAV_HEADER + 2 * samples
    frames = max(samples, audio.num_samples) // audio.hop_size + 1
    return NPY_HEADER + 2 * frames * audio.mel_bins


def item_bytes(clip: int) -> int:
    """Count bytes of an item in a tar: a clip and up to 512 bytes of JSON, each after a header and in whole blocks."""
    block = tarfile.BLOCKSIZE
    return block + math.ceil(clip / block) * block + 2 * block


def add_size_options(parser: argparse.ArgumentParser) -> None:
    add, rate, count = parser.add_argument, number(0.001, 1e9), whole_number(1, 10**7)
    add("--clips", type=whole_number(1, 10**15), required=True, metavar="N", help="how many there are")
    length = "length of a clip in seconds (default 10)"
    add("--seconds", type=number(0.001, 40_000), default=10.0, metavar="S", help=length)
    tiny = "htsat_tiny_roberta_base"
    add("--preset", type=preset_argument, default=tiny, metavar="NAME", help=f"model they are for (default {tiny})")
    rates = ", ".join(f"{name} {rate:,}" for name, rate in ENCODED.items())
    add("--format", choices=ENCODED, default="flac", help=f"of encoded clips; bytes a second: {rates} (default flac)")
    add("--shard_mb", type=rate, default=500.0, metavar="MB", help="size of a tar, about (default 500)")
    add("--link", type=rate, metavar="GBIT", help="Gbit/s of the link to copy them over")
    add("--disk_mb_per_s", type=rate, default=1000.0, metavar="MB", help="at which they are written (default 1000)")
    add("--rate", type=rate, nargs="+", default=RATES, metavar="R", help="samples/s of one GPU (624 3300 4500)")
    add("--gpus", type=count, default=4, metavar="N", help="in all (default 4)")
    add("--gpus_per_node", type=count, default=4, metavar="N", help="(default 4)")


def run_size(options: argparse.Namespace) -> None:
    kinds = {kind: figures(kind, options) for kind in KINDS}
    rows = [(f"{options.clips:,} clips of {digits(options.seconds)} s", *kinds)]
    rows += [(label, *(found[label] for found in kinds.values())) for label in kinds["encoded"]]
    width = max(len(label) for label, *_ in rows)
    print("\n".join(label.ljust(width) + "".join(f"{cell:>18}" for cell in cells) for label, *cells in rows))
    print(f"\nRates are for {options.gpus:,} GPU(s), {options.gpus_per_node} on a node, with no item in memory.")
    print(f"encoded: {options.format}, {ENCODED[options.format]:,} bytes a second. GB = 10⁹ bytes.")


def figures(kind: Kind, options: argparse.Namespace) -> dict[str, str]:
    """Work out what the clips take as a kind: bytes, files and seconds; and what a file system must deliver to GPUs."""
    clips, gpus = options.clips, options.gpus
    clip = clip_bytes(kind, load_preset(options.preset).audio, options.seconds, options.format)
    tars = min(clips, max(1, round(clips * clip / (options.shard_mb * 1e6))))
    size = clips * item_bytes(clip) + tars * tarfile.RECORDSIZE  # at most, of a tar's end
    found = {
        "a clip, in its tar": f"{round(size / clips):,} B",
        "all": amount(size),
        f"tars of about {digits(options.shard_mb)} MB": f"{tars:,}",
    }
    if options.link:
        found[f"copied at {digits(options.link)} Gbit/s in"] = duration(8 * size / (options.link * 1e9))
    found[f"written at {digits(options.disk_mb_per_s)} MB/s in"] = duration(size / (options.disk_mb_per_s * 1e6))
    for rate in options.rate:
        in_all, at = rate * gpus * size / clips, f"at {digits(rate)} samples/s a GPU"
        to_node = in_all * min(options.gpus_per_node, gpus) / gpus
        found[f"{at}, bytes"] = f"{amount(in_all)}/s"
        found[f"{at}, to a node"] = f"{amount(to_node)}/s"
    return found


def digits(value: float) -> str:
    """Write a number with three significant digits or more, without an exponent."""
    return f"{value:.3g}" if 1e-4 < value < 99.95 else f"{value:,.0f}"


def amount(size: float) -> str:
    """Write bytes in the unit that suits, of powers of 1000."""
    power = next((k for k in range(4) if size < 1000 ** (k + 1)), 4)
    return f"{digits(size / 1000**power)} {('B', 'kB', 'MB', 'GB', 'TB')[power]}"


def duration(seconds: float) -> str:
    for unit, length in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{digits(seconds / length)} {unit}"
    return f"{digits(seconds)} s"
