"""Repeats of one scale → one row: their mean, and how sure it is.

± is half the 95 % interval by Student's t. The spread of runs is pooled over all repeated scales of the table, but a scale that
spreads far more than the others has its own. The ± of a scale that ran once is half the interval of its windows.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from statistics import fmean
from typing import Any

import numpy as np

from clap_ds.analysis.published import published_mfu_percent
from clap_ds.analysis.series import global_batch
from clap_ds.analysis.table import Run, Scale
from clap_ds.record.plausible import doubtful_mfu
from clap_ds.record.schema import STEP_PHASES
from clap_ds.record.statistics import COVERAGE, student_t

GOOD_STATES = ("completed", "published", "unknown")
"""A log without a launcher's last line doesn't say how it ended; its rate counts."""
_IDENTITY = (
    "nodes", "gpus", "model", "scaling", "device", "precision", "text_tokens", "variant", "micro_batch", "batch_per_gpu",
)  # fmt: skip
_AVERAGED = ("samples_per_s_per_gpu", "engine_samples_per_s_per_gpu", "achieved_tflops", "mfu_model_percent", "step_time_s",
             "slowest_rank_step_time_s", "data_wait_percent", *(f"{part}_s" for part in STEP_PHASES))  # fmt: skip


@dataclass(frozen=True)
class RunSpread:
    """How much runs of one configuration differ."""

    deviation: float
    """Of the logarithm of the rate."""
    degrees: int
    """Of freedom: runs less scales."""
    runs: int

    def half_width(self, repeats: int) -> float:
        """Of the interval of a mean of so many runs, as a share of it."""
        return student_t(COVERAGE, self.degrees) * self.deviation / math.sqrt(repeats)

    def stands_out_of(self, pooled: RunSpread) -> bool:
        """Whether it is larger than that of the pool's other runs by more than chance (F test at 1 %)."""
        degrees = pooled.degrees - self.degrees
        if degrees < 1:
            return False
        others = (pooled.degrees * pooled.deviation**2 - self.degrees * self.deviation**2) / degrees
        return self.deviation**2 > _by_chance(self.degrees, degrees) * others

    def label(self) -> str:
        differ = f"runs of one scale differ by {100 * self.deviation:.2g} %"
        return f"95 % by Student's t, {differ} (of {self.runs} runs, {self.degrees} degrees of freedom)"


@cache
def _by_chance(degrees: int, others: int) -> float:
    """What the ratio of two equal variances of so many degrees of freedom exceeds in one case of a hundred."""
    generator = np.random.default_rng(0)
    above, below = (generator.chisquare(count, 20_000) / count for count in (degrees, others))
    return float(np.quantile(above / below, 0.99))


def counted(runs: Sequence[Run]) -> list[Run]:
    """Runs of one scale that its rate is the mean of: those that completed, or all with a rate where none did."""
    with_rate = [run for run in runs if run.rate]
    return [run for run in with_rate if run.state in GOOD_STATES] or with_rate


def pooled_spread(scales: Iterable[Sequence[Run]]) -> RunSpread | None:
    groups = [[math.log(run.rate) for run in counted(runs) if run.rate] for runs in scales]
    repeated = [logs for logs in groups if len(logs) > 1]
    if not repeated:
        return None
    squares = sum((value - fmean(logs)) ** 2 for logs in repeated for value in logs)
    degrees = sum(len(logs) - 1 for logs in repeated)
    return RunSpread(math.sqrt(squares / degrees), degrees, sum(map(len, repeated)))


def combine_repeats(runs: Sequence[Run], spread: RunSpread | None = None) -> Scale:
    """One row from the runs of one series at one scale. Rates stay empty where none of them measured one."""
    first, used = runs[0], counted(runs)
    known: dict[str, Any] = {name: getattr(first, name) for name in _IDENTITY}
    for name in _AVERAGED:
        values = [value for run in used if (value := getattr(run, name)) is not None]
        known[name] = fmean(values) if values else None
    rate = known["samples_per_s_per_gpu"]
    peak = next(filter(None, (run.peak_tflops for run in used)), None)
    mfu = published_mfu_percent(first.model, rate, peak) if rate else None
    half, half_from = _uncertainty(used, spread)
    states = Counter(run.state for run in runs)
    row = Scale(
        runs=tuple(used), **known, mfu_percent=mfu, peak_tflops=peak,
        samples_per_s=rate and rate * first.gpus, samples_per_s_per_gpu_2sigma=half,
        uncertainty_from=half_from, repeats=sum(run.repeats or 1 for run in used), global_batch=global_batch(first),
        memory_peak_gib=max((run.memory_peak_gib for run in runs if run.memory_peak_gib), default=None),
        state=first.state if len(states) == 1 else ", ".join(f"{n} {state}" for state, n in states.most_common()),
        notes="; ".join(dict.fromkeys([*_notes(runs, used), *doubtful_mfu(mfu, known["mfu_model_percent"])])),
    )  # fmt: skip
    if not (exposed := row.exposed_communication_s):
        return row
    return replace(row, exposed_communication_percent=100 * exposed / sum(row.breakdown_s.values()))


def _uncertainty(used: Sequence[Run], pooled: RunSpread | None) -> tuple[float | None, str]:
    if pooled and (own := pooled_spread([used])):
        spread = own if own.stands_out_of(pooled) else pooled
        return fmean(run.rate or 0.0 for run in used) * spread.half_width(len(used)), spread.label()
    low, high = used[0].interval or (0.0, 0.0) if used else (0.0, 0.0)
    return ((high - low) / 2, used[0].uncertainty_from) if high else (None, "")


def _notes(runs: Sequence[Run], used: Sequence[Run]) -> Iterator[str]:
    for run in runs:
        yield from filter(None, run.notes.split("; "))
    if used and used[0].state not in GOOD_STATES:
        yield "rate of a run that did not complete"
    if left_out := sum(bool(run.rate) for run in runs) - len(used):
        yield f"{left_out} with a rate but not completed left out of the mean"
    for run in runs:
        if run.error:
            yield f"{run.state}: {' '.join(run.error.split())[:120].replace(';', ',')}"
