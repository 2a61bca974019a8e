"""Two runs or tables side by side: the ratio of their speeds with its interval, and which part of the step changed.

    python analysis/compare.py A B [--run_spread 2]

A and B are each a run directory, a folder of them, a DeepSpeed log or a table; rows are paired where model and scale
agree. Whether B is faster is told by how much repeats differ among themselves: three runs of each, say, taken in turns so
that whatever else the machine does falls on both. The windows of one run say how well that run's rate is known, and nothing
of what the next run of the same configuration will do; single runs are told apart only if `--run_spread` says how much such
runs are known to differ.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from clap_ds.analysis.efficiency import scaling_table
from clap_ds.analysis.runs import INPUT_OPTIONS, parse_options, read_runs
from clap_ds.analysis.table import Run, Scale, count_of, markdown_table
from clap_ds.config.errors import UserError, run_alone
from clap_ds.record.statistics import median_variance, student_t, window_interval

COVERAGE = 0.99
"""Of the interval of a ratio. What follows from repeats on a machine whose load changes covers less than it says: 99 % leaves
room for that."""
LEAST_COVERAGE = 0.9
"""No verdict where the interval of a single run's windows covers less."""
_FACTS = {
    "samples_per_s_per_gpu": "samples/s/GPU", "samples_per_s_per_gpu_2sigma": "±", "scaling_efficiency_percent":
    "efficiency %", "mfu_percent": "MFU % (published)", "mfu_model_percent": "MFU % (model)", "step_time_s": "step s",
    "slowest_rank_step_time_s": "slowest rank s", "data_wait_percent": "data wait %", "memory_peak_gib": "memory GiB",
    "batch_per_gpu": "batch per GPU", "state": "state",
}  # fmt: skip


@dataclass(frozen=True)
class Comparison:
    """How fast B is at one scale: its samples/s/GPU over A's (geometric means of repeats)."""

    a: Scale
    b: Scale
    ratio: float
    interval: tuple[float, float] | None
    """With a probability of `COVERAGE`."""
    interval_from: str
    doubt: str = ""
    """Why there is no verdict, whatever the interval."""

    @property
    def verdict(self) -> str:
        """One sentence: faster, slower, or not told apart."""
        between, found = self.interval_from, "not told apart"
        if self.interval:
            low, high = self.interval
            between = f"{low:.5g}–{high:.5g}, {100 * COVERAGE:g} % interval {self.interval_from}"
            if not self.doubt:
                found = "B is faster" if low > 1 else "B is slower" if high < 1 else found
        return f"B / A = {self.ratio:.4f} ({between}): {found}{self.doubt and f', {self.doubt}'}"

    @property
    def part_changes(self) -> list[tuple[str, float, float]]:
        """Parts of the step that both breakdowns have, with seconds a step in A and in B, largest change first."""
        a, b = self.a.breakdown_s, self.b.breakdown_s
        return sorted(((part, a[part], b[part]) for part in a if part in b), key=lambda item: -abs(item[2] - item[1]))


def compare(a_runs: Sequence[Run], b_runs: Sequence[Run], run_spread: float | None = None) -> list[Comparison]:
    """Pair the rows of A and B by model, nodes and GPUs (two single rows whatever they are) and divide.

    `run_spread` is the standard deviation, in per cent, of runs of one configuration, where repeats don't show it. Raises
    UserError where one of them has no rate, or no scale of one is in the other.
    """
    a_rows, b_rows = _measured(a_runs, "A"), _measured(b_runs, "B")
    if len(a_rows) == len(b_rows) == 1:
        return [_ratio(a_rows[0], b_rows[0], run_spread)]
    found = []
    for a in a_rows:
        partners = [b for b in b_rows if (b.model, b.nodes, b.gpus) == (a.model, a.nodes, a.gpus)]
        for name in ("variant", "scaling"):
            partners = [b for b in partners if getattr(a, name) == getattr(b, name)] or partners
        found += [_ratio(a, b, run_spread) for b in partners[:1]]
    if not found:
        a_scales, b_scales = (
            ", ".join(
                f"{row.model or 'model not stated'} on {count_of(row.nodes, 'node')} × {row.gpus} {row.unit}"
                for row in rows
            )
            for rows in (a_rows, b_rows)
        )
        raise UserError(f"A has {a_scales} and B has {b_scales}: no model and scale in common")
    return found


def _measured(runs: Sequence[Run], name: str) -> list[Scale]:
    rows = scaling_table(runs)
    if measured := [row for row in rows if row.rate]:
        return measured
    states = ", ".join(dict.fromkeys(row.state for row in rows))
    raise UserError(f"{name}: no rate was measured (state: {states})")


@dataclass(frozen=True)
class _Repeats:
    """Logarithms of the rates of repeats: how many there are, their mean, and the sum of squared deviations from it."""

    count: int
    mean: float
    squares: float

    @classmethod
    def of(cls, row: Scale) -> _Repeats:
        """Of a table's row, from its 2σ over repeats."""
        logs = [math.log(run.rate) for run in row.runs if run.rate]
        mean, first = fmean(logs), row.runs[0]
        if len(logs) == 1 and first.kind == "table" and first.repeats > 1 and first.interval and first.rate:
            deviation = (first.interval[1] - first.interval[0]) / 4 / first.rate
            return cls(first.repeats, mean, (first.repeats - 1) * deviation**2)
        return cls(len(logs), mean, sum((value - mean) ** 2 for value in logs))


def _ratio(a: Scale, b: Scale, run_spread: float | None) -> Comparison:
    """From what repeats differ by, pooled, if there are two more runs than sides; else from windows and `run_spread`."""
    sides = _Repeats.of(a), _Repeats.of(b)
    difference, degrees = sides[1].mean - sides[0].mean, sum(side.count - 1 for side in sides)
    counts = " and ".join(str(side.count) for side in sides)
    if degrees >= 2:
        variance = sum(side.squares for side in sides) / degrees * sum(1 / side.count for side in sides)
        described, doubt = f"from what {counts} runs differ by among themselves{_in_turns(a, b)}", ""
    else:
        errors = [_error_of_windows(row.runs[0]) for row in (a, b)]
        if None in errors or degrees:
            reason = f"no interval from {counts} runs" if degrees else "no interval: not both state their spread"
            return Comparison(a, b, math.exp(difference), None, reason, _doubt(a, b, run_spread))
        variance = sum(filter(None, errors)) + 2 * ((run_spread or 0) / 100) ** 2
        degrees = min(len(row.runs[0].windows) or 3 for row in (a, b)) - 1
        windows = " and ".join(row.uncertainty_from.removesuffix(" of 1 run") for row in (a, b))
        known = f" and a spread between runs of {run_spread:g} %" if run_spread else " alone"
        described, doubt = f"from windows{known}; {windows}", _doubt(a, b, run_spread)
    half = min(student_t(COVERAGE, degrees) * math.sqrt(variance), 300.0)  # two windows far apart say nothing at all
    interval = math.exp(difference - half), math.exp(difference + half)
    return Comparison(a, b, math.exp(difference), interval, described, doubt)


def _in_turns(a: Scale, b: Scale) -> str:
    """A word of warning where all runs of one side were over before the first of the other."""
    ended = [[run.finished for run in row.runs] for row in (a, b)]
    known = all(map(all, ended))
    first, last = sorted(ended, key=min)
    return (
        "; not taken in turns, so the machine itself may have changed between"
        if known and max(first) < min(last)
        else ""
    )


def _error_of_windows(run: Run) -> float | None:
    """Variance of the logarithm of a single run's rate, as far as its windows tell; None where it isn't known."""
    if len(run.windows) > 1:
        return median_variance([math.log(rate) for rate in run.windows])
    return ((run.interval[1] - run.interval[0]) / 4 / run.rate) ** 2 if run.interval and run.rate else None


def _doubt(a: Scale, b: Scale, run_spread: float | None) -> str:
    """Why runs that are no repeats can't be told apart."""
    if not run_spread:
        return (
            "as too few runs don't show how much runs of one configuration differ: repeat them (three of each), or say "
            "what is known (--run_spread)"
        )
    covered = min(
        (window_interval(run.windows).coverage for row in (a, b) for run in row.runs if run.windows), default=1.0
    )
    return f"as an interval of windows covers {100 * covered:.3g} % only" if covered < LEAST_COVERAGE else ""


def render(comparisons: Sequence[Comparison]) -> str:
    """Everything `compare` found, as Markdown."""
    parts = []
    for comparison in comparisons:
        a, b = comparison.a, comparison.b
        titles = dict.fromkeys(f"{row.title}, {count_of(row.nodes, 'node')} × {row.gpus} {row.unit}" for row in (a, b))
        cells = ([label, a.cell(column), b.cell(column)] for column, label in _FACTS.items())
        facts = [row for row in cells if row[1] or row[2]]
        blocks = [f"### {' and '.join(titles)}", comparison.verdict, markdown_table(("", "A", "B"), facts)]
        parts.append("\n\n".join([*blocks, *_changes(comparison.part_changes)]) + "\n")
    return "\n".join(parts)


def _changes(changes: Sequence[tuple[str, float, float]]) -> list[str]:
    if not changes:
        return ["Which part changed can't be told: not both have a breakdown."]
    body = [
        [part.replace("_", " "), f"{1000 * a:.3f}", f"{1000 * b:.3f}", f"{1000 * (b - a):+.3f}",
         f"{100 * (b / a - 1):+.1f}" if a else ""]
        for part, a, b in changes
    ]  # fmt: skip
    table = markdown_table(("part of the step", "A ms", "B ms", "change ms", "change %"), body)
    part, a, b = changes[0]
    if a == b:
        return [table, "No part of the step changed."]
    total = sum(b - a for _, a, b in changes)
    text = (
        f"Largest change: {part.replace('_', ' ')}, {1000 * (b - a):+.3f} ms a step; all parts together "
        f"{1000 * total:+.3f} ms (from an instrumented pass, whose parts need not add up to the timed step)."
    )
    return [table, text]


def main() -> None:
    description = "Compare two runs or tables: how much faster is B than A, and where."
    options = parse_options(description, "a", "b", "--run_spread", *INPUT_OPTIONS)
    found = compare(read_runs([options.a], options), read_runs([options.b], options), options.run_spread)
    print(render(found), end="")


if __name__ == "__main__":
    run_alone(main)
