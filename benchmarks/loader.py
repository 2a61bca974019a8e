"""Command: clips a second of the loader, of every format and kind.

    python -m benchmarks.loader --before OTHER_CHECKOUT --output results/cpu/loader/NAME.md

Through the whole loader with shuffling to batches, of one core (all in one process bound to it), with `--before` by another
checkout's code as well, and of one worker process; all in turns. The clips are sounds this project makes: 10 s, every second in
stereo, made once under runs/loader.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import in_turns, make_parser, show, table
from clap_ds.config.arguments import whole_number
from clap_ds.config.errors import run_alone
from clap_ds.config.places import PACKAGE, work_folder
from clap_ds.data.supply import MARGIN
from clap_ds.record.hardware import device_name
from clap_ds.record.statistics import median_interval

CONFIG = PACKAGE.parent / "ds_configs" / "htsat_tiny_shards_cpu.json"
SETS = {
    "WAV": ("wav", 48000), "FLAC": ("flac", 48000), "MP3": ("mp3", 48000), "Ogg Vorbis": ("ogg", 48000),
    "FLAC of 44.1 kHz": ("flac", 44100),
}  # fmt: skip
PREPARED = {"prepared waveforms": "waveform", "prepared features": "mel"}
NEEDED = 3300
"""Clips a second that a quick GPU takes."""
PRESET = ("--preset", "htsat_tiny_roberta_base")
RATES = (
    "clips {name} | KB a clip {kb:,.0f} | clips/s, before {before:,.0f} | clips/s, now {now:,.0f} | × {ratio:.2f}"
    " | interval {low:.2f}–{high:.2f} | clips/s of a worker {worker:,.0f}"
    f" | workers a GPU at {NEEDED:,}/s {{workers:.1f}}"
)


def make_sets(folder: Path, clips: int) -> dict[str, Path]:
    """The shards of every format and kind, made unless they are there."""
    found = {name: folder / name.replace(" ", "_") for name in (*SETS, *PREPARED)}
    for name, (extension, rate) in SETS.items():
        if not (found[name] / "tokenizer").exists():
            sounds = ["examples.synthetic_sounds", str(found[name]), "--clips", clips, "--shards", 4, "--seconds", 10]
            _python("-m", *sounds, "--format", extension, "--sample_rate", rate)
    for name, kind in PREPARED.items():
        if not (found[name] / "manifest.json").exists():
            _python("-m", "clap_ds.shards", "prepare", found["WAV"] / "*.tar", found[name], "--kind", kind, *PRESET)
    return found


def _python(*arguments: Any) -> None:
    subprocess.run([sys.executable, *map(str, arguments)], cwd=PACKAGE.parent, check=True, stdout=subprocess.DEVNULL)


def write_config(folder: Path, tars: Path, tokenizer: Path, micro_batch: int) -> Path:
    """A run that reads these tars."""
    content = json.loads(CONFIG.read_text()) | {"train_micro_batch_size_per_gpu": micro_batch}
    content["clap"]["data"] |= {"shards": str(tars / "*.tar"), "tokenizer": str(tokenizer), "shuffle_buffer": 64}
    path = folder / f"{tars.name}.json"
    path.write_text(json.dumps(content))
    return path


class Child:
    """A process of `loader_child.py`; called with seconds, it loads for so long and says how much. Close it at the end."""

    def __init__(self, checkout: Path, config: Path, workers: int, core: int | None = None) -> None:
        script = Path(__file__).with_name("loader_child.py")
        self._process = subprocess.Popen(
            [sys.executable, str(script), str(checkout), str(config), str(workers)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"},
            preexec_fn=None if core is None else lambda: os.sched_setaffinity(0, {core}),
        )
        self._line("ready")

    def _line(self, start: str) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(start):
                return line
        raise RuntimeError(f"a child ended with code {self._process.wait()}")

    def __call__(self, seconds: float) -> dict[str, float]:
        assert self._process.stdin is not None
        print(seconds, file=self._process.stdin, flush=True)
        answer: dict[str, float] = json.loads(self._line("{"))
        return answer

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def measure(name: str, config: Path, before: Path | None, seconds: float, rounds: int) -> dict[str, Any]:
    """A row of the table: this checkout's rate on one core and with one worker, and the one `before`'s on that core."""
    here, core = PACKAGE.parent, max(os.sched_getaffinity(0))
    with closing(Child(here, config, 0, core)) as now, closing(Child(here, config, 1)) as worker, ExitStack() as stack:
        actions: dict[str, Callable[[], dict[str, float]]] = {
            "now": partial(now, seconds),
            "worker": partial(worker, seconds),
        }
        if before:
            actions["before"] = partial(stack.enter_context(closing(Child(before, config, 0, core))), seconds)
        found = in_turns(actions, rounds, warm_up=1)
    speeds = {which: [each["per_s"] for each in results] for which, results in found.items()}
    row: dict[str, Any] = {which: median_interval(each).median for which, each in speeds.items()}
    if before:
        ratio = median_interval([b / a for a, b in zip(speeds["before"], speeds["now"], strict=True)])
        row |= {"ratio": ratio.median, "low": ratio.low, "high": ratio.high}
    kb = 1000 * median_interval([each["mb_per_s"] / each["per_s"] for each in found["now"]]).median
    return {"name": name, "kb": kb, **row, "workers": MARGIN * NEEDED / row["worker"]}


def main(argv: list[str] | None = None) -> None:
    parser = make_parser("loader", __doc__)
    parser.add_argument("--before", type=Path, metavar="CHECKOUT", help="of this project, to compare with")
    parser.add_argument("--micro_batch", type=whole_number(), default=64)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement")
    parser.add_argument("--rounds", type=whole_number(), default=7)
    options = parser.parse_args(argv)
    folder = work_folder() / "runs" / "loader"
    sets, rows = make_sets(folder, clips=256), []
    for name, tars in sets.items():
        config = write_config(folder, tars, sets["WAV"] / "tokenizer", options.micro_batch)
        before = options.before.resolve() if options.before and name in SETS else None
        rows.append(measure(name, config, before, options.seconds, options.rounds))
        text = f"# Loading on {device_name(torch.device('cpu'))}\n\n{table(RATES, rows)}"
        show(options.output, text, {"rates": rows})


if __name__ == "__main__":
    run_alone(main)
