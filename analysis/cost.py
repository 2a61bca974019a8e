"""What N samples cost at each measured scale, and the cheapest scale that meets a deadline.

    python analysis/cost.py TABLE.csv --samples N [--price_per_gpu_hour P] [--deadline_hours H]

Arithmetic on a scaling table: time is N over the measured samples/s. Queueing, start-up, evaluation and checkpoints
are not in it, and no price is assumed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__" and not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from clap_ds.analysis.runs import InputError, run_command
from clap_ds.analysis.table import Row, markdown_table, read_table, series_title, significant
from clap_ds.analysis.throughput import positive_float


@dataclass(frozen=True)
class Cost:
    """Time and GPU-hours of a number of samples at one scale."""

    row: Row
    hours: float
    price_per_gpu_hour: float | None = None

    @property
    def gpu_hours(self) -> float:
        return self.hours * self.row.gpus

    @property
    def money(self) -> float | None:
        """In the unit of the price; None without one."""
        return None if self.price_per_gpu_hour is None else self.gpu_hours * self.price_per_gpu_hour


def costs(rows: Sequence[Row], samples: float, price_per_gpu_hour: float | None = None) -> list[Cost]:
    """Cost at every row that has a rate, in the rows' order.

    Args:
        rows: scaling tables' rows.
        samples: samples to train on, repetitions counted each time.
        price_per_gpu_hour: of one GPU, in any unit of money.

    Raises:
        InputError: no row has a rate.
    """
    found = []
    for row in rows:
        if row.samples_per_s_per_gpu:
            rate = row.samples_per_s or row.samples_per_s_per_gpu * row.gpus
            found.append(Cost(row, samples / rate / 3600, price_per_gpu_hour))
    if not found:
        raise InputError("no row of the table has a rate")
    return found


def cheapest(found: Sequence[Cost], deadline_hours: float | None = None) -> Cost | None:
    """Fewest GPU-hours among those done in time (the faster of two equal ones); None when none is in time."""
    in_time = [cost for cost in found if deadline_hours is None or cost.hours <= deadline_hours]
    return min(in_time, key=lambda cost: (cost.gpu_hours, cost.hours), default=None)


def render(found: Sequence[Cost], deadline_hours: float | None = None) -> str:
    """A table and a verdict per series, as Markdown."""
    parts = []
    for series in dict.fromkeys(cost.row.series for cost in found):
        members = [cost for cost in found if cost.row.series == series]
        header = ["nodes", "GPUs", "samples/s", "hours", "GPU-hours"]
        header += ["cost"] if members[0].money is not None else []
        header += ["in time"] if deadline_hours is not None else []
        body = [_cells(cost, deadline_hours) for cost in members]
        lines = [f"### {series_title(members[0].row)}", "", markdown_table(header, body), ""]
        parts.append("\n".join([*lines, _verdict(members, deadline_hours)]) + "\n")
    return "\n".join(parts)


def _cells(cost: Cost, deadline_hours: float | None) -> list[str]:
    row = cost.row
    rate = row.samples_per_s or (row.samples_per_s_per_gpu or 0) * row.gpus
    cells = [str(row.nodes), str(row.gpus), significant(rate), significant(cost.hours), significant(cost.gpu_hours)]
    if cost.money is not None:
        cells.append(f"{cost.money:.2f}")
    if deadline_hours is not None:
        cells.append("yes" if cost.hours <= deadline_hours else "no")
    return cells


def _verdict(members: Sequence[Cost], deadline_hours: float | None) -> str:
    best = cheapest(members, deadline_hours)
    if best is None:
        fastest = min(members, key=lambda cost: cost.hours)
        return (
            f"No measured scale meets {deadline_hours:g} hours; the fastest, {fastest.row.gpus} GPUs, takes "
            f"{significant(fastest.hours)} hours."
        )
    money = f", {best.money:.2f}" if best.money is not None else ""
    within = f" within {deadline_hours:g} hours" if deadline_hours is not None else ""
    return (
        f"Cheapest{within}: {best.row.nodes} nodes, {best.row.gpus} GPUs: {significant(best.hours)} hours, "
        f"{significant(best.gpu_hours)} GPU-hours{money}."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="GPU-hours and money for a number of samples at each measured scale.")
    parser.add_argument("tables", nargs="+", type=Path, metavar="TABLE")
    parser.add_argument("--samples", type=positive_float, required=True, help="samples to train on, each pass counted")
    parser.add_argument("--price_per_gpu_hour", type=positive_float, help="in any unit of money")
    parser.add_argument("--deadline_hours", type=positive_float, help="name the cheapest scale that meets it")
    options = parser.parse_args()
    rows = [row for path in options.tables for row in read_table(path)]
    print(render(costs(rows, options.samples, options.price_per_gpu_hour), options.deadline_hours), end="")


if __name__ == "__main__":
    run_command(main)
