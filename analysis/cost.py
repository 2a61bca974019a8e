"""What N samples cost at each measured scale, and the cheapest scale that meets a deadline.

    python analysis/cost.py TABLE.csv --samples N [--deadline_hours H] [--price_per_gpu_hour P --currency EUR --price_source …]

Arithmetic on a scaling table: time is N over the measured samples/s. Queueing, start-up, evaluation and checkpoints
are not in it, and no price is assumed.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from clap_ds.analysis.runs import COST_OPTIONS, parse_options
from clap_ds.analysis.table import Row, by_series, markdown_table, read_table, significant
from clap_ds.config.errors import UserError, run_alone


@dataclass(frozen=True)
class Price:
    """Of an hour of one GPU: money, in which currency, and who says so."""

    per_gpu_hour: float
    currency: str | None = None
    source: str | None = None

    def __str__(self) -> str:
        source = f"source: {self.source}" if self.source else "no source was given (`--price_source`)"
        currency = self.currency or "(currency not given: `--currency`)"
        return f"At {self.per_gpu_hour:g} {currency} for a GPU-hour; {source}."


def price_of(options: argparse.Namespace) -> Price | None:
    """The price that `COST_OPTIONS` give, if any."""
    per_hour = options.price_per_gpu_hour
    return Price(per_hour, options.currency, options.price_source) if per_hour else None


@dataclass(frozen=True)
class Cost:
    """Time, GPU-hours and, where there is a price, money (in its unit) of a number of samples at one scale."""

    row: Row
    samples_per_s: float
    hours: float
    gpu_hours: float
    money: float | None


def costs(rows: Sequence[Row], samples: float, price: Price | None = None) -> list[Cost]:
    """Cost of `samples` (repetitions counted each time) at every row that has a rate; UserError where none has."""
    found = []
    for row in rows:
        if row.rate:
            rate = row.samples_per_s or row.rate * row.gpus
            hours = samples / rate / 3600
            money = None if price is None else hours * row.gpus * price.per_gpu_hour
            found.append(Cost(row, rate, hours, hours * row.gpus, money))
    if not found:
        raise UserError("no row of the table has a rate")
    return found


def cheapest(found: Sequence[Cost], deadline_hours: float | None = None) -> Cost | None:
    """Fewest GPU-hours among those done in time (the faster of two equal ones); None when none is in time."""
    in_time = [cost for cost in found if deadline_hours is None or cost.hours <= deadline_hours]
    return min(in_time, key=lambda cost: (cost.gpu_hours, cost.hours), default=None)


def render(found: Sequence[Cost], deadline_hours: float | None = None, price: Price | None = None) -> str:
    """A table and a verdict per series, as Markdown, after the price they were worked out with."""
    parts = [str(price)] if price else []
    money = (price and price.currency) or ""
    for rows in by_series([cost.row for cost in found]):
        members = [cost for cost in found if cost.row.series == rows[0].series]
        header, body = ["nodes", rows[0].unit, "samples/s", "hours", "GPU-hours"], []
        header += [f"cost {money}".strip()] * (members[0].money is not None) + ["in time"] * (
            deadline_hours is not None
        )
        for cost in members:
            cells = cost.row.cells("nodes", "gpus")
            cells += map(significant, (cost.samples_per_s, cost.hours, cost.gpu_hours))
            cells += [f"{cost.money:.2f}"] if cost.money is not None else []
            body.append(cells + ["yes" if cost.hours <= limit else "no" for limit in [deadline_hours] if limit])
        table = markdown_table(header, body)
        parts += [f"### {rows[0].title}", table, _verdict(members, deadline_hours, money)]
    return "\n\n".join(parts) + "\n"


def _verdict(members: Sequence[Cost], deadline_hours: float | None, currency: str) -> str:
    best = cheapest(members, deadline_hours)
    if best is None:
        fastest = min(members, key=lambda cost: cost.hours)
        takes = f"the fastest, {fastest.row.gpus} {fastest.row.unit}, takes {significant(fastest.hours)} hours"
        return f"No measured scale meets {hours_text(deadline_hours or 0)}; {takes}."
    money = f", {best.money:.2f} {currency}".rstrip() if best.money is not None else ""
    within = f" within {hours_text(deadline_hours)}" if deadline_hours is not None else ""
    scale = f"{best.row.scale}, global batch {best.row.global_batch or 'not known'}"
    spent = f"{significant(best.hours)} hours, {significant(best.gpu_hours)} GPU-hours{money}"
    return f"Cheapest{within}: {scale}: {spent}."


def hours_text(hours: float) -> str:
    return f"{hours:g} hour{'' if hours == 1 else 's'}"


def main() -> None:
    description = "GPU-hours and money for a number of samples at each measured scale."
    options = parse_options(description, "tables", *COST_OPTIONS, required="--samples")
    rows = [row for path in options.tables for row in read_table(path)]
    price = price_of(options)
    print(render(costs(rows, options.samples, price), options.deadline_hours, price), end="")


if __name__ == "__main__":
    run_alone(main)
