"""Implement `clap-shards measure`: shard loading throughput and the number of workers a step needs."""

from __future__ import annotations

import argparse
import os
import time
from contextlib import closing

import torch

from clap_ds.config.arguments import number, whole_number
from clap_ds.config.errors import UserError
from clap_ds.config.model import CONTEXT_LENGTH, load_preset
from clap_ds.config.schema import ShardData
from clap_ds.data.batch import BatchSpec
from clap_ds.data.loader_throughput import MARGIN, LoaderThroughput, describe
from clap_ds.data.shard_manifest import expand_shards, tokenizer_beside
from clap_ds.data.webdataset import WebDatasetStream

RATES = (624, 3300, 4500)
"""Samples per second per GPU: the published throughput, and this project's goals for an H200."""
_MICRO_BATCH = 64


def measure(data: ShardData, spec: BatchSpec, seconds: float) -> LoaderThroughput:
    """Load one rank's share for `seconds` or longer, until its throughput is known."""
    end_s = time.perf_counter() + seconds
    with closing(WebDatasetStream(data, spec)) as pieces:
        while (throughput := pieces.throughput()) is None or time.perf_counter() < end_s:
            next(pieces)
        return throughput


def add_measure_options(parser: argparse.ArgumentParser) -> None:
    add, tiny = parser.add_argument, "htsat_tiny_roberta_base"
    add("shards", nargs="+", metavar="TARS", help="paths, patterns or URLs, as in clap.data.shards")
    add("--preset", default=tiny, metavar="NAME", help=f"model preset (default: {tiny})")
    beside = "tokenizer folder or Hub name (default: folder tokenizer next to TARS, or RoBERTa's)"
    add("--tokenizer", metavar="T", help=beside)
    add("--max_workers", type=whole_number(), metavar="N", help="most workers to try (default: cores, up to 16)")
    add("--seconds", type=number(0.1, 3600), default=10.0, metavar="S", help="seconds per measurement (default: 10)")
    needed = "throughput per rank to sustain, as measured by a benchmark on synthetic data"
    add("--target_samples_per_s", type=number(0.001, 1e9), metavar="X", help=needed)


def run_measure(options: argparse.Namespace) -> None:
    """Measure and print. Raises UserError for unreadable shards."""
    cores = len(os.sched_getaffinity(0))
    most = options.max_workers or min(16, cores)
    tokenizer = options.tokenizer or tokenizer_beside(options.shards[0])
    model = load_preset(options.preset)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # decides whether memory is pinned
    spec = BatchSpec(model, min(CONTEXT_LENGTH, model.text.max_tokens), _MICRO_BATCH, device=device)
    measured: list[LoaderThroughput] = []
    try:
        shards = expand_shards(options.shards)
        print("workers  samples/s  per worker")
        for workers in sorted({2**power for power in range(most.bit_length())} | {most}):
            data = ShardData(source="webdataset", shards=shards, tokenizer=tokenizer, num_workers=workers)
            measured.append(measure(data, spec, options.seconds))
            rate = measured[-1].samples_per_s
            print(f"{workers:7d} {rate:10.1f} {rate / workers:11.1f}", flush=True)
    except (OSError, ValueError) as error:
        raise UserError(str(error)) from None
    at = ", ".join(f"{measured[-1].workers_for(rate):,} at {rate:,.0f}" for rate in RATES)
    print(f"cores per GPU, including a margin of {MARGIN - 1:.0%}: {at} samples/s")
    if options.target_samples_per_s:
        print(describe(max(measured), options.target_samples_per_s, ranks_per_host=1, cores=cores))
