"""Find stragglers: ranks whose own step time exceeds the median rank's.

Own time includes data wait but not waits for other ranks (`clock.peer_wait`), so a slow link adds
to no rank's.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from clap_ds.run_records.schema import Straggler, Summary

Floats = np.ndarray[Any, np.dtype[np.float64]]
KEPT_STEPS = 300
GROUPS = 15
FEWEST_STEPS = 20
"""Ranks are compared over the last steps in up to `GROUPS` groups of neighbors, as data waits are
sporadic."""
SPREADS = 3.0
FLOOR = 0.03
MOST = 0.6
"""A straggler lags by `SPREADS` standard deviations and the share `FLOOR` in more than the share
`MOST` of groups."""


def slow_ranks(own_s: Floats, before: Collection[int] = ()) -> list[int]:
    """Find stragglers from own seconds, (steps, ranks), of at most `KEPT_STEPS` steps.

    The spread is a robust standard deviation of changes in the difference of neighboring ranks. The
    limit is halved for ranks that were slow `before`.
    """
    if len(own_s) < FEWEST_STEPS or own_s.shape[1] < 2:
        return []
    grouped_s = np.add.reduceat(
        own_s, np.linspace(0, len(own_s), min(len(own_s), GROUPS), endpoint=False).astype(int)
    )
    lag = grouped_s / _lower_median(grouped_s) - 1
    difference = np.diff(lag, axis=1)
    change = np.abs(difference - np.median(difference, axis=0)) / 2**0.5
    spread = 1.4826 * float(np.median(change))  # of a normal distribution
    limit = max(SPREADS * spread, FLOOR) / np.where(
        np.isin(range(lag.shape[1]), list(before)), 2, 1
    )
    return [int(rank) for rank in np.flatnonzero((lag > limit).mean(axis=0) > MOST)]


def rate_without(slow: Sequence[int], samples: Floats, step_s: Floats, own_s: Floats) -> float:
    """Compute samples/s if slow ranks had the median rank's own time. Shapes: (steps,), (steps,),
    (steps, ranks)."""
    others_s = own_s.copy()
    others_s[:, slow] = _lower_median(own_s)
    return float(samples.sum() / (step_s - own_s.max(axis=1) + others_s.max(axis=1)).sum())


def _lower_median(rows: Floats) -> Floats:
    return np.asarray(np.percentile(rows, 50, axis=1, method="lower", keepdims=True))


class Stragglers:
    """Collects all ranks' times on rank 0 and prints stragglers when they change; `warnings` has
    the last line."""

    def __init__(self, hosts: Sequence[str]) -> None:
        self._hosts = hosts
        self._slow = list[int]()
        self.warnings = list[str]()
        self._kept = np.empty((0, 2 + 2 * len(hosts)))

    def add(self, samples: float, step_s: Floats, own_s: Floats, data_wait_s: Floats) -> Summary:
        """Add steps of `samples`, in seconds, (steps,), and times of ranks, (steps, ranks). Returns
        fields to record."""
        new = np.column_stack((np.full(len(own_s), samples), step_s, own_s, data_wait_s))
        self._kept = np.concatenate((self._kept, new))[-KEPT_STEPS:]
        own, data = np.split(self._kept[:, 2:], 2, axis=1)
        slow = slow_ranks(own, self._slow)
        lag, wait = ((each - _lower_median(each)).mean(axis=0).round(6) for each in (own, data))
        share = 100 / _lower_median(own).mean()
        found = [
            Straggler(
                rank=n,
                host=self._hosts[n],
                lag_s=float(lag[n]),
                lag_percent=round(float(share * lag[n]), 2),
                data_wait_s=float(wait[n]),
            )
            for n in sorted(slow, key=lambda n: -lag[n])
        ]
        of_step = self._kept[:, 0]
        step_s = self._kept[:, 1]
        cost = rate_without(slow, of_step, step_s, own) - float(of_step.sum() / step_s.sum())
        self.warnings = [_words(found, cost)] if slow else []
        if slow != self._slow:
            print(*(self.warnings or ["no stragglers any more"]), flush=True)
        self._slow = slow
        return Summary(stragglers=found, stragglers_cost_samples_per_s=cost)


def _words(slow: Sequence[Straggler], cost: float) -> str:
    each = [
        f"rank {one['rank']} on {one['host']}, {1000 * one['lag_s']:+,.1f} ms/step ({one['lag_percent']:+.1f}%),"
        f" data wait {1000 * one['data_wait_s']:+,.1f} ms"
        for one in slow[:5]
    ] + [f"{len(slow) - 5} more"] * (len(slow) > 5)
    return f"stragglers cost {cost:,.1f} samples/s: {'; '.join(each)}"
