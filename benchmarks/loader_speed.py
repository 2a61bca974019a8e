"""Command: how fast the shards can be read and decoded, on their own, and how many workers a run's step needs.

    python -m benchmarks.loader_speed --deepspeed_config my_run.json --needed_samples_per_s 620

Takes the data section of a run's JSON and loads one rank's share of it with ever more workers, without a model. The rate needed
is given per rank, or taken from the directory of a benchmark on synthetic data (`--run_directory`).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from clap_ds.config.errors import USER_ERROR, UserError
from clap_ds.config.sections import ShardData
from clap_ds.config.settings import RunSettings, load_run
from clap_ds.data.shards import ShardPieces

MARGIN = 1.25
"""How much more than the step needs the loader should give, so that uneven clips don't make it wait."""


@dataclass(frozen=True)
class Speed:
    """What a number of workers gives: samples and MB (of encoded audio; 10⁶ bytes) per second, all of them together."""

    num_workers: int
    samples_per_s: float
    mb_per_s: float

    @property
    def per_worker(self) -> float:
        return self.samples_per_s / self.num_workers


def measure(run: RunSettings, num_workers: int, *, seconds: float, world_size: int) -> Speed:
    """Load one rank's share for some time, after a micro-batch that isn't counted.

    Raises:
        ValueError: shards or tokenizer can't be used, or there are too few shards for so many workers.
    """
    data = run.clap.data
    assert isinstance(data, ShardData)
    pieces = ShardPieces(
        data.model_copy(update={"num_workers": num_workers}),
        model=run.clap.preset(),
        text_tokens=run.clap.text_tokens,
        micro_batch=run.micro_batch,
        rank=0,
        world_size=world_size,
        seed=run.clap.seed,
        pin=False,
    )
    try:
        used = pieces.statistics()["num_workers"]
        if used < num_workers:
            raise ValueError(f"too few shards for {num_workers} workers on each of {world_size} rank(s)")
        next(pieces)  # starts the workers
        samples, size, begun = 0, pieces.encoded_bytes, time.perf_counter()
        while (elapsed := time.perf_counter() - begun) < seconds:
            next(pieces)
            samples += run.micro_batch
        elapsed = time.perf_counter() - begun
        return Speed(num_workers, samples / elapsed, (pieces.encoded_bytes - size) / elapsed / 1e6)
    finally:
        pieces.close()


def needed_workers(speeds: list[Speed], needed: float) -> int:
    """Workers per rank that give `MARGIN` times the samples per second needed.

    The fewest measured to do so; beyond what was measured, by the rate of one worker among the most.
    """
    for speed in speeds:
        if speed.samples_per_s >= MARGIN * needed:
            return speed.num_workers
    return math.ceil(MARGIN * needed / speeds[-1].per_worker)


def rate_of(run_directory: Path) -> float:
    """Samples per second of one rank in a run.

    Raises:
        UserError: no summary there, or no rate in it.
    """
    path = run_directory / "summary.json"
    try:
        summary: dict[str, Any] = json.loads(path.read_text())
        return float(summary["samples_per_s_per_gpu"]["median"])
    except OSError as error:
        raise UserError(f"--run_directory: {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise UserError(
            f"--run_directory: {path} has no samples_per_s_per_gpu: expected the directory of a benchmark (clap_ds/bench.py)"
        ) from None


def report(speeds: list[Speed], *, needed: float | None, ranks_per_host: int, cores: int) -> list[str]:
    """What the measurement says, in lines for people."""
    lines = ["workers  samples/s  per worker     MB/s  MB/s per worker"]
    lines += [
        f"{speed.num_workers:7d} {speed.samples_per_s:10.1f} {speed.per_worker:11.1f} {speed.mb_per_s:8.2f}"
        f" {speed.mb_per_s / speed.num_workers:16.2f}"
        for speed in speeds
    ]
    if needed is None:
        return lines
    wanted = needed_workers(speeds, needed)
    is_guess = wanted > speeds[-1].num_workers
    lines.append(
        f"the step needs {needed:.1f} samples/s per rank; with a margin of {MARGIN - 1:.0%} that takes"
        f" {'about ' if is_guess else ''}{wanted} worker(s) per rank"
        + (" (more than were measured: taken from the rate of one among the most)" if is_guess else "")
    )
    in_all = wanted * ranks_per_host
    verdict = "enough" if in_all + ranks_per_host <= cores else "NOT enough"
    lines.append(
        f"{ranks_per_host} rank(s) on this host make {in_all} workers beside {ranks_per_host} training process(es); it has"
        f" {cores} cores for them: {verdict}"
    )
    return lines


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m clap_ds.data.shards", description=(__doc__ or "").splitlines()[0], allow_abbrev=False
    )
    parser.add_argument("--measure", action="store_true", required=True, help="measure the loader's speed")
    parser.add_argument(
        "--deepspeed_config", type=Path, required=True, metavar="FILE", help="a run's JSON whose data are shards"
    )
    parser.add_argument(
        "--max_workers",
        type=_at_least_one,
        metavar="N",
        help="most workers to try (default: cores per rank, at most 16)",
    )
    parser.add_argument("--seconds", type=float, default=10.0, metavar="S", help="per number of workers (default 10)")
    parser.add_argument("--ranks_per_host", type=_at_least_one, default=1, metavar="R", help="(default 1)")
    rate = parser.add_mutually_exclusive_group()
    rate.add_argument("--needed_samples_per_s", type=float, metavar="X", help="that one rank's step needs")
    rate.add_argument("--run_directory", type=Path, metavar="DIR", help="of a benchmark, for the rate it reached")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, too")
    return parser


def _at_least_one(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"expected a whole number above 0, found {text!r}")
    return int(text)


def run_measurement(options: argparse.Namespace) -> None:
    """The command after its arguments are parsed.

    Raises:
        UserError: what it was given can't be measured.
    """
    run = load_run(options.deepspeed_config)
    if not isinstance(run.clap.data, ShardData):
        raise UserError(f"{run.path}: clap.data.source: expected shards, found {run.clap.data.source}")
    needed = options.needed_samples_per_s
    if options.run_directory:
        needed = rate_of(options.run_directory)
    cores = len(os.sched_getaffinity(0))
    most = options.max_workers or max(1, min(16, cores // options.ranks_per_host))
    numbers = sorted({2**power for power in range(most.bit_length()) if 2**power <= most} | {most})
    speeds: list[Speed] = []
    for number in numbers:
        try:
            speeds.append(measure(run, number, seconds=options.seconds, world_size=options.ranks_per_host))
        except ValueError as error:
            if not speeds:
                raise UserError(f"{run.path}: {error}") from None
            print(f"{number} workers: not measured: {error}", flush=True)
            break
        print(f"{number} worker(s): {speeds[-1].samples_per_s:.1f} samples/s", flush=True)
    print("\n".join(report(speeds, needed=needed, ranks_per_host=options.ranks_per_host, cores=cores)))
    if options.json:
        figures = {"speeds": [asdict(speed) for speed in speeds], "needed_samples_per_s": needed, "cores": cores}
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


def main(arguments: Iterable[str] | None = None) -> int:
    """Returns the exit code."""
    options = _parser().parse_args(None if arguments is None else list(arguments))
    try:
        run_measurement(options)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return USER_ERROR
    return 0


if __name__ == "__main__":
    sys.exit(main())
