"""How fast one set of runs is beside another: the ratio of their rates with its interval, and whether that tells them apart.

    python analysis/compare.py A B

A and B are each a folder of runs, a run directory, a log or a table; rows are paired where model and scale agree. Whether B is
faster is told by how much repeats differ among themselves, on all scales of both: three runs of each, say, taken in turns so
that whatever else the machine does falls on both. Single runs aren't told apart: the windows of one run say nothing of what
the next run of the same configuration will do.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from clap_ds.analysis.efficiency import scaling_table
from clap_ds.analysis.runs import INPUT_OPTIONS, parse_options, read_runs
from clap_ds.analysis.table import Run, Scale
from clap_ds.config.errors import UserError, run_alone
from clap_ds.record.statistics import COVERAGE as OF_RATES
from clap_ds.record.statistics import student_t

COVERAGE = 0.99
"""Of the interval of a ratio. What follows from repeats on a machine whose load changes covers less than it says: 99 % leaves
room for that."""


@dataclass(frozen=True)
class Comparison:
    """How fast B is at one scale: its samples/s/GPU over A's, each the mean of repeats."""

    a: Scale
    b: Scale
    ratio: float
    interval: tuple[float, float] | None
    """With a probability of `COVERAGE`; None where nothing was repeated."""
    spread: str
    """What repeats differ by, in words."""

    @property
    def verdict(self) -> str:
        """One sentence: faster, slower, or not told apart."""
        if not self.interval:
            return f"B / A = {self.ratio:.4f}: not told apart, as nothing was repeated; run each three times"
        low, high = self.interval
        found = "B is faster" if low > 1 else "B is slower" if high < 1 else "not told apart"
        return f"B / A = {self.ratio:.4f} ({low:.5g}–{high:.5g}, {100 * COVERAGE:g} % interval, {self.spread}): {found}"


def compare(a_runs: Sequence[Run], b_runs: Sequence[Run]) -> list[Comparison]:
    """Pair the rows of A and B by model, nodes and GPUs (two single rows whatever they are) and divide; UserError where no two
    with a rate can be paired."""
    sides = [scaling_table(runs) for runs in (a_runs, b_runs)]
    a_rows, b_rows = ([row for row in rows if row.rate] for rows in sides)
    if len(a_rows) == len(b_rows) == 1:
        return [_ratio(a_rows[0], b_rows[0])]
    found = []
    for a in a_rows:
        partners = [b for b in b_rows if (b.model, b.nodes, b.gpus) == (a.model, a.nodes, a.gpus)]
        partners.sort(key=lambda b: (b.variant != a.variant, b.scaling != a.scaling))
        found += [_ratio(a, b) for b in partners[:1]]
    if not found:
        has = [", ".join(f"{row.model_name} on {row.scale} ({row.state})" for row in rows) for rows in sides]
        raise UserError(f"A has {' and B has '.join(has)}: no model and scale in common that have a rate")
    return found


def _ratio(a: Scale, b: Scale) -> Comparison:
    """From what repeats differ by, of either or pooled."""
    ratio, spreads = (b.rate or 0.0) / (a.rate or 1.0), [spread for row in (a, b) if (spread := _spread(row))]
    if not spreads:
        return Comparison(a, b, ratio, None, "")
    degrees = sum(degrees for _, degrees in spreads)
    deviation = math.sqrt(sum(deviation**2 * degrees for deviation, degrees in spreads) / degrees)
    half = student_t(COVERAGE, degrees) * deviation * math.sqrt(1 / a.repeats + 1 / b.repeats)
    factor = math.exp(min(half, 300.0))  # two runs far apart say nothing at all
    differ = f"runs of one scale differ by {100 * deviation:.2g} %, {degrees} degrees of freedom"
    return Comparison(a, b, ratio, (ratio / factor, ratio * factor), f"of {a.repeats} and {b.repeats} runs; {differ}")


def _spread(row: Scale) -> tuple[float, int] | None:
    """Standard deviation of the logarithm of a run's rate, and its degrees of freedom, as the row's ± tells them; None where
    that isn't of repeats."""
    told, half = re.search(r"(\d+) degrees of freedom", row.uncertainty_from), row.samples_per_s_per_gpu_2sigma
    if not (told and half and row.rate):
        return None
    degrees = int(told[1])
    return half / row.rate / student_t(OF_RATES, degrees) * math.sqrt(row.repeats), degrees


def main() -> None:
    options = parse_options("Compare two sets of runs: how much faster is B than A.", "a", "b", *INPUT_OPTIONS)
    for found in compare(*(read_runs([path], options) for path in (options.a, options.b))):
        titles = dict.fromkeys(f"{row.title}, {row.scale}" for row in (found.a, found.b))
        a, b = (row.cell("samples_per_s_per_gpu", "samples_per_s_per_gpu_2sigma") for row in (found.a, found.b))
        print(f"### {' and '.join(titles)}\n\nA {a} and B {b} samples/s/{found.a.unit[:-1]}. {found.verdict}.\n")


def command() -> None:
    """Console command `clap-compare`."""
    run_alone(main)


if __name__ == "__main__":
    command()
