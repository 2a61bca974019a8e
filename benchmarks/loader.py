"""Command: what the loader gives, of every format and kind, and what it takes of a host.

    python -m benchmarks.loader --before OTHER_CHECKOUT --output results/cpu/loader/NAME.md
    python -m benchmarks.loader --only leak --clips 200000

`rates`: clips per second, through the whole loader with shuffling to batches, of one core (all in one process bound to it),
with `--before` by another checkout's code as well, and of one worker process; all in turns. `leak`: memory and open descriptors
of a long run. The clips are sounds this project makes: 10 s, every second in stereo, made once under runs/loader.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import in_turns, make_parser, show, table
from clap_ds.config.arguments import whole_number
from clap_ds.config.errors import run_alone
from clap_ds.config.places import PACKAGE, work_folder
from clap_ds.data import shard_size
from clap_ds.data.supply import MARGIN
from clap_ds.record.hardware import device_name
from clap_ds.record.statistics import median_interval

CONFIG = PACKAGE.parent / "ds_configs" / "htsat_tiny_shards_cpu.json"
SETS = {
    "WAV": ("wav", 48000), "FLAC": ("flac", 48000), "MP3": ("mp3", 48000), "Ogg Vorbis": ("ogg", 48000),
    "FLAC of 44.1 kHz": ("flac", 44100),
}  # fmt: skip
PREPARED = {"prepared waveforms": "waveform", "prepared features": "mel"}
NEEDED = tuple(map(int, shard_size.RATES))
PRESET = ("--preset", "htsat_tiny_roberta_base")
RATES = (
    "clips {name} | KB a clip {kb:,.0f} | clips/s, before {before:,.0f} | clips/s, now {now:,.0f} | × {ratio:.2f}"
    " | interval {low:.2f}–{high:.2f} | MB/s {mb_per_s:,.0f} | clips/s of a worker {worker:,.0f}"
) + "".join(f" | cores a GPU at {rate:,}/s {{cores_{rate}}}" for rate in NEEDED)
LEAK = "of {name} | clips {clips:,} | MB {memory_mb:,.0f} | descriptors {descriptors}"


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
    """A process of `loader_child.py`."""

    def __init__(self, checkout: Path, config: Path, workers: int, core: int | None = None) -> None:
        script = Path(__file__).with_name("loader_child.py")
        command = [sys.executable, str(script), str(checkout), str(config), str(workers)]
        pin = None if core is None else lambda: os.sched_setaffinity(0, {core})
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, preexec_fn=pin
        )
        self._wait("ready")

    def _wait(self, start: str) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(start):
                return line
        raise RuntimeError(f"a child ended with code {self._process.wait()}")

    def __call__(self, seconds: float) -> dict[str, float]:
        assert self._process.stdin is not None
        print(seconds, file=self._process.stdin, flush=True)
        answer: dict[str, float] = json.loads(self._wait("{"))
        return answer

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


@contextmanager
def children(**given: tuple[Any, ...]) -> Iterator[dict[str, Child]]:
    """A child of each of these arguments."""
    with ExitStack() as stack:
        started = {name: Child(*arguments) for name, arguments in given.items()}
        for child in started.values():
            stack.callback(child.close)
        yield started


def rates(options: Namespace, sets: dict[str, Path], folder: Path) -> list[dict[str, Any]]:
    rows, core = [], max(os.sched_getaffinity(0))
    for name, tars in sets.items():
        config = write_config(folder, tars, sets["WAV"] / "tokenizer", options.micro_batch)
        given: dict[str, tuple[Any, ...]] = {
            "now": (PACKAGE.parent, config, 0, core),
            "worker": (PACKAGE.parent, config, 1),
        }
        if options.before and name in SETS:
            given["before"] = (options.before.resolve(), config, 0, core)
        with children(**given) as started:
            actions = {which: partial(child, options.seconds) for which, child in started.items()}
            found = in_turns(actions, options.rounds, warm_up=1)
        speeds = {which: [each["per_s"] for each in results] for which, results in found.items()}
        now = median_interval(speeds["now"]).median
        mb = median_interval([each["mb_per_s"] for each in found["now"]]).median
        worker = median_interval(speeds["worker"]).median
        row: dict[str, Any] = {"name": name, "now": now, "mb_per_s": mb, "kb": 1000 * mb / now, "worker": worker}
        if "before" in speeds:
            ratio = median_interval([b / a for a, b in zip(speeds["before"], speeds["now"], strict=True)])
            row |= {"before": median_interval(speeds["before"]).median, "ratio": ratio.median}
            row |= {"low": ratio.low, "high": ratio.high}
        rows.append(row | {f"cores_{rate}": f"{MARGIN * rate / worker:.1f}" for rate in NEEDED})
        print(table(RATES, rows[-1:]), flush=True)
    return rows


def leak(options: Namespace, sets: dict[str, Path], folder: Path) -> list[dict[str, Any]]:
    """Half of the clips as they are in tars of WAV, half prepared features, by one worker each."""
    rows = []
    for name in ("WAV", "prepared features"):
        config = write_config(folder, sets[name], sets["WAV"] / "tokenizer", options.micro_batch)
        with children(child=(PACKAGE.parent, config, 1)) as started:
            done = 0
            while done < options.clips // 2:
                found = started["child"](options.seconds)
                done += int(found["done"])
                rows.append({"name": name, "clips": done, **found})
    return rows


def main(argv: list[str] | None = None) -> None:
    parser = make_parser("loader", __doc__)
    parser.add_argument("--only", nargs="+", choices=("rates", "leak"), default=["rates"])
    parser.add_argument("--before", type=Path, metavar="CHECKOUT", help="of this project, to compare with")
    parser.add_argument("--micro_batch", type=whole_number(), default=64)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement")
    parser.add_argument("--rounds", type=whole_number(), default=7)
    parser.add_argument("--clips", type=whole_number(), default=200_000, help="of the leak's run")
    options = parser.parse_args(argv)
    folder = work_folder() / "runs" / "loader"
    sets, cpu = make_sets(folder, clips=256), torch.device("cpu")
    parts, figures = [f"# Loading on {device_name(cpu)}"], {}
    if "rates" in options.only:
        figures["rates"] = rates(options, sets, folder)
        parts.append(table(RATES, figures["rates"]))
    if "leak" in options.only:
        figures["leak"] = leak(options, sets, folder)
        parts.append(table(LEAK, figures["leak"]))
    show(options.output, "\n\n".join(parts), figures)


if __name__ == "__main__":
    run_alone(main)
