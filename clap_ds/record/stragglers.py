"""Who makes the others wait.

A rank's own time of a step is the step's without what it stood still for other ranks (`clock.standing_still`); its wait for
data is part of it. A rank is slow whose own time lies above the median rank's, in most of the steps of late, by more than it
usually varies. Answers don't depend on how many steps a window has. A link that is slow has all ranks wait, and is nobody's.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from clap_ds.record.schema import SlowRank, Summary
from clap_ds.record.stream import Stream

Floats = np.ndarray[Any, np.dtype[np.float64]]

KEPT_STEPS, GROUPS, FEWEST_STEPS = 300, 30, 20
"""Ranks are judged by the last steps, neighbours taken together in so many groups, as some wait for data now and then."""
MOST = 0.6
"""Share of the groups in which a slow rank is behind."""
SPREADS, FLOOR = 3.0, 0.03
"""Behind is who is so many standard deviations above the median, and this share of it; half as far, who was told before."""
NAMED = 5
"""Ranks that a message names, at most."""


def slow_ranks(own_s: Floats, before: Collection[int] = ()) -> list[int]:
    """Ranks that are slower than the others; none in fewer than `FEWEST_STEPS` steps, and none of one rank.

    The usual spread is the larger of two standard deviations, estimated by lower medians, which slow ranks don't move: of all
    lags behind the (lower) median rank, which is 0 on two ranks; and of how the difference of two ranks changes with time.

    Args:
        own_s: seconds of each step, (steps, ranks).
        before: ranks that were slow when last asked.
    """
    if len(own_s) < FEWEST_STEPS or own_s.shape[1] < 2:
        return []
    grouped_s = np.add.reduceat(own_s, np.linspace(0, len(own_s), min(len(own_s), GROUPS), endpoint=False).astype(int))
    lag = grouped_s / _lower_median(grouped_s) - 1
    difference = np.diff(lag, axis=1)
    change = np.abs(difference - np.median(difference, axis=0)).reshape(1, -1) / 2**0.5
    deviation = np.abs(lag - _lower_median(lag.reshape(1, -1))).reshape(1, -1)
    spread = 1.4826 * max(_lower_median(each).item() for each in (change, deviation))  # of a normal distribution
    limit = np.full(lag.shape[1], max(SPREADS * spread, FLOOR))
    limit[list(before)] /= 2
    return [int(rank) for rank in np.flatnonzero((lag > limit).mean(axis=0) > MOST)]


def rate_without(slow: Sequence[int], samples: Floats, step_s: Floats, own_s: Floats) -> float:
    """Samples/s of steps that took `step_s`, both (steps,), if slow ranks had the median rank's own time, (steps, ranks): each
    step would be shorter by what the longest own time would be."""
    others_s = own_s.copy()
    others_s[:, slow] = np.minimum(own_s[:, slow], _lower_median(own_s))
    return float(samples.sum() / (step_s - own_s.max(axis=1) + others_s.max(axis=1)).sum())


def _lower_median(values: Floats) -> Floats:
    """Of each row, (rows, 1)."""
    middle = (values.shape[1] - 1) // 2
    return np.partition(values, middle, axis=1)[:, middle : middle + 1]


class Stragglers:
    """Told the times of all ranks window by window, on rank 0, it says who is slow as soon as that is known or changes.

    It leaves `lags.jsonl`: a line with the hosts, and one each 30 s, later each two hundredth of the run's age (a thousand in a
    week), with how far, in whole percents, each host's slowest rank was behind the median rank since the line before.

    Args:
        hosts: of every rank.
        folder: the run directory.

    Attributes:
        warnings: what was said last, if anybody is slow.
    """

    def __init__(self, hosts: Sequence[str], folder: Path) -> None:
        self._hosts, self._slow, self.warnings = hosts, list[int](), list[str]()
        self._kept: tuple[Floats, ...] = ()
        self._lags, self._since_s = Stream(folder / "lags.jsonl"), np.zeros(len(hosts))
        self._began_s = self._written_s = time.monotonic()

    def add(
        self, samples: Sequence[float], step_s: Sequence[float] | Floats, own_s: Floats, data_wait_s: Floats
    ) -> Summary:
        """A window's steps: their samples on all ranks and seconds, (steps,), and each rank's own time and wait for data,
        (steps, ranks). Returns what is to be recorded."""
        new = (np.asarray(samples, float), np.asarray(step_s, float), own_s, data_wait_s)
        pairs = zip(self._kept or [each[:0] for each in new], new, strict=True)
        self._kept = tuple(np.concatenate(pair)[-KEPT_STEPS:] for pair in pairs)
        self._write_lags(own_s)
        before, self._slow = self._slow, slow_ranks(self._kept[2], self._slow)
        found = self._found()
        self.warnings = [_words(found)] if self._slow else []
        if self._slow != before:
            print(*(self.warnings or ["no rank is slower than the others any more"]), flush=True)
        return found

    def _found(self) -> Summary:
        samples, step_s, own_s, data_wait_s = self._kept
        behind_s, data_s = (
            (each - _lower_median(each)).mean(axis=0).round(6).tolist() for each in (own_s, data_wait_s)
        )
        usual = float(_lower_median(own_s).mean()) / 100
        slow = [
            SlowRank(
                rank=rank, host=self._hosts[rank], behind_s=behind_s[rank],
                behind_percent=round(behind_s[rank] / usual, 2), data_wait_s=data_s[rank],
            )
            for rank in sorted(self._slow, key=lambda rank: -behind_s[rank])
        ]  # fmt: skip
        cost = rate_without(self._slow, samples, step_s, own_s) - float(samples.sum() / step_s.sum())
        return Summary(slow_ranks=slow, slow_ranks_cost_samples_per_s=cost)

    def _write_lags(self, own_s: Floats) -> None:
        self._since_s += own_s.sum(axis=0)
        now_s, hosts = time.monotonic(), np.array(self._hosts)
        if now_s - self._written_s < max(30.0, (now_s - self._began_s) / 200):
            return
        starts = np.flatnonzero(np.append(True, hosts[1:] != hosts[:-1]))  # a host's ranks are neighbours
        if self._written_s == self._began_s:
            self._lags.append({"hosts": hosts[starts].tolist()})
        behind = np.maximum.reduceat(100 * (self._since_s / _lower_median(self._since_s[None])[0] - 1), starts)
        self._lags.append({"time": round(time.time()), "behind_percent": behind.round().astype(int).tolist()})
        self._since_s, self._written_s = np.zeros(len(hosts)), now_s


def _words(found: Summary) -> str:
    slow, cost = found["slow_ranks"], found["slow_ranks_cost_samples_per_s"]
    each = [
        f"rank {one['rank']} on {one['host']} by {1000 * one['behind_s']:,.1f} ms a step ({one['behind_percent']:.1f} %),"
        f" of which {1000 * one['data_wait_s']:,.1f} waiting for data"
        for one in slow[:NAMED]
    ]
    more = f"; and {len(slow) - NAMED} more" * (len(slow) > NAMED)
    return f"slower than the median rank, at a cost of {cost:,.1f} samples/s: {'; '.join(each)}{more}"
