"""Two runs or tables side by side: the ratio of their speeds with its interval, and which part of the step changed.

    python analysis/compare.py A B

A and B are each a run directory, a DeepSpeed log or a table. Two single runs are compared by their windows, anything
else row by row where model and scale agree. The interval says how well the ratio of these measurements is known; two
runs on different nodes, or at different times, can differ by more.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

if __name__ == "__main__" and not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from clap_ds.analysis.efficiency import scaling_table
from clap_ds.analysis.intervals import bootstrap_ratio, ratio_uncertainty
from clap_ds.analysis.runs import BREAKDOWN_PARTS, InputError, Run, run_command
from clap_ds.analysis.table import Row, format_cell, markdown_table, series_title
from clap_ds.analysis.throughput import add_input_options, given_of, read_all

FEWEST_WINDOWS = 5
"""Below this a bootstrap over windows says little; the intervals' own widths are used."""


@dataclass(frozen=True)
class Comparison:
    """How fast B is relative to A at one scale."""

    a: Row
    b: Row
    ratio: float
    """B's samples/s/GPU over A's."""
    low: float | None
    high: float | None
    interval_from: str


@dataclass(frozen=True)
class PartChange:
    """One part of the step in both, seconds a step."""

    part: str
    a_s: float
    b_s: float

    @property
    def change_s(self) -> float:
        return self.b_s - self.a_s


def compare(a_runs: Sequence[Run], b_runs: Sequence[Run]) -> list[Comparison]:
    """Pair the rows of A and B and divide.

    Rows are paired by model, nodes and GPUs; two single runs are paired whatever they are.

    Raises:
        InputError: one of them has no rate, or no scale of one is in the other.
    """
    a_rows, b_rows = _measured(scaling_table(a_runs), "A"), _measured(scaling_table(b_runs), "B")
    if len(a_rows) == len(b_rows) == 1:
        windows = (a_runs[0].windows, b_runs[0].windows) if len(a_runs) == len(b_runs) == 1 else ((), ())
        return [_ratio(a_rows[0], b_rows[0], *windows)]
    found = []
    for a in a_rows:
        partners = [b for b in b_rows if (b.model, b.nodes, b.gpus) == (a.model, a.nodes, a.gpus)]
        alike = [b for b in partners if b.scaling == a.scaling] or partners
        found += [_ratio(a, b) for b in alike[:1]]
    if not found:
        raise InputError(f"A has {_scales(a_rows)} and B has {_scales(b_rows)}: no model and scale in common")
    return found


def _measured(rows: list[Row], name: str) -> list[Row]:
    measured = [row for row in rows if row.samples_per_s_per_gpu]
    if not measured:
        states = ", ".join(dict.fromkeys(row.state for row in rows))
        raise InputError(f"{name}: no rate was measured (state: {states})")
    return measured


def _scales(rows: Sequence[Row]) -> str:
    return ", ".join(f"{row.model or 'model not stated'} on {row.nodes} nodes × {row.gpus} GPUs" for row in rows)


def _ratio(a: Row, b: Row, a_windows: Sequence[float] = (), b_windows: Sequence[float] = ()) -> Comparison:
    assert a.samples_per_s_per_gpu
    assert b.samples_per_s_per_gpu
    if min(len(a_windows), len(b_windows)) >= FEWEST_WINDOWS:
        low, high = bootstrap_ratio(b_windows, a_windows)
        described = f"95 % bootstrap of the medians of {len(b_windows)} and {len(a_windows)} windows"
        return Comparison(a, b, median(b_windows) / median(a_windows), low, high, described)
    ratio = b.samples_per_s_per_gpu / a.samples_per_s_per_gpu
    a_error, b_error = a.samples_per_s_per_gpu_2sigma, b.samples_per_s_per_gpu_2sigma
    if a_error is None or b_error is None:
        return Comparison(a, b, ratio, None, None, "no interval: not both state their spread")
    error = ratio_uncertainty(b.samples_per_s_per_gpu, b_error, a.samples_per_s_per_gpu, a_error)
    described = f"first-order propagation; A: {a.uncertainty_from}, B: {b.uncertainty_from}"
    return Comparison(a, b, ratio, ratio - error, ratio + error, described)


def part_changes(a: Row, b: Row) -> list[PartChange]:
    """Parts of the step that both breakdowns have, largest change first."""
    parts = [part for part in BREAKDOWN_PARTS if part in a.breakdown_s and part in b.breakdown_s]
    changes = [PartChange(part, a.breakdown_s[part], b.breakdown_s[part]) for part in parts]
    return sorted(changes, key=lambda change: -abs(change.change_s))


def verdict(comparison: Comparison) -> str:
    """One sentence: faster, slower, or not told apart."""
    if comparison.low is None or comparison.high is None:
        return f"B / A = {comparison.ratio:.4f} ({comparison.interval_from})"
    text = f"B / A = {comparison.ratio:.4f} ({comparison.low:.4f}–{comparison.high:.4f}; {comparison.interval_from})"
    if comparison.low > 1:
        return f"{text}: B is faster"
    if comparison.high < 1:
        return f"{text}: B is slower"
    return f"{text}: not told apart"


def render(comparisons: Sequence[Comparison]) -> str:
    """Everything `compare` found, as Markdown."""
    parts = []
    for comparison in comparisons:
        a, b = comparison.a, comparison.b
        lines = [f"### {series_title(a)}, {a.nodes} nodes × {a.gpus} GPUs"]
        if (series_title(a), a.nodes, a.gpus) != (series_title(b), b.nodes, b.gpus):
            lines[0] += f" and {series_title(b)}, {b.nodes} nodes × {b.gpus} GPUs"
        lines += ["", verdict(comparison), "", markdown_table(("", "A", "B"), _facts(a, b))]
        changes = part_changes(a, b)
        if changes:
            total = sum(change.change_s for change in changes)
            body = [
                [
                    change.part.replace("_", " "),
                    *(f"{1000 * s:.3f}" for s in (change.a_s, change.b_s)),
                    f"{1000 * change.change_s:+.3f}",
                    f"{100 * (change.b_s / change.a_s - 1):+.1f}" if change.a_s else "",
                ]
                for change in changes
            ]
            header = ("part of the step", "A ms", "B ms", "change ms", "change %")
            lines += ["", markdown_table(header, body), "", _largest(changes[0], total)]
        else:
            lines += ["", "Which part changed can't be told: not both have a breakdown."]
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def _facts(a: Row, b: Row) -> list[list[str]]:
    columns = {
        "samples_per_s_per_gpu": "samples/s/GPU", "samples_per_s_per_gpu_2sigma": "±", "scaling_efficiency_percent":
        "efficiency %", "mfu_percent": "MFU % (published)", "mfu_model_percent": "MFU % (model)", "step_time_s": "step s",
        "slowest_rank_step_time_s": "slowest rank s", "data_wait_percent": "data wait %", "memory_peak_gib": "memory GiB",
        "batch_per_gpu": "batch per GPU", "state": "state",
    }  # fmt: skip
    rows = [
        [label, format_cell(column, getattr(a, column)), format_cell(column, getattr(b, column))]
        for column, label in columns.items()
    ]
    return [row for row in rows if row[1] or row[2]]


def _largest(change: PartChange, total: float) -> str:
    if change.change_s == 0:
        return "No part of the step changed."
    name = change.part.replace("_", " ")
    return (
        f"Largest change: {name}, {1000 * change.change_s:+.3f} ms a step; all parts together {1000 * total:+.3f} ms "
        "(from an instrumented pass, whose parts need not add up to the timed step)."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare two runs or tables: how much faster is B than A, and where.")
    parser.add_argument("a", type=Path, metavar="A", help="run directory, folder of them, DeepSpeed log or table")
    parser.add_argument("b", type=Path, metavar="B")
    add_input_options(parser)
    options = parser.parse_args()
    given = given_of(options)
    print(render(compare(read_all([options.a], given), read_all([options.b], given))), end="")


if __name__ == "__main__":
    run_command(main)
