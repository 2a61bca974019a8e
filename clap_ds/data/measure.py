"""Measure how fast the data of a run is loaded, without its model.

Examples:
    clap-ds shards measure --deepspeed_config my_run.json
    clap-ds shards measure --deepspeed_config my_run.json --needed 3300 --rank 2/4

Loads the batches of one rank as training does, on the CPU. Start one command per rank of a host at
the same time, because they share cores, disk and network. MB/s are the tars' bytes of the samples
that were used.
"""

import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from clap_ds.config.arguments import add_config, i_of_n, positive, whole_number
from clap_ds.config.schema import ShardData
from clap_ds.config.settings import load_run
from clap_ds.data.batch import LoaderThroughput, describe
from clap_ds.data.dataloader import build_batches
from clap_ds.data.shard_assignment import Source, expand_sources
from clap_ds.data.shard_manifest import count_bytes, samples_of
from clap_ds.run_records.cpu_binding import CORES
from clap_ds.utils.errors import UserError


def add_measure_options(parser: ArgumentParser) -> None:
    add_config(parser)
    add = parser.add_argument
    add("--rank", type=i_of_n, default="1/1", metavar="I/N", help="load the share of rank I of N")
    warmup_help = (
        "first load N micro-batches, which start the workers and use up what they prefetch"
    )
    add("--warmup", type=whole_number(0), default=5, metavar="N", help=warmup_help)
    seconds_help = "then load for so long"
    add("--seconds", type=positive, default=30.0, metavar="S", help=seconds_help)
    needed_help = (
        "also print the workers that this many samples/s per GPU need, as a benchmark prints"
    )
    add("--needed", type=positive, metavar="RATE", help=needed_help)


def run_measure(options: Namespace) -> int:
    """Measure a run's loader, print its rates, and return the exit code."""
    number, num_ranks = options.rank
    run = load_run(options.config, num_ranks, options.set)
    clap = run.clap
    data = clap.data
    if not isinstance(data, ShardData):
        raise UserError(f'{run.path}: clap.data.source: expected "webdataset", to measure shards')
    spec: dict[str, Any] = {"rank": number - 1, "world_size": num_ranks, "seed": clap.seed}
    spec |= {"model": clap.preset(), "context_length": clap.context_length}
    with build_batches(
        data, pack_captions=clap.packs_captions, micro_batch=run.micro_batch, **spec
    ) as batches:
        num_samples, seconds = count_samples(batches, options.warmup, options.seconds)
        kind = batches.statistics()["kind"]
    throughput = LoaderThroughput(num_samples / seconds, data.num_workers, kind)
    print(f"loaded {num_samples:,} samples in {seconds:.3g} s")
    sample_bytes = average_bytes(expand_sources(data.shards))
    step_samples = run.batch_sizes(num_ranks).global_batch // num_ranks
    print(describe_rates(throughput, sample_bytes, step_samples))
    if options.needed:
        print(describe(throughput, options.needed, ranks_per_host=1, cores=len(CORES)))
    return 0


def count_samples(
    batches: Iterator[Any],
    num_warmup: int,
    min_seconds: float,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[int, float]:
    """Count the samples of whole batches after some others, for at least some seconds. Return
    their number and the seconds."""
    for _ in range(num_warmup):
        next(batches)
    num_samples = 0
    started_s = clock()
    elapsed_s = 0.0
    while elapsed_s < min_seconds:
        num_samples += len(next(batches))
        elapsed_s = clock() - started_s
    return num_samples, elapsed_s


def average_bytes(sources: Sequence[Source]) -> float | None:
    """Return the bytes in tars per sample, by the sources' shares of the samples, or None if a
    manifest is missing."""
    average = 0.0
    for source in sources:
        counts = samples_of(source.shards)
        if not counts or not sum(counts):
            return None
        average += source.weight * sum(count_bytes(source.shards).values()) / sum(counts)
    return average


def describe_rates(
    throughput: LoaderThroughput, sample_bytes: float | None, step_samples: int
) -> str:
    """Return lines with the rates of a rank and of each worker, and what a step needs, whose
    `step_samples` are a rank's."""
    rate = throughput.samples_per_s
    num_workers = throughput.num_workers
    rates = [f"per rank: {rate:,.1f} samples/s"]
    rates.append(f"per worker, of {num_workers}: {rate / max(num_workers, 1):,.1f} samples/s")
    step = f"a step needs {step_samples:,} samples per rank"
    if sample_bytes is None:
        rates.append("MB/s: unknown, because a folder of remote shards has no manifest.json")
    else:
        rates[0] += f", {rate * sample_bytes / 1e6:,.1f} MB/s"
        step += f", {step_samples * sample_bytes / 1e6:,.1f} MB"
    rates.append(f"{step}: {step_samples / rate:.3g} s to load")
    return "\n".join(rates)
