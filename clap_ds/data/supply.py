"""Whether a run's loader keeps up with its step: what workers can give, what a step takes, what to change."""

from __future__ import annotations

import math
from typing import NamedTuple

from clap_ds.data.front_end import Kind

MARGIN = 1.25
"""How much more than the step needs the loader should give, so that uneven clips don't make it wait."""


class Supply(NamedTuple):
    """What a rank's workers can give: clips per second, all of them together, by how long they took for what they gave."""

    samples_per_s: float
    num_workers: int
    kind: Kind


def workers_for(needed: float, samples_per_s: float, num_workers: int) -> int:
    """Workers that give `MARGIN` times the clips per second a step needs, where `num_workers` give `samples_per_s`."""
    return math.ceil(MARGIN * needed * num_workers / samples_per_s)


def cores_for(num_workers: int, *, ranks_per_host: int, cores: int) -> str:
    """Whether a host has cores for so many workers of each rank, and for the ranks themselves."""
    in_all = num_workers * ranks_per_host
    enough = "enough" if in_all + ranks_per_host <= cores else "NOT enough"
    return f"{in_all} worker(s) beside {ranks_per_host} training process(es) on this host's {cores} cores: {enough}"


def verdict(supply: Supply, needed: float, *, ranks_per_host: int, cores: int) -> str:
    """One line: whether the loader keeps up with a rank's step that needs so many clips per second, and what to do if not."""
    if supply.num_workers == 0:
        share = needed / supply.samples_per_s
        return (
            f"clap.data.num_workers: 0: reading in the training process makes each step {share:.0%} longer"
            f" ({supply.samples_per_s:,.0f} clips/s beside a step's {needed:,.0f}); with workers it would go on beside it"
        )
    found = (
        f"clap.data: {supply.num_workers} worker(s) can give {supply.samples_per_s:,.0f} clips/s,"
        f" the step of their rank takes {needed:,.0f}"
    )
    wanted = workers_for(needed, *supply[:2])
    if wanted <= supply.num_workers:
        return f"{found}: enough"
    if needed <= supply.samples_per_s:
        return f"{found}: just enough; {wanted} would have a margin of {MARGIN - 1:.0%}"
    other = {"encoded": "waveform or mel", "waveform": "mel", "mel": ""}[supply.kind]
    prepare = f"; or read prepared shards, which take less (clap-shards prepare --kind {other})" if other else ""
    has = cores_for(wanted, ranks_per_host=ranks_per_host, cores=cores)
    return f"{found}: it will wait. clap.data.num_workers {wanted} would do ({has}){prepare}"
