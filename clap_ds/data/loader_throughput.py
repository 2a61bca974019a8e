"""Whether a run's loader keeps up with its step: what workers can give, what a step takes, what to change."""

from __future__ import annotations

import math
from typing import NamedTuple

from clap_ds.data.front_end import Kind

MARGIN = 1.25
"""How much more than the step needs the loader should give, so that uneven clips don't make it wait."""


class Supply(NamedTuple):
    """What a rank's workers can give: clips per second, all of them together."""

    samples_per_s: float
    num_workers: int  # 0: the training process reads
    kind: Kind
    prepared: Kind = "mel"  # the kind that takes least, of those that the model can be fed

    def workers_for(self, needed: float) -> int:
        """Return how many workers give `MARGIN` times the clips per second that a step needs."""
        return math.ceil(MARGIN * needed * self.num_workers / self.samples_per_s)


def verdict(supply: Supply, needed: float, *, ranks_per_host: int, cores: int) -> str:
    """Say whether the loader keeps up with a rank's step that needs so many clips per second, and what to do if not."""
    if supply.num_workers == 0:
        share = needed / supply.samples_per_s
        return f"clap.data.num_workers: 0: reading in the training process makes each step {share:.0%} longer"
    wanted = supply.workers_for(needed)
    found = (
        f"clap.data: {supply.num_workers} worker(s) can give {supply.samples_per_s:,.0f} clips/s,"
        f" the step of their rank takes {needed:,.0f}"
    )
    if wanted <= supply.num_workers:
        return f"{found}: enough"
    waits = "it will wait" if needed > supply.samples_per_s else f"less than {MARGIN - 1:.0%} more"
    in_all = wanted * ranks_per_host
    enough = "enough" if in_all + ranks_per_host <= cores else "NOT enough"
    has = f"{in_all} worker(s) beside {ranks_per_host} training process(es) on this host's {cores} cores: {enough}"
    less = f"; prepared shards take less (clap-shards prepare --kind {supply.prepared})"
    prepare = "" if supply.kind == supply.prepared else less
    return f"{found}: {waits}. clap.data.num_workers {wanted} would do ({has}){prepare}"
