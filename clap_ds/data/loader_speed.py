"""`clap-shards measure`: how fast shards can be read and decoded, on their own, and how many workers a run's step needs.

Loads one rank's share with ever more workers, as a run does, without a model; beside it, what the file system gives when
nothing is decoded. The rate needed is given per rank, or taken from the directory of a benchmark on synthetic data.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import torch

from clap_ds.config.arguments import number, whole_number
from clap_ds.config.errors import UserError
from clap_ds.config.model_names import preset_names
from clap_ds.config.sections import ModelSettings, ShardData
from clap_ds.config.settings import ClapSettings, RunSettings, load_run
from clap_ds.data import file_speed
from clap_ds.data.batch import BatchSpec
from clap_ds.data.shard_files import is_remote
from clap_ds.data.shard_list import expand_sources, tokenizer_beside
from clap_ds.data.shard_manifest import presets_of, read_manifest
from clap_ds.data.shard_size import RATES, digits, look_into
from clap_ds.data.shards import ShardPieces
from clap_ds.data.supply import MARGIN, cores_for, workers_for

_PRESET = "htsat_tiny_roberta_base"
_COUNTED = 8  # shards whose items are counted, for the bytes of one
HEADING = (
    f"{'':7}{'loader':>11}{'':21}{'files, cold':>14}{'':10}{'files, warm':>14}\n"
    "workers  samples/s  per worker     MB/s      MB/s    items/s      MB/s    items/s"
)


class Speed(NamedTuple):
    """What a number of workers gives: samples and MB (of encoded audio; 10⁶ bytes) per second, all of them together."""

    num_workers: int
    samples_per_s: float
    mb_per_s: float


class FileSpeed(NamedTuple):
    """What the file system gives to a number of readers, in MB (10⁶ bytes) per second; warm is None of remote files."""

    num_readers: int
    cold_mb_per_s: float
    warm_mb_per_s: float | None


def measure(run: RunSettings, num_workers: int, *, seconds: float, world_size: int) -> Speed:
    """Load one rank's share for some time, after a micro-batch that isn't counted; ValueError where its shards don't do."""
    assert isinstance(run.clap.data, ShardData)
    data = run.clap.data.model_copy(update={"num_workers": num_workers})
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # decides whether memory is pinned
    spec = BatchSpec(run.clap.preset(), run.clap.text_tokens, run.micro_batch, 0, world_size, run.clap.seed, device)
    with closing(ShardPieces(data, spec)) as pieces:
        next(pieces)  # starts the workers
        samples, size, begun = 0, pieces.encoded_bytes, time.perf_counter()
        while (elapsed := time.perf_counter() - begun) < seconds:
            next(pieces)
            samples += run.micro_batch
        return Speed(num_workers, samples / elapsed, (pieces.encoded_bytes - size) / elapsed / 1e6)


def measure_files(
    parts: Sequence[file_speed.Part], num_readers: int, *, seconds: float
) -> tuple[FileSpeed, bool | None]:
    """Read files' bytes twice; also whether the first time they weren't in memory (None: can't be told)."""
    dropped = file_speed.drop(parts)
    cold, done = file_speed.read(parts, num_readers, seconds)
    warm = None
    if not any(is_remote(part.shard) for part in parts):
        warm = file_speed.read(done, num_readers, seconds)[0] / 1e6
    return FileSpeed(num_readers, cold / 1e6, warm), dropped


def rate_of(run_directory: Path) -> float:
    """Samples per second of one rank in a run; UserError where its summary can't be read or has none."""
    path = run_directory / "summary.json"
    try:
        return float(json.loads(path.read_text())["samples_per_s_per_gpu"]["median"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        expected = "expected a benchmark's directory, with the median of samples_per_s_per_gpu"
        raise UserError(f"--run_directory: {path}: {expected}: {error}") from None


def workers_needed(speeds: Sequence[Speed], needed: float) -> int:
    """How many workers give `MARGIN` times the samples per second that are needed; of more than were measured, each is taken to
    give what one among the most gave."""
    more = workers_for(needed, speeds[-1].samples_per_s, speeds[-1].num_workers)
    return next((speed.num_workers for speed in speeds if speed.samples_per_s >= MARGIN * needed), more)


def verdict(speeds: list[Speed], *, needed: float, ranks_per_host: int, cores: int) -> str:
    """How many workers a step needs, and whether the host has cores for them."""
    wanted = workers_needed(speeds, needed)
    takes = f"{wanted} worker(s) per rank"
    if wanted > speeds[-1].num_workers:
        takes = f"about {takes} (more than were measured: taken from the rate of one among the most)"
    needs = f"the step needs {needed:.1f} samples/s per rank; with a margin of {MARGIN - 1:.0%} that takes {takes}"
    return f"{needs}\n{cores_for(wanted, ranks_per_host=ranks_per_host, cores=cores)}"


def files_verdict(files: Sequence[FileSpeed], *, needed: float, ranks_per_host: int, item_bytes: float) -> str:
    """Whether the file system gives cold what the ranks of a host need."""
    wanted, best = needed * ranks_per_host * item_bytes / 1e6, max(files, key=lambda speed: speed.cold_mb_per_s)
    enough = "enough" if best.cold_mb_per_s >= wanted else "NOT enough"
    gave = f"it gave {digits(best.cold_mb_per_s)} MB/s to {best.num_readers} reader(s)"
    return f"they need {digits(wanted)} MB/s of the file system; cold, {gave}: {enough}"


def row(speed: Speed, files: FileSpeed, item_bytes: float) -> str:
    """One line under `HEADING`."""
    workers, samples, mb = speed
    text = f"{workers:7d} {samples:10.1f} {samples / workers:11.1f} {mb:8.2f}"
    for rate in files[1:]:
        text += f" {rate:9.1f} {rate * 1e6 / item_bytes:10.0f}" if rate else f" {'–':>9} {'–':>10}"
    return text


def add_measure_options(parser: argparse.ArgumentParser) -> None:
    add, positive = parser.add_argument, whole_number()
    add("shards", nargs="*", metavar="TARS", help="paths, patterns or URLs; or, instead, --deepspeed_config")
    add(
        "--deepspeed_config",
        type=Path,
        metavar="FILE",
        help="a run's JSON whose data are shards: measured as it reads them",
    )
    group = parser.add_argument_group("without a run's JSON").add_argument
    presets = preset_names()
    group("--preset", choices=presets, metavar="NAME", help=f"of the model (default: {_PRESET}, or by the manifest)")
    group(
        "--tokenizer", metavar="T", help="folder or hub name (default: the folder tokenizer beside TARS, or RoBERTa's)"
    )
    group("--micro_batch", type=positive, metavar="B", help="samples put together (default 64)")
    add("--max_workers", type=positive, metavar="N", help="most workers to try (default: cores per rank, at most 16)")
    add("--seconds", type=number(0.1, 3600), default=10.0, metavar="S", help="per number of workers (default 10)")
    add("--ranks_per_host", type=positive, default=1, metavar="R", help="(default 1)")
    add("--json", action="store_true", help="print JSON; the table goes to the standard error")
    rate = parser.add_mutually_exclusive_group()
    above_0 = number(0.001, 1e9)
    rate.add_argument("--needed_samples_per_s", type=above_0, metavar="X", help="that one rank's step needs")
    rate.add_argument("--run_directory", type=Path, metavar="DIR", help="of a benchmark, for the rate it reached")


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
    tokenizer = options.tokenizer or tokenizer_beside(options.shards[0])
    model = ModelSettings(preset=options.preset or _preset_for(options.shards[0]))
    clap = ClapSettings(model=model, data=ShardData(source="shards", shards=options.shards, tokenizer=tokenizer))
    clap = clap.model_copy(update={"text_tokens": min(clap.text_tokens, clap.preset().text.max_tokens)})
    return RunSettings(Path(options.shards[0]), clap, {"train_micro_batch_size_per_gpu": options.micro_batch or 64})


def _preset_for(shard: str) -> str:
    """The default, unless it was for other presets that the shard was prepared."""
    try:
        presets = presets_of(read_manifest(shard.rpartition("/")[0] or "."))
    except ImportError:  # of a URL's protocol, which is told when shards are looked for
        return _PRESET
    except ValueError as error:
        raise UserError(str(error)) from None
    return presets[0] if presets and _PRESET not in presets else _PRESET


def run_measure(options: argparse.Namespace) -> None:
    """Measure and print; UserError for a run or shards that can't be read."""
    run = _run_of(options)
    needed = rate_of(options.run_directory) if options.run_directory else options.needed_samples_per_s
    ranks, cores = options.ranks_per_host, len(os.sched_getaffinity(0))
    most = options.max_workers or max(1, min(16, cores // ranks))
    numbers = sorted({2**power for power in range(most.bit_length())} | {most})
    try:
        speeds, files, item_bytes, cold = _measure_all(run, numbers, options)
    except (OSError, ValueError) as error:
        raise UserError(f"{run.path}: {error}" if options.deepspeed_config else str(error)) from None
    if options.json:
        figures = {
            "speeds": [speed._asdict() for speed in speeds],
            "files": [speed._asdict() for speed in files],
            "cold_is_cold": cold,
            "bytes_per_item": item_bytes,
            "cores_per_gpu": {f"{rate:g}": workers_needed(speeds, rate) for rate in RATES},
            "needed_samples_per_s": needed,
            "cores": cores,
        }
        print(json.dumps(figures, indent=1))
        return
    if files[0].warm_mb_per_s is None:
        print("remote files: cold is what streams, with whatever caches there are on the way")
    elif not cold:
        untold = "may be warm: this file system doesn't tell whether memory was emptied of the files"
        print(f"cold {untold if cold is None else 'is partly warm: something else holds the files in memory'}")
    at = ", ".join(f"{workers_needed(speeds, rate):,} at {rate:,.0f}" for rate in RATES)
    print(f"cores a GPU, with a margin of {MARGIN - 1:.0%}: {at} samples/s")
    if needed is not None:
        print(verdict(speeds, needed=needed, ranks_per_host=ranks, cores=cores))
        print(files_verdict(files, needed=needed, ranks_per_host=ranks, item_bytes=item_bytes))


def _measure_all(
    run: RunSettings, numbers: Sequence[int], options: argparse.Namespace
) -> tuple[list[Speed], list[FileSpeed], float, bool | None]:
    """Measure with each number of workers and show it; besides that, bytes of an item, and whether what was read cold was."""
    assert isinstance(run.clap.data, ShardData)
    shown = sys.stderr if options.json else sys.stdout
    parts = file_speed.choose_parts(
        [shard for source in expand_sources(run.clap.data.shards) for shard in source.shards]
    )
    item_bytes = 0.0
    with contextlib.suppress(UserError):  # not known of remote tars without a manifest, nor meant of a mixture of kinds
        found = look_into([part.shard for part in parts[:_COUNTED]])
        item_bytes = found.bytes / found.items
    speeds: list[Speed] = []
    files: list[FileSpeed] = []
    told: set[bool | None] = set()
    for number_of in numbers:
        file_rates, was_cold = measure_files(parts, number_of, seconds=options.seconds)
        speed = measure(run, number_of, seconds=options.seconds, world_size=options.ranks_per_host)
        if not speeds:
            print(HEADING, file=shown)
        speeds.append(speed)
        files.append(file_rates)
        told.add(was_cold)
        item_bytes = item_bytes or 1e6 * speed.mb_per_s / speed.samples_per_s
        print(row(speed, file_rates, item_bytes), file=shown, flush=True)
    return speeds, files, item_bytes, False if False in told else None if None in told else True
