"""Estimate disk space, copy time and read rate of shards, before building any.

Examples:
    clap-ds shards size --clips 1000000 --seconds 10 --link 100
    clap-ds shards size --clips 1000000 --gpus 64 --samples_per_s 3341
"""

from __future__ import annotations

import argparse
import math
import tarfile

import pandas

from clap_ds.config.arguments import add_preset, number, whole_number
from clap_ds.config.model import AudioConfig, load_preset
from clap_ds.data.shard_io import KINDS, Kind

ENCODED = {"flac": 105_600, "wav": 192_000, "mp3": 16_000, "ogg": 14_000}
"""Typical bytes per second: 48 kHz 16-bit stereo (FLAC: 55% of WAV), MP3 at 128 and Ogg at 112 kbit/s."""
RATES = (624.0, 3300.0, 4500.0)
"""Samples per second per GPU: the published throughput, and this project's goals for an H200."""
WAV_HEADER, NPY_HEADER, TAR_BYTES = 44, 128, 500e6


def clip_bytes(kind: Kind, audio: AudioConfig, seconds: float, encoded: str = "flac") -> int:
    """Return the bytes of a clip's file: 16-bit mono WAV, float16 features of at least the model's length, or encoded."""
    samples = round(seconds * audio.sample_rate)
    if kind == "encoded":
        return math.ceil(seconds * ENCODED[encoded])
    if kind == "waveform":
        return WAV_HEADER + 2 * samples
    frames = max(samples, audio.num_samples) // audio.hop_size + 1
    return NPY_HEADER + 2 * frames * audio.mel_bins


def item_bytes(clip: int) -> int:
    """Return the bytes of an item in a tar: a clip and up to 512 bytes of JSON, each with a header and padding."""
    block = tarfile.BLOCKSIZE
    return block + math.ceil(clip / block) * block + 2 * block


def add_size_options(parser: argparse.ArgumentParser) -> None:
    add, rate, count = parser.add_argument, number(0.001, 1e9), whole_number(1, 10**7)
    add("--clips", type=whole_number(1, 10**15), required=True, metavar="N", help="set the number of clips")
    add("--seconds", type=number(0.001, 40_000), default=10.0, metavar="S", help="set the length of a clip in seconds")
    add_preset(parser, "estimate for this model", default="htsat_tiny_roberta_base")
    rates = ", ".join(f"{name} {rate:,}" for name, rate in ENCODED.items())
    add("--format", choices=ENCODED, default="flac", help=f"set the format of encoded clips; bytes/s: {rates}")
    add(
        "--link",
        type=rate,
        metavar="GBIT",
        help="also estimate the time of a copy over a link of this bandwidth, in Gbit/s",
    )
    opened = "set the files per second that storage can create, which limits the copy of small files"
    add("--files_per_s", type=rate, default=1000.0, metavar="N", help=opened)
    add("--samples_per_s", type=rate, nargs="+", default=RATES, metavar="R", help="read at these samples/s per GPU")
    add("--gpus", type=count, default=4, metavar="N", help="set the total number of GPUs")
    add("--gpus_per_node", type=count, default=4, metavar="N", help="set GPUs per node")


def run_size(options: argparse.Namespace) -> None:
    print(pandas.DataFrame({kind: figures(kind, options) for kind in KINDS}).to_string())
    print(f"\nRates are for {options.gpus:,} GPU(s), {options.gpus_per_node} per node, with nothing cached in memory.")


def figures(kind: Kind, options: argparse.Namespace) -> dict[str, str]:
    """Compute a kind's bytes, files and copy time, and the rates that a file system must deliver to GPUs."""
    clips, gpus = options.clips, options.gpus
    clip = clip_bytes(kind, load_preset(options.preset).audio, options.seconds, options.format)
    tars = min(clips, max(1, round(clips * clip / TAR_BYTES)))
    size = clips * item_bytes(clip) + tars * tarfile.RECORDSIZE  # upper bound: tar padding
    found = {"per clip, in its tar": f"{round(size / clips):,} B", "total": f"{digits(size / 1e9)} GB"}
    found["tars of about 500 MB"] = f"{tars:,}"
    if options.link:
        for label, files in ("copied", tars), ("copied as single files", clips):
            seconds = max(8 * size / (options.link * 1e9), files / options.files_per_s)
            found[f"{label} at {digits(options.link)} Gbit/s in"] = f"{digits(seconds / 3600)} h"
    for rate in options.samples_per_s:
        for where, number_of in ("total", gpus), ("per node", min(options.gpus_per_node, gpus)):
            found[f"at {digits(rate)} samples/s per GPU, {where}"] = (
                f"{digits(rate * number_of * size / clips / 1e9)} GB/s"
            )
    return found


def digits(value: float) -> str:
    """Format a number with three or more significant digits, without an exponent."""
    return f"{value:.3g}" if 1e-4 < value < 99.95 else f"{value:,.0f}"
