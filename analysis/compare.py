"""Compare the throughput of two sets of runs: their ratio with its interval, and whether the difference is significant.

Examples:
    clap-ds compare runs/before runs/after

A and B are each a folder of runs, a run directory, a log or a table. Rows of the same model, variant and scale are paired.
Significance follows from the spread of repeats, pooled over all scales of both; single runs don't suffice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import attrgetter

from clap_ds.analysis.aggregate import RunSpread, pooled_spread
from clap_ds.analysis.runs import input_parser, read_runs
from clap_ds.analysis.scaling import scaling_table
from clap_ds.analysis.table import Run, Scale
from clap_ds.config.errors import UserError, run_alone
from clap_ds.run_records.intervals import student_t

COVERAGE = 0.99
"""Coverage of a ratio's interval: not 95%, because intervals from repeats cover less under changing load."""


def pairs(a_runs: Sequence[Run], b_runs: Sequence[Run]) -> list[tuple[Scale, Scale, RunSpread | None]]:
    """Pair rows of A and B by model, variant and scale. Return them with the spread of repeats, None without repeats.
    UserError if no rows match."""
    sides = [scaling_table(runs) for runs in (a_runs, b_runs)]
    spread = pooled_spread(row.runs for rows in sides for row in rows)
    key = attrgetter("model", "variant", "nodes", "gpus")
    found = [(a, b, spread) for a in sides[0] for b in sides[1] if a.rate and b.rate and key(a) == key(b)]
    if not found:
        raise UserError("A and B have no model and scale with a rate in common")
    return found


def interval(a: Scale, b: Scale, spread: RunSpread) -> tuple[float, float]:
    """Return the interval of B's rate over A's with coverage `COVERAGE`."""
    ratio = (b.rate or 0.0) / (a.rate or 1.0)
    half = student_t(COVERAGE, spread.degrees) * spread.deviation * math.sqrt(1 / a.repeats + 1 / b.repeats)
    factor = math.exp(min(half, 300.0))  # avoid overflow
    return ratio / factor, ratio * factor


def verdict(a: Scale, b: Scale, spread: RunSpread | None) -> str:
    ratio = f"B / A = {(b.rate or 0.0) / (a.rate or 1.0):.4f}"
    if not spread:
        return f"{ratio}: significance unknown without repeats; run each three times"
    low, high = interval(a, b, spread)
    found = "B is faster" if low > 1 else "B is slower" if high < 1 else "no significant difference"
    differ = f"runs of one scale differ by {100 * spread.deviation:.2g}%, {spread.degrees} degrees of freedom"
    of = f"{100 * COVERAGE:g}% interval of {a.repeats} and {b.repeats} runs; {differ}"
    return f"{ratio} ({low:.5g}–{high:.5g}, {of}): {found}"


def main(argv: Sequence[str] | None = None) -> None:
    options = input_parser(__doc__).parse_args(argv)
    if len(options.inputs) != 2:
        raise UserError(f"expected two inputs, A and B; found {len(options.inputs)}")
    for a, b, spread in pairs(*(read_runs([path], options) for path in options.inputs)):
        titles = dict.fromkeys(f"{row.title}, {row.scale}" for row in (a, b))
        rates = [row.cell("samples_per_s_per_gpu") for row in (a, b)]
        told = f"A {rates[0]} and B {rates[1]} samples/s/{a.unit}. {verdict(a, b, spread)}."
        print(f"### {' and '.join(titles)}\n\n{told}\n")


if __name__ == "__main__":
    run_alone(main)
