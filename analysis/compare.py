"""Two runs or tables side by side: the ratio of their speeds with its interval, and which part of the step changed.

    python analysis/compare.py A B [--run_spread 2]

A and B are each a run directory, a folder of them, a DeepSpeed log or a table; rows are paired where model and scale
agree. Whether B is faster is told by how much repeats differ among themselves, on all scales of both: three runs of each,
say, taken in turns so that whatever else the machine does falls on both. The windows of one run say how well that run's rate
is known, and nothing of what the next run of the same configuration will do; single runs are told apart only if
`--run_spread` says how much such runs are known to differ.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from clap_ds.analysis.efficiency import scaling_table
from clap_ds.analysis.repeats import degrees_of
from clap_ds.analysis.runs import INPUT_OPTIONS, parse_options, read_runs
from clap_ds.analysis.table import Run, Scale, count_of, markdown_table
from clap_ds.config.errors import UserError, run_alone
from clap_ds.record.statistics import COVERAGE as OF_RATES
from clap_ds.record.statistics import student_t

COVERAGE = 0.99
"""Of the interval of a ratio. What follows from repeats on a machine whose load changes covers less than it says: 99 % leaves
room for that."""
SINGLE_RUNS = (
    "as single runs don't show how much runs of one configuration differ: repeat them (three of each), or say what is known "
    "(--run_spread)"
)
_FACTS = {
    "samples_per_s_per_gpu": "samples/s/GPU", "samples_per_s_per_gpu_2sigma": "±", "scaling_efficiency_percent":
    "efficiency %", "mfu_percent": "MFU % (published)", "mfu_model_percent": "MFU % (model)", "step_time_s": "step s",
    "slowest_rank_step_time_s": "slowest rank s", "data_wait_percent": "data wait %", "memory_peak_gib": "memory GiB",
    "batch_per_gpu": "batch per GPU", "state": "state",
}  # fmt: skip


@dataclass(frozen=True)
class Comparison:
    """How fast B is at one scale: its samples/s/GPU over A's, each the mean of repeats."""

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
        scales = (
            ", ".join(f"{row.model or 'model not stated'} on {_scale(row)}" for row in rows)
            for rows in (a_rows, b_rows)
        )
        raise UserError(f"A has {' and B has '.join(scales)}: no model and scale in common")
    return found


def _scale(row: Scale) -> str:
    return f"{count_of(row.nodes, 'node')} × {row.gpus} {row.unit}"


def _measured(runs: Sequence[Run], name: str) -> list[Scale]:
    rows = scaling_table(runs)
    if measured := [row for row in rows if row.rate]:
        return measured
    states = ", ".join(dict.fromkeys(row.state for row in rows))
    raise UserError(f"{name}: no rate was measured (state: {states})")


def _ratio(a: Scale, b: Scale, run_spread: float | None) -> Comparison:
    """From what repeats differ by, of either or pooled; where nothing was repeated, from intervals of windows."""
    ratio, errors = (b.rate or 0.0) / (a.rate or 1.0), [_error(row) for row in (a, b)]
    repeated = [
        (error**2 * row.repeats, degrees)
        for row, (error, degrees) in zip((a, b), errors, strict=True)
        if degrees and "degrees of freedom" in row.uncertainty_from
    ]
    if repeated:
        degrees = sum(degrees for _, degrees in repeated)
        of_run = sum(square * degrees for square, degrees in repeated) / degrees
        variance, doubt = of_run * (1 / a.repeats + 1 / b.repeats), ""
        differ = f"runs of one scale differ by {100 * math.sqrt(of_run):.2g} %, {degrees} degrees of freedom"
        described = f"of {a.repeats} and {b.repeats} runs; {differ}{_in_turns(a, b)}"
    else:
        degrees = min(degrees for _, degrees in errors)
        variance = sum(error**2 for error, _ in errors) + 2 * ((run_spread or 0) / 100) ** 2
        stated = " and ".join(row.uncertainty_from.removesuffix(" of 1 run") for row in (a, b))
        described = f"from {stated}" + (f"; runs are said to differ by {run_spread:g} %" if run_spread else "")
        doubt = "" if run_spread else SINGLE_RUNS
    if not degrees:
        return Comparison(a, b, ratio, None, "no interval: not both state one of 95 %", doubt)
    factor = math.exp(
        min(student_t(COVERAGE, degrees) * math.sqrt(variance), 300.0)
    )  # two runs far apart say nothing at all
    return Comparison(a, b, ratio, (ratio / factor, ratio * factor), described, doubt)


def _error(row: Scale) -> tuple[float, int]:
    """Standard error of the logarithm of a row's rate and its degrees of freedom; zeros where no 95 % interval is known."""
    degrees, half = degrees_of(row.uncertainty_from), row.samples_per_s_per_gpu_2sigma
    return (half / row.rate / student_t(OF_RATES, degrees), degrees) if degrees and half and row.rate else (0.0, 0)


def _in_turns(a: Scale, b: Scale) -> str:
    """A word of warning where all runs of one side were over before the first of the other."""
    first, last = sorted(([run.finished for run in row.runs] for row in (a, b)), key=min)
    warning = "; not taken in turns, so the machine itself may have changed between"
    return warning if all([*first, *last]) and max(first) < min(last) else ""


def render(comparisons: Sequence[Comparison]) -> str:
    """Everything `compare` found, as Markdown."""
    parts = []
    for comparison in comparisons:
        a, b = comparison.a, comparison.b
        titles = dict.fromkeys(f"{row.title}, {_scale(row)}" for row in (a, b))
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
    total = sum(b - a for _, a, b in changes)
    instrumented = "(from an instrumented pass, whose parts need not add up to the timed step)"
    text = f"Largest change: {body[0][0]}, {body[0][3]} ms a step; all parts together {1000 * total:+.3f} ms {instrumented}."
    return [table, text if changes[0][1] != changes[0][2] else "No part of the step changed."]


def main() -> None:
    description = "Compare two runs or tables: how much faster is B than A, and where."
    options = parse_options(description, "a", "b", "--run_spread", *INPUT_OPTIONS)
    found = compare(read_runs([options.a], options), read_runs([options.b], options), options.run_spread)
    print(render(found), end="")


def command() -> None:
    """Console command `clap-compare`."""
    run_alone(main)


if __name__ == "__main__":
    command()
