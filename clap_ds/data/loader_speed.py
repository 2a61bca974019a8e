"""`clap-shards measure`: how fast shards can be read and decoded, on their own, and how many workers a run's step needs.

Loads one rank's share with ever more workers, as a run does, without a model; beside it, what the file system gives when
nothing is decoded. The rate needed is given per rank, or taken from the directory of a benchmark on synthetic data.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import torch

from clap_ds.config.arguments import number, whole_number
from clap_ds.config.batch_sizes import MICRO_BATCH
from clap_ds.config.errors import UserError
from clap_ds.config.model_names import preset_names
from clap_ds.config.sections import ModelSettings, ShardData
from clap_ds.config.settings import ClapSettings, RunSettings, load_run
from clap_ds.data.batch import BatchSpec
from clap_ds.data.shard_files import is_remote
from clap_ds.data.shard_list import expand_sources, tokenizer_beside
from clap_ds.data.shard_manifest import presets_of, read_manifest
from clap_ds.data.shard_size import RATES, digits
from clap_ds.data.shards import ShardPieces
from clap_ds.data.supply import MARGIN, cores_for, workers_for

_PRESET = "htsat_tiny_roberta_base"
_MOST_BYTES, _MOST_FILES, _CHUNK_BYTES = 2e9, 64, 2**22
HEADING = (
    f"{'':7}{'loader':>11}{'':21}{'files, cold':>14}{'':10}{'files, warm':>14}\n"
    "workers  samples/s  per worker     MB/s      MB/s    items/s      MB/s    items/s"
)


class Speed(NamedTuple):
    """What a number of workers gives together: samples and MB (10⁶ bytes) of their audio files per second; and what the file
    system gives to as many readers, in MB per second, None where shards are remote."""

    num_workers: int
    samples_per_s: float
    mb_per_s: float
    cold_mb_per_s: float | None = None
    warm_mb_per_s: float | None = None


def measure(run: RunSettings, num_workers: int, *, seconds: float, world_size: int) -> Speed:
    """Load one rank's share for some time, after a micro-batch that isn't counted, and read the files for as long, twice.
    ValueError where shards don't do."""
    assert isinstance(run.clap.data, ShardData)
    shards = [shard for source in expand_sources(run.clap.data.shards) for shard in source.shards]
    shards = shards[:: -(-len(shards) // _MOST_FILES)]
    files = read_files(shards, num_workers, seconds) if not any(map(is_remote, shards)) else (None, None)
    data = run.clap.data.model_copy(update={"num_workers": num_workers})
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # decides whether memory is pinned
    spec = BatchSpec(run.clap.preset(), run.clap.text_tokens, run.micro_batch, 0, world_size, run.clap.seed, device)
    with closing(ShardPieces(data, spec)) as pieces:
        next(pieces)  # starts the workers
        samples, size, begun = 0, pieces.encoded_bytes, time.perf_counter()
        while (elapsed := time.perf_counter() - begun) < seconds:
            next(pieces)
            samples += run.micro_batch
        return Speed(num_workers, samples / elapsed, (pieces.encoded_bytes - size) / elapsed / 1e6, *files)


def read_files(paths: Sequence[str], num_readers: int, seconds: float) -> tuple[float, float]:
    """MB (10⁶ bytes) per second of the beginnings of files: after the kernel was told to forget their pages, and again."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)  # what isn't on the disk yet would stay
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
    begun = time.perf_counter()

    def read(path: str, most: float, until: float) -> int:
        buffer, done = bytearray(_CHUNK_BYTES), 0
        with open(path, "rb", buffering=0) as file:
            while done < most and time.perf_counter() < until and (count := file.readinto(buffer)):
                done += count
        return done

    with ThreadPoolExecutor(num_readers) as threads:
        most, until = _MOST_BYTES / len(paths), begun + seconds
        sizes = list(threads.map(lambda path: read(path, most, until), paths))
        cold, begun = sum(sizes) / (time.perf_counter() - begun), time.perf_counter()
        until = begun + seconds  # of what is in memory now, all
        again = sum(threads.map(lambda path, size: read(path, size, until) if size else 0, paths, sizes))
        return cold / 1e6, again / (time.perf_counter() - begun) / 1e6


def workers_needed(speeds: Sequence[Speed], needed: float) -> int:
    """How many workers give `MARGIN` times the samples per second that are needed; of more than were measured, each is taken to
    give what one among the most gave."""
    more = workers_for(needed, speeds[-1].samples_per_s, speeds[-1].num_workers)
    return next((speed.num_workers for speed in speeds if speed.samples_per_s >= MARGIN * needed), more)


def verdict(speeds: Sequence[Speed], *, needed: float, ranks_per_host: int, cores: int) -> str:
    """How many workers a step needs, whether the host has cores for them, and the file system gives their bytes cold."""
    wanted = workers_needed(speeds, needed)
    takes = f"{wanted} worker(s) per rank"
    if wanted > speeds[-1].num_workers:
        takes = f"about {takes} (more than were measured: taken from the rate of one among the most)"
    needs = f"the step needs {needed:.1f} samples/s per rank; with a margin of {MARGIN - 1:.0%} that takes {takes}"
    text = f"{needs}\n{cores_for(wanted, ranks_per_host=ranks_per_host, cores=cores)}"
    best = max(speeds, key=lambda speed: speed.cold_mb_per_s or 0)
    if best.cold_mb_per_s:
        mb_per_s = needed * ranks_per_host * item_mb(speeds)
        enough = "enough" if best.cold_mb_per_s >= mb_per_s else "NOT enough"
        gave = f"it gave {digits(best.cold_mb_per_s)} MB/s to {best.num_workers} reader(s)"
        text += f"\nthey need {digits(mb_per_s)} MB/s of the file system; cold, {gave}: {enough}"
    return text


def item_mb(speeds: Sequence[Speed]) -> float:
    """MB (10⁶ bytes) of a clip's file."""
    return sum(speed.mb_per_s for speed in speeds) / sum(speed.samples_per_s for speed in speeds)


def row(speed: Speed) -> str:
    """One line under `HEADING`."""
    workers, samples, mb, *files = speed
    text = f"{workers:7d} {samples:10.1f} {samples / workers:11.1f} {mb:8.2f}"
    for rate in files:
        text += f" {'–':>9} {'–':>10}" if rate is None else f" {rate:9.1f} {rate / item_mb([speed]):10.0f}"
    return text


def add_measure_options(parser: argparse.ArgumentParser) -> None:
    add, positive = parser.add_argument, whole_number()
    add("shards", nargs="*", metavar="TARS", help="paths, patterns or URLs; or, instead, --deepspeed_config")
    add("--deepspeed_config", type=Path, metavar="FILE", help="a run's JSON whose data are shards, to read as it does")
    group = parser.add_argument_group("without a run's JSON").add_argument
    by_manifest = f"of the model (default: {_PRESET}, or by the manifest)"
    group("--preset", choices=preset_names(), metavar="NAME", help=by_manifest)
    beside = "folder or hub name (default: the folder tokenizer beside TARS, or RoBERTa's)"
    group("--tokenizer", metavar="T", help=beside)
    group("--micro_batch", type=positive, metavar="B", help="samples put together (default 64)")
    add("--max_workers", type=positive, metavar="N", help="most workers to try (default: cores per rank, at most 16)")
    add("--seconds", type=number(0.1, 3600), default=10.0, metavar="S", help="per number of workers (default 10)")
    add("--ranks_per_host", type=positive, default=1, metavar="R", help="(default 1)")
    rate = parser.add_mutually_exclusive_group()
    above_0 = number(0.001, 1e9)
    rate.add_argument("--needed_samples_per_s", type=above_0, metavar="X", help="that one rank's step needs")
    rate.add_argument("--run_directory", type=Path, metavar="DIR", help="of a benchmark, for the rate it reached")


def run_measure(options: argparse.Namespace) -> None:
    """Measure and print; UserError for a run or shards that can't be read."""
    run, needed = _run_of(options), options.needed_samples_per_s
    if options.run_directory:
        path = options.run_directory / "summary.json"
        try:
            needed = float(json.loads(path.read_text())["samples_per_s_per_gpu"]["median"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            expected = "expected a benchmark's directory, with the median of samples_per_s_per_gpu"
            raise UserError(f"--run_directory: {path}: {expected}: {error}") from None
    ranks, cores = options.ranks_per_host, len(os.sched_getaffinity(0))
    most = options.max_workers or max(1, min(16, cores // ranks))
    speeds: list[Speed] = []
    for num_workers in sorted({2**power for power in range(most.bit_length())} | {most}):
        try:
            speeds.append(measure(run, num_workers, seconds=options.seconds, world_size=ranks))
        except (OSError, ValueError) as error:
            raise UserError(f"{run.path}: {error}" if options.deepspeed_config else str(error)) from None
        if len(speeds) == 1:
            print(HEADING)
        print(row(speeds[-1]), flush=True)
    if speeds[0].cold_mb_per_s is None:
        print("remote files: the loader's rates are with the time to fetch those that have no copy here yet")
    at = ", ".join(f"{workers_needed(speeds, rate):,} at {rate:,.0f}" for rate in RATES)
    print(f"cores a GPU, with a margin of {MARGIN - 1:.0%}: {at} samples/s")
    if needed is not None:
        print(verdict(speeds, needed=needed, ranks_per_host=ranks, cores=cores))


def _run_of(options: argparse.Namespace) -> RunSettings:
    given = [name for name in ("preset", "tokenizer", "micro_batch") if getattr(options, name)]
    if bool(options.shards) == bool(options.deepspeed_config):
        raise UserError("clap-shards measure: expected tars, or --deepspeed_config with a run's JSON")
    if options.deepspeed_config:
        if given:
            raise UserError(f"--{given[0]}: --deepspeed_config says that; expected one of them")
        run = load_run(options.deepspeed_config)
        if not isinstance(run.clap.data, ShardData):
            raise UserError(f"{run.path}: clap.data.source: expected shards, found {run.clap.data.source}")
        return run
    first = options.shards[0]
    try:
        presets = presets_of(read_manifest(first.rpartition("/")[0] or "."))
    except (ImportError, ValueError) as error:
        raise UserError(str(error)) from None
    preset = options.preset or (presets[0] if presets and _PRESET not in presets else _PRESET)
    data = ShardData(source="shards", shards=options.shards, tokenizer=options.tokenizer or tokenizer_beside(first))
    clap = ClapSettings(model=ModelSettings(preset=preset), data=data)
    clap = clap.model_copy(update={"text_tokens": min(clap.text_tokens, clap.preset().text.max_tokens)})
    return RunSettings(Path(first), clap, {MICRO_BATCH: options.micro_batch or 64})
