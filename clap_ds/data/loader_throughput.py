"""Compare the data loader's throughput with the step's and recommend settings."""

from __future__ import annotations

import math
from typing import NamedTuple

from clap_ds.data.shard_io import Kind

MARGIN = 1.25
"""Factor by which the loader should exceed the step's throughput, so that uneven clips don't make
the step wait."""


class LoaderThroughput(NamedTuple):
    """Describe the total throughput of a rank's workers."""

    samples_per_s: float
    num_workers: int  # 0: loading in the training process
    kind: Kind


def describe(
    throughput: LoaderThroughput, needed: float, *, ranks_per_host: int, cores: int
) -> str:
    """Report whether the loader sustains the `needed` clips per second of a rank's step, and what
    to do if not."""
    if throughput.num_workers == 0:
        share = needed / throughput.samples_per_s
        return f"clap.data.num_workers: 0: loading in the training process makes each step {share:.0%} longer"
    found = (
        f"clap.data: {throughput.num_workers} worker(s) can load {throughput.samples_per_s:,.0f} clips/s,"
        f" their rank's step needs {needed:,.0f}"
    )
    wanted = math.ceil(MARGIN * needed * throughput.num_workers / throughput.samples_per_s)
    if wanted <= throughput.num_workers:
        return f"{found}: enough"
    waits = (
        "the step will wait"
        if needed > throughput.samples_per_s
        else f"margin below {MARGIN - 1:.0%}"
    )
    found += f": {waits}. Set clap.data.num_workers to {wanted}"
    if (wanted + 1) * ranks_per_host > cores:
        found += f", which is more than this host's {cores} cores for {ranks_per_host} rank(s)"
    if throughput.kind == "encoded":
        found += "; prepared shards need fewer (clap-ds shards prepare)"
    return found
