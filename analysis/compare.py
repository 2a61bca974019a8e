"""Compare the throughput of two sets of runs: their ratio with its interval, and whether the
difference is significant.

Examples:
    clap-ds compare runs/before runs/after

A and B are each a folder of runs, a run directory, a log or a table. Rows of the same model,
variant and scale are paired. Significance follows from the spread of each row's repeats (Welch's
interval). Single runs don't suffice, and two on a side seldom do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product

from clap_ds.analysis.aggregate import pool_spread
from clap_ds.analysis.runs import input_parser, read_runs
from clap_ds.analysis.scaling import scaling_table
from clap_ds.analysis.table import Run, Scale
from clap_ds.analysis.weak_scaling import list_doubts
from clap_ds.metrics.intervals import student_t
from clap_ds.utils.errors import UserError, run_alone

# Coverage of a ratio's interval: not 95%, because intervals from repeats cover less under changing
# load.
COVERAGE = 0.99


def pair_rows(a_runs: Sequence[Run], b_runs: Sequence[Run]) -> list[tuple[Scale, Scale]]:
    """Pair rows of A and B by model, variant and scale. A model that isn't stated matches any.
    UserError if no rows match."""
    a_rows = [row for row in scaling_table(a_runs) if row.rate]
    b_rows = [row for row in scaling_table(b_runs) if row.rate]
    # Tables are small enough to try all pairs.
    pairs = [(a, b) for a, b in product(a_rows, b_rows) if _is_pair(a, b)]
    if not pairs:
        raise UserError(
            "A and B have no model, variant and scale with a rate in common."
            f" A: {_list_scales(a_rows)}. B: {_list_scales(b_rows)}"
        )
    return pairs


def _is_pair(a: Scale, b: Scale) -> bool:
    # A table without a model column has its own name as model.
    models = {row.model for row in (a, b) if row.model != row.runs[0].default_model}
    return len(models) < 2 and (a.variant, a.nodes, a.gpus) == (b.variant, b.nodes, b.gpus)


def _list_scales(rows: Sequence[Scale]) -> str:
    return ", ".join(f"{row.title} on {row.scale}" for row in rows)


def ratio_interval(a: Scale, b: Scale) -> tuple[float, float] | None:
    """Return Welch's interval of B's rate over A's with coverage `COVERAGE`; None unless both sides
    were repeated.

    Two guards keep its coverage with few runs of unequal spreads (simulated in
    tests/analysis/test_compare.py): the larger spread stands for both sides, and the degrees of
    freedom are at most 1.5 times those of the smaller side.
    """
    a_spread = pool_spread([a.runs])
    b_spread = pool_spread([b.runs])
    if a_spread is None or b_spread is None:
        return None
    # Variances of the means, and the degrees of freedom of their sum (Welch–Satterthwaite).
    a_variance = a_spread.deviation**2 / a_spread.runs
    b_variance = b_spread.deviation**2 / b_spread.runs
    weights = a_variance**2 / a_spread.degrees + b_variance**2 / b_spread.degrees
    degrees = (a_variance + b_variance) ** 2 / weights
    degrees = min(degrees, 1.5 * min(a_spread.degrees, b_spread.degrees))
    deviation = max(a_spread.deviation, b_spread.deviation)
    error = deviation * math.sqrt(1 / a_spread.runs + 1 / b_spread.runs)
    # Few values, for the cache of `student_t`.
    half_width = student_t(COVERAGE, round(degrees, 1)) * error
    # The limit avoids an overflow.
    factor = math.exp(min(half_width, 300.0))
    ratio = (b.rate or 0.0) / (a.rate or 1.0)
    return ratio / factor, ratio * factor


def describe_significance(a: Scale, b: Scale) -> str:
    ratio = f"B / A = {(b.rate or 0.0) / (a.rate or 1.0):.4f}"
    interval = ratio_interval(a, b)
    if interval is None:
        return f"{ratio}: significance unknown without repeats of both; run each three times"
    low, high = interval
    conclusion = "no significant difference"
    if low > 1:
        conclusion = "B is faster"
    if high < 1:
        conclusion = "B is slower"
    method = f"{100 * COVERAGE:g}% interval by Welch, of {len(a.runs)} and {len(b.runs)} runs"
    return f"{ratio} ({low:.5g}–{high:.5g}, {method}): {conclusion}"


def main(argv: Sequence[str] | None = None) -> None:
    options = input_parser(__doc__).parse_args(argv)
    if len(options.inputs) != 2:
        raise UserError(f"expected two inputs, A and B; found {len(options.inputs)}")
    a_runs, b_runs = (read_runs([path], options) for path in options.inputs)
    for a, b in pair_rows(a_runs, b_runs):
        titles = dict.fromkeys(f"{row.title}, {row.scale}" for row in (a, b))
        rates = " and B ".join(row.cell("samples_per_s_per_gpu") for row in (a, b))
        print(f"### {' and '.join(titles)}\n")
        print(f"A {rates} samples/s/{a.unit}. {describe_significance(a, b)}.")
        for side, row in (("A", a), ("B", b)):
            for doubt in list_doubts([row]):
                print(f"In {side}: {doubt}.")
        print()


if __name__ == "__main__":
    run_alone(main)
