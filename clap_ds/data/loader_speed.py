"""`clap-shards measure`: how fast shards can be read and decoded, on their own, and how many workers a run's step needs.

Loads one rank's share with ever more workers, as a run does, without a model; beside it, what the file system gives when
nothing is decoded and nothing is in memory.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import NamedTuple

import torch

from clap_ds.config.arguments import number, whole_number
from clap_ds.config.errors import UserError
from clap_ds.config.model import load_preset, preset_argument
from clap_ds.config.sections import ShardData
from clap_ds.data.batch import BatchSpec
from clap_ds.data.shard_files import is_remote
from clap_ds.data.shard_list import expand_shards, tokenizer_beside
from clap_ds.data.shard_size import RATES
from clap_ds.data.shards import ShardPieces
from clap_ds.data.supply import MARGIN, Supply, verdict

_TEXT_TOKENS = 77
_MOST_BYTES, _MOST_FILES, _CHUNK_BYTES = 2e9, 64, 2**22
HEADING = "workers  samples/s  per worker    MB/s of clips   file system, cold"


class Speed(NamedTuple):
    """What a number of workers gives together: clips and MB (10⁶ bytes) of their files per second; and the MB per second that
    the file system gives to as many readers, None where shards are remote."""

    supply: Supply
    mb_per_s: float
    cold_mb_per_s: float | None = None


def measure(shards: list[str], data: ShardData, spec: BatchSpec, seconds: float) -> Speed:
    """Load one rank's share for some time, after a micro-batch that isn't counted, and read the files for as long.
    ValueError where shards don't do."""
    files = shards[:: -(-len(shards) // _MOST_FILES)]
    cold = None if any(map(is_remote, shards)) else read_files(files, data.num_workers, seconds)
    with closing(ShardPieces(data, spec)) as pieces:
        next(pieces)  # starts the workers
        samples, size, begun = 0, pieces.encoded_bytes, time.perf_counter()
        while (elapsed := time.perf_counter() - begun) < seconds:
            next(pieces)
            samples += spec.micro_batch
        supply = Supply(samples / elapsed, data.num_workers, pieces.kind, pieces.prepared)
        return Speed(supply, (pieces.encoded_bytes - size) / elapsed / 1e6, cold)


def read_files(paths: Sequence[str], num_readers: int, seconds: float) -> float:
    """MB (10⁶ bytes) per second of the beginnings of files, after the kernel was told to forget their pages."""
    for path in paths:
        with open(path, "rb") as file:
            os.fsync(file.fileno())  # what isn't on the disk yet would stay
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    begun, most = time.perf_counter(), _MOST_BYTES / len(paths)

    def read(path: str) -> int:
        buffer, done = bytearray(_CHUNK_BYTES), 0
        with open(path, "rb", buffering=0) as file:
            while done < most and time.perf_counter() < begun + seconds and (count := file.readinto(buffer)):
                done += count
        return done

    with ThreadPoolExecutor(num_readers) as threads:
        size = sum(threads.map(read, paths))
    return size / (time.perf_counter() - begun) / 1e6


def workers_needed(speeds: Sequence[Speed], needed: float) -> int:
    """How many workers give `MARGIN` times the samples per second that are needed; of more than were measured, each is taken to
    give what one among the most gave."""
    enough = (speed.supply.num_workers for speed in speeds if speed.supply.samples_per_s >= MARGIN * needed)
    return next(enough, speeds[-1].supply.workers_for(needed))


def row(speed: Speed) -> str:
    """One line under `HEADING`."""
    (samples, workers, *_), mb, cold = speed
    files = "–" if cold is None else f"{cold:.1f} MB/s"
    return f"{workers:7d} {samples:10.1f} {samples / workers:11.1f} {mb:16.2f} {files:>19}"


def add_measure_options(parser: argparse.ArgumentParser) -> None:
    add, positive, tiny = parser.add_argument, whole_number(), "htsat_tiny_roberta_base"
    add("shards", nargs="+", metavar="TARS", help="paths, patterns or URLs, as in clap.data.shards")
    add("--preset", type=preset_argument, default=tiny, metavar="NAME", help=f"of the model (default {tiny})")
    beside = "folder or hub name (default: the folder tokenizer beside TARS, or RoBERTa's)"
    add("--tokenizer", metavar="T", help=beside)
    add("--micro_batch", type=positive, default=64, metavar="B", help="samples put together (default 64)")
    add("--max_workers", type=positive, metavar="N", help="most workers to try (default: cores per rank, at most 16)")
    add("--seconds", type=number(0.1, 3600), default=10.0, metavar="S", help="per number of workers (default 10)")
    add("--ranks_per_host", type=positive, default=1, metavar="R", help="(default 1)")
    needed = "that one rank's step needs, as a benchmark on synthetic data reaches them"
    add("--needed_samples_per_s", type=number(0.001, 1e9), metavar="X", help=needed)


def run_measure(options: argparse.Namespace) -> None:
    """Measure and print; UserError for shards that can't be read."""
    ranks, cores = options.ranks_per_host, len(os.sched_getaffinity(0))
    most = options.max_workers or max(1, min(16, cores // ranks))
    tokenizer = options.tokenizer or tokenizer_beside(options.shards[0])
    model = load_preset(options.preset)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # decides whether memory is pinned
    spec = BatchSpec(model, min(_TEXT_TOKENS, model.text.max_tokens), options.micro_batch, 0, ranks, 0, device)
    speeds: list[Speed] = []
    try:
        shards = expand_shards(options.shards)
        for num_workers in sorted({2**power for power in range(most.bit_length())} | {most}):
            data = ShardData(source="shards", shards=shards, tokenizer=tokenizer, num_workers=num_workers)
            speeds.append(measure(shards, data, spec, options.seconds))
            if len(speeds) == 1:
                print(HEADING)
            print(row(speeds[-1]), flush=True)
    except (OSError, ValueError) as error:
        raise UserError(str(error)) from None
    if speeds[0].cold_mb_per_s is None:
        print("remote files: the loader's rates are with the time to fetch those that have no copy here yet")
    at = ", ".join(f"{workers_needed(speeds, rate):,} at {rate:,.0f}" for rate in RATES)
    print(f"cores a GPU, with a margin of {MARGIN - 1:.0%}: {at} samples/s")
    if options.needed_samples_per_s:
        best = max((speed.supply for speed in speeds), key=lambda supply: supply.samples_per_s)
        print(verdict(best, options.needed_samples_per_s, ranks_per_host=ranks, cores=cores))
