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
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import torch

from clap_ds.config.arguments import whole_number
from clap_ds.config.errors import UserError, exit_code_of
from clap_ds.config.sections import ShardData
from clap_ds.config.settings import RunSettings, load_run
from clap_ds.data.batch import BatchSpec
from clap_ds.data.shards import ShardPieces

MARGIN = 1.25  # how much more than the step needs the loader should give, so that uneven clips don't make it wait


class Speed(NamedTuple):
    """What a number of workers gives: samples and MB (of encoded audio; 10⁶ bytes) per second, all of them together."""

    num_workers: int
    samples_per_s: float
    mb_per_s: float

    def __str__(self) -> str:
        number, samples, mb = self
        return f"{number:7d} {samples:10.1f} {samples / number:11.1f} {mb:8.2f} {mb / number:16.2f}"


def measure(run: RunSettings, num_workers: int, *, seconds: float, world_size: int) -> Speed:
    """Load one rank's share for some time, after a micro-batch that isn't counted; ValueError where its shards don't do."""
    assert isinstance(run.clap.data, ShardData)
    data = run.clap.data.model_copy(update={"num_workers": num_workers})
    cpu = torch.device("cpu")
    spec = BatchSpec(run.clap.preset(), run.clap.text_tokens, run.micro_batch, 0, world_size, run.clap.seed, cpu)
    with closing(ShardPieces(data, spec)) as pieces:
        if pieces.num_workers < num_workers:
            raise ValueError(f"too few shards for {num_workers} workers on each of {world_size} rank(s)")
        next(pieces)  # starts the workers
        samples, size, begun = 0, pieces.encoded_bytes, time.perf_counter()
        while (elapsed := time.perf_counter() - begun) < seconds:
            next(pieces)
            samples += run.micro_batch
        return Speed(num_workers, samples / elapsed, (pieces.encoded_bytes - size) / elapsed / 1e6)


def rate_of(run_directory: Path) -> float:
    """Samples per second of one rank in a run; UserError where its summary can't be read or has none."""
    path = run_directory / "summary.json"
    try:
        return float(json.loads(path.read_text())["samples_per_s_per_gpu"]["median"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        expected = "expected a benchmark's directory, with the median of samples_per_s_per_gpu"
        raise UserError(f"--run_directory: {path}: {expected}: {error}") from None


def verdict(speeds: list[Speed], *, needed: float, ranks_per_host: int, cores: int) -> str:
    """How many workers give `MARGIN` times the samples per second a step needs, and whether the host has cores for them."""
    more = math.ceil(MARGIN * needed * speeds[-1].num_workers / speeds[-1].samples_per_s)
    wanted = next((speed.num_workers for speed in speeds if speed.samples_per_s >= MARGIN * needed), more)
    takes = f"{wanted} worker(s) per rank"
    if wanted > speeds[-1].num_workers:
        takes = f"about {takes} (more than were measured: taken from the rate of one among the most)"
    needs = f"the step needs {needed:.1f} samples/s per rank; with a margin of {MARGIN - 1:.0%} that takes {takes}"
    in_all = wanted * ranks_per_host
    has = f"it has {cores} cores for them: {'enough' if in_all + ranks_per_host <= cores else 'NOT enough'}"
    made = f"{ranks_per_host} rank(s) on this host make {in_all} workers beside {ranks_per_host} training process(es)"
    return f"{needs}\n{made}; {has}"


def run_measurement(options: argparse.Namespace) -> None:
    run = load_run(options.deepspeed_config)
    if not isinstance(run.clap.data, ShardData):
        raise UserError(f"{run.path}: clap.data.source: expected shards, found {run.clap.data.source}")
    needed = rate_of(options.run_directory) if options.run_directory else options.needed_samples_per_s
    ranks, cores = options.ranks_per_host, len(os.sched_getaffinity(0))
    most = options.max_workers or max(1, min(16, cores // ranks))
    speeds: list[Speed] = []
    print("workers  samples/s  per worker     MB/s  MB/s per worker")
    for number in sorted({2**power for power in range(most.bit_length())} | {most}):
        try:
            speeds.append(measure(run, number, seconds=options.seconds, world_size=ranks))
        except ValueError as error:
            if not speeds:
                raise UserError(f"{run.path}: {error}") from None
            print(f"{number} workers: not measured: {error}", flush=True)
            break
        print(speeds[-1], flush=True)
    if needed is not None:
        print(verdict(speeds, needed=needed, ranks_per_host=ranks, cores=cores))
    if options.json:
        figures = {"speeds": [speed._asdict() for speed in speeds], "needed_samples_per_s": needed, "cores": cores}
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


def main(arguments: Iterable[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.loader_speed", description=__doc__, allow_abbrev=False)
    add, positive = parser.add_argument, whole_number()
    add("--deepspeed_config", type=Path, required=True, metavar="FILE", help="a run's JSON whose data are shards")
    add("--max_workers", type=positive, metavar="N", help="most workers to try (default: cores per rank, at most 16)")
    add("--seconds", type=float, default=10.0, metavar="S", help="per number of workers (default 10)")
    add("--ranks_per_host", type=positive, default=1, metavar="R", help="(default 1)")
    add("--json", type=Path, metavar="FILE", help="write the figures there, too")
    rate = parser.add_mutually_exclusive_group()
    rate.add_argument("--needed_samples_per_s", type=float, metavar="X", help="that one rank's step needs")
    rate.add_argument("--run_directory", type=Path, metavar="DIR", help="of a benchmark, for the rate it reached")
    options = parser.parse_args(None if arguments is None else list(arguments))
    return exit_code_of(lambda: run_measurement(options), (UserError,))


if __name__ == "__main__":
    sys.exit(main())
