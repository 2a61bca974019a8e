"""Command: clips a second of the loader with one worker process, of every format and kind, in turns.

    python -m benchmarks.loader --output results/cpu/loader/NAME.md

Through the whole loader with shuffling to batches, as `clap-shards measure` does it. The clips are sounds this project makes:
10 s, every second in stereo, made once under runs/loader. To compare with other code, run it from that checkout in turns with
this one.
"""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import in_turns, make_parser, show, table
from clap_ds.config.arguments import whole_number
from clap_ds.config.errors import run_alone
from clap_ds.config.model import load_preset
from clap_ds.config.places import PACKAGE, work_folder
from clap_ds.config.sections import ShardData
from clap_ds.data.batch import BatchSpec
from clap_ds.data.loader_speed import Speed, measure
from clap_ds.data.shard_list import expand_shards
from clap_ds.data.supply import MARGIN
from clap_ds.record.hardware import device_name
from clap_ds.record.statistics import median_interval

SETS = {
    "WAV": ("wav", 48000), "FLAC": ("flac", 48000), "MP3": ("mp3", 48000), "Ogg Vorbis": ("ogg", 48000),
    "FLAC of 44.1 kHz": ("flac", 44100),
}  # fmt: skip
PREPARED = {"prepared waveforms": "waveform", "prepared features": "mel"}
NEEDED = 3300
"""Clips a second that a quick GPU takes."""
PRESET = "htsat_tiny_roberta_base"
COLUMNS = (
    "clips {name} | KB a clip {kb:,.0f} | clips/s of a worker {per_s:,.0f} | interval {low:,.0f}–{high:,.0f}"
    f" | workers a GPU at {NEEDED:,}/s {{workers:.1f}}"
)


def make_sets(folder: Path, clips: int) -> dict[str, Path]:
    """The shards of every format and kind, made unless they are there."""
    found = {name: folder / name.replace(" ", "_") for name in (*SETS, *PREPARED)}
    for name, (extension, rate) in SETS.items():
        if not (found[name] / "tokenizer").exists():
            sounds = ["examples.synthetic_sounds", found[name], "--clips", clips, "--shards", 4, "--seconds", 10]
            _python(*sounds, "--format", extension, "--sample_rate", rate)
    for name, kind in PREPARED.items():
        if not (found[name] / "manifest.json").exists():
            _python(
                "clap_ds.shards", "prepare", found["WAV"] / "*.tar", found[name], "--kind", kind, "--preset", PRESET
            )
    return found


def _python(*words: Any) -> None:
    command = [sys.executable, "-m", *map(str, words)]
    subprocess.run(command, cwd=PACKAGE.parent, check=True, stdout=subprocess.DEVNULL)


def row(name: str, speeds: list[Speed]) -> dict[str, Any]:
    """Of one set, what its rounds gave: medians, and the interval of the rate's."""
    rate = median_interval([speed.supply.samples_per_s for speed in speeds])
    kb = median_interval([1000 * speed.mb_per_s / speed.supply.samples_per_s for speed in speeds]).median
    figures = {"per_s": rate.median, "low": rate.low, "high": rate.high, "workers": MARGIN * NEEDED / rate.median}
    return {"name": name, "kb": kb, **figures}


def main(argv: list[str] | None = None) -> None:
    parser = make_parser("loader", __doc__)
    parser.add_argument("--micro_batch", type=whole_number(), default=64)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement")
    parser.add_argument("--rounds", type=whole_number(), default=7)
    options = parser.parse_args(argv)
    sets = make_sets(work_folder() / "runs" / "loader", clips=256)
    spec = BatchSpec(load_preset(PRESET), 77, options.micro_batch, 0, 1, 0, torch.device("cpu"))
    actions = {}
    for name, folder in sets.items():
        shards = expand_shards([str(folder / "*.tar")])
        data = ShardData(source="shards", shards=shards, tokenizer=str(sets["WAV"] / "tokenizer"), num_workers=1)
        actions[name] = partial(measure, shards, data, spec, options.seconds)
    rows = [row(name, speeds) for name, speeds in in_turns(actions, options.rounds, warm_up=1).items()]
    show(options.output, f"# Loading on {device_name(torch.device('cpu'))}\n\n{table(COLUMNS, rows)}", {"rates": rows})


if __name__ == "__main__":
    run_alone(main)
