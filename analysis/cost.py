"""What N samples cost at each measured scale, and the cheapest scale that meets a deadline.

    python analysis/cost.py TABLE.csv --samples N [--price_per_gpu_hour P] [--deadline_hours H]

Arithmetic on a scaling table: time is N over the measured samples/s. Queueing, start-up, evaluation and checkpoints
are not in it, and no price is assumed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from clap_ds.analysis.runs import COST_OPTIONS, parse_options
from clap_ds.analysis.table import Row, by_series, markdown_table, read_table, significant
from clap_ds.config.errors import UserError, run_alone


@dataclass(frozen=True)
class Cost:
    """Time, GPU-hours and, where there is a price, money (in its unit) of a number of samples at one scale."""

    row: Row
    samples_per_s: float
    hours: float
    gpu_hours: float
    money: float | None


def costs(rows: Sequence[Row], samples: float, price_per_gpu_hour: float | None = None) -> list[Cost]:
    """Cost of `samples` (repetitions counted each time) at every row that has a rate; UserError where none has."""
    found = []
    for row in rows:
        if row.rate:
            rate = row.samples_per_s or row.rate * row.gpus
            hours = samples / rate / 3600
            money = None if price_per_gpu_hour is None else hours * row.gpus * price_per_gpu_hour
            found.append(Cost(row, rate, hours, hours * row.gpus, money))
    if not found:
        raise UserError("no row of the table has a rate")
    return found


def cheapest(found: Sequence[Cost], deadline_hours: float | None = None) -> Cost | None:
    """Fewest GPU-hours among those done in time (the faster of two equal ones); None when none is in time."""
    in_time = [cost for cost in found if deadline_hours is None or cost.hours <= deadline_hours]
    return min(in_time, key=lambda cost: (cost.gpu_hours, cost.hours), default=None)


def render(found: Sequence[Cost], deadline_hours: float | None = None) -> str:
    """A table and a verdict per series, as Markdown."""
    parts = []
    for rows in by_series([cost.row for cost in found]):
        members = [cost for cost in found if cost.row.series == rows[0].series]
        header, body = ["nodes", "GPUs", "samples/s", "hours", "GPU-hours"], []
        header += ["cost"] * (members[0].money is not None) + ["in time"] * (deadline_hours is not None)
        for cost in members:
            cells = cost.row.cells("nodes", "gpus")
            cells += map(significant, (cost.samples_per_s, cost.hours, cost.gpu_hours))
            cells += [f"{cost.money:.2f}"] if cost.money is not None else []
            body.append(cells + ["yes" if cost.hours <= limit else "no" for limit in [deadline_hours] if limit])
        table = markdown_table(header, body)
        parts += [f"### {rows[0].title}", table, _verdict(members, deadline_hours)]
    return "\n\n".join(parts) + "\n"


def _verdict(members: Sequence[Cost], deadline_hours: float | None) -> str:
    best = cheapest(members, deadline_hours)
    if best is None:
        fastest = min(members, key=lambda cost: cost.hours)
        takes = f"the fastest, {fastest.row.gpus} GPUs, takes {significant(fastest.hours)} hours"
        return f"No measured scale meets {deadline_hours:g} hours; {takes}."
    money = f", {best.money:.2f}" if best.money is not None else ""
    within = f" within {deadline_hours:g} hours" if deadline_hours is not None else ""
    spent = f"{significant(best.hours)} hours, {significant(best.gpu_hours)} GPU-hours{money}"
    return f"Cheapest{within}: {best.row.nodes} nodes, {best.row.gpus} GPUs: {spent}."


def main() -> None:
    description = "GPU-hours and money for a number of samples at each measured scale."
    options = parse_options(description, "tables", *COST_OPTIONS, required="--samples")
    rows = [row for path in options.tables for row in read_table(path)]
    print(render(costs(rows, options.samples, options.price_per_gpu_hour), options.deadline_hours), end="")


if __name__ == "__main__":
    run_alone(main)
