"""Find stragglers: ranks whose own step time exceeds the median rank's.

Own time includes data wait but not waits for other ranks (`StepTimer.peer_wait`), so a slow link
adds to no rank's.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from clap_ds.run_records.schema import Straggler, Summary

Floats = np.ndarray[Any, np.dtype[np.float64]]

# Ranks are compared over the last steps.
KEPT_STEPS = 300
# Neighboring steps are added up in so many groups, as data waits are sporadic.
MAX_GROUPS = 15
MIN_STEPS = 20
# A straggler lags by so many standard deviations and this fraction of a step ...
MIN_DEVIATIONS = 3.0
MIN_LAG = 0.03
# ... in more than this fraction of groups.
MIN_SLOW_GROUPS = 0.6
# Of a normal distribution: standard deviation over median absolute deviation.
DEVIATION_OVER_MAD = 1.4826
MAX_LISTED = 5


def slow_ranks(own_s: Floats, previous: Collection[int] = ()) -> list[int]:
    """Find stragglers from own seconds, (steps, ranks), of at most `KEPT_STEPS` steps. The limit is
    halved for `previous` stragglers."""
    num_steps, num_ranks = own_s.shape
    if num_steps < MIN_STEPS or num_ranks < 2:
        return []
    num_groups = min(num_steps, MAX_GROUPS)
    starts = np.linspace(0, num_steps, num_groups, endpoint=False).astype(int)
    grouped_s = np.add.reduceat(own_s, starts)
    # Both (groups, ranks): lag behind the median rank; then by rank, differences of neighbors.
    lag = grouped_s / _lower_median(grouped_s) - 1
    difference = np.diff(lag, axis=1)
    # A constant difference isn't noise. That of two ranks has √2 times a rank's deviation.
    noise = np.abs(difference - np.median(difference, axis=0)) / 2**0.5
    deviation = DEVIATION_OVER_MAD * float(np.median(noise))
    limits = np.full(num_ranks, max(MIN_DEVIATIONS * deviation, MIN_LAG))
    limits[list(previous)] /= 2
    slow_groups = (lag > limits).mean(axis=0)
    return [int(rank) for rank in np.flatnonzero(slow_groups > MIN_SLOW_GROUPS)]


def rate_without(slow: Sequence[int], samples: Floats, step_s: Floats, own_s: Floats) -> float:
    """Compute samples/s if slow ranks had the median rank's own time. Shapes: (steps,), (steps,),
    (steps, ranks)."""
    faster_s = own_s.copy()
    faster_s[:, slow] = _lower_median(own_s)
    # A step takes its slowest rank's own time and some communication.
    saved_s = own_s.max(axis=1) - faster_s.max(axis=1)
    return float(samples.sum() / (step_s - saved_s).sum())


def _lower_median(rows: Floats) -> Floats:
    return np.asarray(np.percentile(rows, 50, axis=1, method="lower", keepdims=True))


class Stragglers:
    """All ranks' latest times on rank 0. It prints stragglers when they change; `warnings` has the
    last line."""

    def __init__(self, hosts: Sequence[str]) -> None:
        self._hosts = hosts
        self._slow = list[int]()
        self.warnings = list[str]()
        # A row per step: samples, step time, own time by rank, data wait by rank.
        self._rows = np.empty((0, 2 + 2 * len(hosts)))

    def add(self, samples: float, step_s: Floats, own_s: Floats, data_wait_s: Floats) -> Summary:
        """Add steps of `samples`, in seconds, (steps,), and times of ranks, (steps, ranks). Returns
        fields to record."""
        rows = np.column_stack((np.full(len(own_s), samples), step_s, own_s, data_wait_s))
        self._rows = np.concatenate((self._rows, rows))[-KEPT_STEPS:]
        samples_by_step, step_s = self._rows[:, :2].T
        own_s, data_wait_s = np.split(self._rows[:, 2:], 2, axis=1)

        slow = slow_ranks(own_s, self._slow)
        rate = float(samples_by_step.sum() / step_s.sum())
        cost = rate_without(slow, samples_by_step, step_s, own_s) - rate
        stragglers = self._describe(slow, own_s, data_wait_s)
        self.warnings = [_warning(stragglers, cost)] if slow else []
        if slow != self._slow:
            print(*(self.warnings or ["no stragglers any more"]), flush=True)
        self._slow = slow
        return Summary(stragglers=stragglers, stragglers_cost_samples_per_s=cost)

    def _describe(self, slow: list[int], own_s: Floats, data_wait_s: Floats) -> list[Straggler]:
        """Return the stragglers, the slowest first."""
        median_s = _lower_median(own_s)
        # By rank, mean over steps.
        lag_s = (own_s - median_s).mean(axis=0).round(6)
        wait_s = (data_wait_s - _lower_median(data_wait_s)).mean(axis=0).round(6)
        percent_per_s = 100 / median_s.mean()
        return [
            Straggler(
                rank=rank,
                host=self._hosts[rank],
                lag_s=float(lag_s[rank]),
                lag_percent=round(float(percent_per_s * lag_s[rank]), 2),
                data_wait_s=float(wait_s[rank]),
            )
            for rank in sorted(slow, key=lambda rank: -lag_s[rank])
        ]


def _warning(stragglers: Sequence[Straggler], cost: float) -> str:
    parts = [
        f"rank {straggler['rank']} on {straggler['host']}, {1000 * straggler['lag_s']:+,.1f} ms/step"
        f" ({straggler['lag_percent']:+.1f}%), data wait {1000 * straggler['data_wait_s']:+,.1f} ms"
        for straggler in stragglers[:MAX_LISTED]
    ]
    if len(stragglers) > MAX_LISTED:
        parts.append(f"{len(stragglers) - MAX_LISTED} more")
    return f"stragglers cost {cost:,.1f} samples/s: {'; '.join(parts)}"
