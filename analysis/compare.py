"""How fast one set of runs is beside another: the ratio of their rates with its interval, and whether that tells them apart.

    python analysis/compare.py A B

A and B are each a folder of runs, a run directory, a log or a table; rows are paired where model, variant and scale agree.
Whether B is faster is told by how much repeats differ among themselves, on all scales of both: single runs aren't told apart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

from clap_ds.analysis.aggregate import RunSpread, pooled_spread
from clap_ds.analysis.runs import input_parser, read_runs
from clap_ds.analysis.scaling import scaling_table
from clap_ds.analysis.table import Run, Scale
from clap_ds.config.errors import UserError, run_alone
from clap_ds.run_records.intervals import student_t

COVERAGE = 0.99
"""Of the interval of a ratio. What follows from repeats on a machine whose load changes covers less than it says: 99 % leaves
room for that."""


def pairs(a_runs: Sequence[Run], b_runs: Sequence[Run]) -> list[tuple[Scale, Scale, RunSpread | None]]:
    """Rows of A and B that are alike (two single rows whatever they are), and how much repeats differ, None where nothing was
    repeated; UserError where no two are."""
    sides = [scaling_table(runs) for runs in (a_runs, b_runs)]
    spread = pooled_spread(row.runs for rows in sides for row in rows)
    a_rows, b_rows = ([row for row in rows if row.rate] for rows in sides)
    if len(a_rows) == len(b_rows) == 1:
        return [(a_rows[0], b_rows[0], spread)]
    names = ("model", "variant", "nodes", "gpus")
    found = [
        (a, b, spread) for a in a_rows for b in b_rows if all(getattr(a, name) == getattr(b, name) for name in names)
    ]
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
    ratio = f"B / A = {(b.rate or 0.0) / (a.rate or 1.0):.4f}"
    if not spread:
        return f"{ratio}: not told apart, as nothing was repeated; run each three times"
    low, high = interval(a, b, spread)
    found = "B is faster" if low > 1 else "B is slower" if high < 1 else "not told apart"
    differ = f"runs of one scale differ by {100 * spread.deviation:.2g} %, {spread.degrees} degrees of freedom"
    of = f"{100 * COVERAGE:g} % interval, of {a.repeats} and {b.repeats} runs; {differ}"
    return f"{ratio} ({low:.5g}–{high:.5g}, {of}): {found}"


def main() -> None:
    options = input_parser("Compare two sets of runs, A and B: how much faster is B than A.").parse_args()
    if len(options.inputs) != 2:
        raise UserError(f"expected two inputs, A and B; found {len(options.inputs)}")
    for a, b, spread in pairs(*(read_runs([path], options) for path in options.inputs)):
        titles = dict.fromkeys(f"{row.title}, {row.scale}" for row in (a, b))
        rates = [row.cell("samples_per_s_per_gpu", "samples_per_s_per_gpu_2sigma") for row in (a, b)]
        told = f"A {rates[0]} and B {rates[1]} samples/s/{a.unit[:-1]}. {verdict(a, b, spread)}."
        print(f"### {' and '.join(titles)}\n\n{told}\n")


command = partial(run_alone, main)

if __name__ == "__main__":
    command()
