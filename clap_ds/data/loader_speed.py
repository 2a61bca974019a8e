"""`clap-shards measure`: how fast shards are read and decoded, and how many workers a run's step needs."""

from __future__ import annotations

import argparse
import os
import time
from contextlib import closing

import torch

from clap_ds.config.arguments import number, whole_number
from clap_ds.config.errors import UserError
from clap_ds.config.model import load_preset, preset_argument
from clap_ds.config.sections import ShardData
from clap_ds.data.batch import BatchSpec
from clap_ds.data.shard_list import expand_shards, tokenizer_beside
from clap_ds.data.shard_size import RATES
from clap_ds.data.shards import ShardPieces
from clap_ds.data.supply import MARGIN, Supply

_TEXT_TOKENS = 77


def measure(data: ShardData, spec: BatchSpec, seconds: float) -> Supply:
    """Load one rank's share for some time, after a micro-batch that isn't counted. ValueError where shards don't do."""
    with closing(ShardPieces(data, spec)) as pieces:
        next(pieces)  # starts the workers
        samples, begun = 0, time.perf_counter()
        while (elapsed := time.perf_counter() - begun) < seconds:
            next(pieces)
            samples += spec.micro_batch
        return Supply(samples / elapsed, data.num_workers, pieces.kind, pieces.prepared)


def add_measure_options(parser: argparse.ArgumentParser) -> None:
    add, positive, tiny = parser.add_argument, whole_number(), "htsat_tiny_roberta_base"
    add("shards", nargs="+", metavar="TARS", help="paths, patterns or URLs, as in clap.data.shards")
    add("--preset", type=preset_argument, default=tiny, metavar="NAME", help=f"of the model (default {tiny})")
    add("--max_workers", type=positive, metavar="N", help="most workers to try (default: cores, at most 16)")
    add("--seconds", type=number(0.1, 3600), default=10.0, metavar="S", help="per number of workers (default 10)")


def run_measure(options: argparse.Namespace) -> None:
    """Measure and print; UserError for shards that can't be read."""
    most = options.max_workers or min(16, len(os.sched_getaffinity(0)))
    tokenizer = tokenizer_beside(options.shards[0])
    model = load_preset(options.preset)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # decides whether memory is pinned
    spec = BatchSpec(model, min(_TEXT_TOKENS, model.text.max_tokens), 64, 0, 1, 0, device)
    try:
        shards = expand_shards(options.shards)
        print("workers  samples/s  per worker")
        for workers in sorted({2**power for power in range(most.bit_length())} | {most}):
            data = ShardData(source="shards", shards=shards, tokenizer=tokenizer, num_workers=workers)
            supply = measure(data, spec, options.seconds)
            rate = supply.samples_per_s
            print(f"{workers:7d} {rate:10.1f} {rate / workers:11.1f}", flush=True)
    except (OSError, ValueError) as error:
        raise UserError(str(error)) from None
    at = ", ".join(f"{supply.workers_for(rate):,} at {rate:,.0f}" for rate in RATES)
    print(f"cores a GPU, with a margin of {MARGIN - 1:.0%}: {at} samples/s")
