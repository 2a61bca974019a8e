"""Two runs or tables side by side: the ratio of their speeds with its interval, and which part of the step changed.

    python analysis/compare.py A B

A and B are each a run directory, a DeepSpeed log or a table. Two single runs are compared by their windows, anything
else row by row where model and scale agree. The interval says how well the ratio of these measurements is known; two
runs on different nodes, or at different times, can differ by more.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from clap_ds.analysis.efficiency import ratio_uncertainty, scaling_table
from clap_ds.analysis.runs import INPUT_OPTIONS, parse_options, read_runs
from clap_ds.analysis.table import Row, Run, markdown_table
from clap_ds.config.errors import UserError, run_alone

FEWEST_WINDOWS = 5
"""Below this a bootstrap over windows says little; the intervals' own widths are used."""
_FACTS = {
    "samples_per_s_per_gpu": "samples/s/GPU", "samples_per_s_per_gpu_2sigma": "±", "scaling_efficiency_percent":
    "efficiency %", "mfu_percent": "MFU % (published)", "mfu_model_percent": "MFU % (model)", "step_time_s": "step s",
    "slowest_rank_step_time_s": "slowest rank s", "data_wait_percent": "data wait %", "memory_peak_gib": "memory GiB",
    "batch_per_gpu": "batch per GPU", "state": "state",
}  # fmt: skip


@dataclass(frozen=True)
class Comparison:
    """How fast B is at one scale: its samples/s/GPU over A's."""

    a: Row
    b: Row
    ratio: float
    interval: tuple[float, float] | None
    interval_from: str

    @property
    def verdict(self) -> str:
        """One sentence: faster, slower, or not told apart."""
        if self.interval is None:
            return f"B / A = {self.ratio:.4f} ({self.interval_from})"
        low, high = self.interval
        found = "B is faster" if low > 1 else "B is slower" if high < 1 else "not told apart"
        return f"B / A = {self.ratio:.4f} ({low:.4f}–{high:.4f}; {self.interval_from}): {found}"

    @property
    def part_changes(self) -> list[tuple[str, float, float]]:
        """Parts of the step that both breakdowns have, with seconds a step in A and in B, largest change first."""
        a, b = self.a.breakdown_s, self.b.breakdown_s
        return sorted(((part, a[part], b[part]) for part in a if part in b), key=lambda item: -abs(item[2] - item[1]))


def compare(a_runs: Sequence[Run], b_runs: Sequence[Run]) -> list[Comparison]:
    """Pair the rows of A and B by model, nodes and GPUs (two single runs whatever they are) and divide.

    Raises UserError where one of them has no rate, or no scale of one is in the other.
    """
    a_rows, b_rows = _measured(a_runs, "A"), _measured(b_runs, "B")
    if len(a_rows) == len(b_rows) == 1:
        windows = (a_runs[0].windows, b_runs[0].windows) if len(a_runs) == len(b_runs) == 1 else ((), ())
        return [_ratio(a_rows[0], b_rows[0], *windows)]
    found = []
    for a in a_rows:
        partners = [b for b in b_rows if (b.model, b.nodes, b.gpus) == (a.model, a.nodes, a.gpus)]
        alike = [b for b in partners if b.scaling == a.scaling] or partners
        found += [_ratio(a, b) for b in alike[:1]]
    if not found:
        a_scales, b_scales = (
            ", ".join(f"{row.model or 'model not stated'} on {row.nodes} nodes × {row.gpus} GPUs" for row in rows)
            for rows in (a_rows, b_rows)
        )
        raise UserError(f"A has {a_scales} and B has {b_scales}: no model and scale in common")
    return found


def _measured(runs: Sequence[Run], name: str) -> list[Row]:
    rows = scaling_table(runs)
    if measured := [row for row in rows if row.rate]:
        return measured
    states = ", ".join(dict.fromkeys(row.state for row in rows))
    raise UserError(f"{name}: no rate was measured (state: {states})")


def _ratio(a: Row, b: Row, a_windows: Sequence[float] = (), b_windows: Sequence[float] = ()) -> Comparison:
    if min(len(a_windows), len(b_windows)) >= FEWEST_WINDOWS:
        described = f"95 % bootstrap of the medians of {len(b_windows)} and {len(a_windows)} windows"
        ratio = median(b_windows) / median(a_windows)
        return Comparison(a, b, ratio, bootstrap_ratio(b_windows, a_windows), described)
    assert a.rate
    assert b.rate
    ratio = b.rate / a.rate
    error = ratio_uncertainty(b.rate, b.samples_per_s_per_gpu_2sigma, a.rate, a.samples_per_s_per_gpu_2sigma)
    if error is None:
        return Comparison(a, b, ratio, None, "no interval: not both state their spread")
    described = f"first-order propagation; A: {a.uncertainty_from}, B: {b.uncertainty_from}"
    return Comparison(a, b, ratio, (ratio - error, ratio + error), described)


def bootstrap_ratio(top: Sequence[float], bottom: Sequence[float], resamples: int = 10_000) -> tuple[float, float]:
    """95 % percentile-bootstrap interval of median(top) / median(bottom), the two resampled independently."""
    generator = random.Random(0)
    ratios = sorted(
        median(generator.choices(top, k=len(top))) / median(generator.choices(bottom, k=len(bottom)))
        for _ in range(resamples)
    )
    return ratios[int(0.025 * resamples)], ratios[int(0.975 * resamples) - 1]


def render(comparisons: Sequence[Comparison]) -> str:
    """Everything `compare` found, as Markdown."""
    parts = []
    for comparison in comparisons:
        a, b = comparison.a, comparison.b
        titles = dict.fromkeys(f"{row.title}, {row.nodes} nodes × {row.gpus} GPUs" for row in (a, b))
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
    options = parse_options(description, "a", "b", *INPUT_OPTIONS)
    print(render(compare(read_runs([options.a], options), read_runs([options.b], options))), end="")


if __name__ == "__main__":
    run_alone(main)
