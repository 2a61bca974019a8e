"""How fast one set of runs is beside another: the ratio of their rates with its interval, and whether that tells them apart.

    python analysis/compare.py A B

A and B are each a folder of runs, a run directory, a log or a table; rows are paired where model and scale agree. Whether B is
faster is told by how much repeats differ among themselves, on all scales of both. Single runs aren't told apart: the windows of
one run say nothing of what the next run of the same configuration will do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

from clap_ds.analysis.efficiency import scaling_table
from clap_ds.analysis.repeats import RunSpread, pooled_spread
from clap_ds.analysis.runs import input_parser, read_runs
from clap_ds.analysis.table import Run, Scale
from clap_ds.config.errors import UserError, run_alone
from clap_ds.record.statistics import student_t

COVERAGE = 0.99
"""Of the interval of a ratio. What follows from repeats on a machine whose load changes covers less than it says: 99 % leaves
room for that."""


def pairs(a_runs: Sequence[Run], b_runs: Sequence[Run]) -> list[tuple[Scale, Scale, RunSpread | None]]:
    """Rows of A and B of the same model, nodes and GPUs (two single rows whatever they are), and how much repeats differ on all
    scales of both, None where nothing was repeated; UserError where no two that have a rate are alike."""
    sides = [scaling_table(runs) for runs in (a_runs, b_runs)]
    spread = pooled_spread(row.runs for rows in sides for row in rows)
    a_rows, b_rows = ([row for row in rows if row.rate] for rows in sides)
    if len(a_rows) == len(b_rows) == 1:
        return [(a_rows[0], b_rows[0], spread)]
    found = []
    for a in a_rows:
        partners = [b for b in b_rows if (b.model, b.nodes, b.gpus) == (a.model, a.nodes, a.gpus)]
        partners.sort(key=lambda b: (b.variant != a.variant, b.scaling != a.scaling))
        found += [(a, b, spread) for b in partners[:1]]
    if not found:
        raise UserError("A and B: no model and scale in common that have a rate")
    return found


def interval(a: Scale, b: Scale, spread: RunSpread) -> tuple[float, float]:
    """Where B's rate over A's lies with a probability of `COVERAGE`."""
    ratio = (b.rate or 0.0) / (a.rate or 1.0)
    half = student_t(COVERAGE, spread.degrees) * spread.deviation * math.sqrt(1 / a.repeats + 1 / b.repeats)
    factor = math.exp(min(half, 300.0))  # two runs far apart say nothing at all
    return ratio / factor, ratio * factor


def verdict(a: Scale, b: Scale, spread: RunSpread | None) -> str:
    """One sentence: faster, slower, or not told apart."""
    ratio = f"B / A = {(b.rate or 0.0) / (a.rate or 1.0):.4f}"
    if not spread:
        return f"{ratio}: not told apart, as nothing was repeated; run each three times"
    low, high = interval(a, b, spread)
    found = "B is faster" if low > 1 else "B is slower" if high < 1 else "not told apart"
    differ = f"runs of one scale differ by {100 * spread.deviation:.2g} %, {spread.degrees} degrees of freedom"
    of = f"{100 * COVERAGE:g} % interval, of {a.repeats} and {b.repeats} runs; {differ}"
    return f"{ratio} ({low:.5g}–{high:.5g}, {of}): {found}"


def main() -> None:
    options = input_parser("Compare two sets of runs: how much faster is B than A.", "A", "B").parse_args()
    for a, b, spread in pairs(*(read_runs([path], options) for path in (options.A, options.B))):
        titles = dict.fromkeys(f"{row.title}, {row.scale}" for row in (a, b))
        rates = [row.cell("samples_per_s_per_gpu", "samples_per_s_per_gpu_2sigma") for row in (a, b)]
        told = f"A {rates[0]} and B {rates[1]} samples/s/{a.unit[:-1]}. {verdict(a, b, spread)}."
        print(f"### {' and '.join(titles)}\n\n{told}\n")


command = partial(run_alone, main)

if __name__ == "__main__":
    command()
