"""What N samples cost at each measured scale, and the cheapest scale that meets a deadline.

    python analysis/cost.py RUN_OR_TABLE… --samples N [--deadline_hours H] [--price_per_gpu_hour P --currency EUR]

Arithmetic on the scaling table: time is N over the measured samples/s, and its ± is that of the rate. What isn't in it is said,
and no price is assumed.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from clap_ds.analysis.efficiency import scaling_table
from clap_ds.analysis.runs import COST_OPTIONS, INPUT_OPTIONS, parse_options, read_runs
from clap_ds.analysis.table import Row, Scale, by_series, markdown_table, significant
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

    def around(self, value: float, digits: str = "") -> str:
        """Hours, GPU-hours or money with their ±, which follows from the rate's."""
        half, rate = self.row.samples_per_s_per_gpu_2sigma, self.row.rate
        shown = f"{value:{digits}}" if digits else significant(value)
        return f"{shown} ± {float(f'{value * half / rate:.2g}'):g}" if half is not None and rate else shown


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
        raise UserError("no scale has a rate")
    return found


def cheapest(found: Sequence[Cost], deadline_hours: float | None = None) -> Cost | None:
    """Fewest GPU-hours among those done in time (the faster of two equal ones); None when none is in time."""
    in_time = [cost for cost in found if deadline_hours is None or cost.hours <= deadline_hours]
    return min(in_time, key=lambda cost: (cost.gpu_hours, cost.hours), default=None)


def left_out(rows: Sequence[Row]) -> str:
    """What the hours do not hold."""
    parts = ["Not in it: queueing, start-up, evaluation, checkpoints."]
    by_timer = [
        row for row in rows
        if isinstance(row, Scale) and any(run.kind == "log" and run.data_wait_percent is None for run in row.runs)
    ]  # fmt: skip
    if by_timer:
        parts.append(f"DeepSpeed's timer leaves out waiting for data, which comes on top: {_scales(by_timer)}.")
    if without := [row for row in rows if not row.rate]:
        parts.append(f"Without a rate: {_scales(without)}.")
    return " ".join(parts)


def _scales(rows: Sequence[Row]) -> str:
    return "; ".join(dict.fromkeys(f"{row.scale} ({row.state or 'state not known'})" for row in rows))


def render(found: Sequence[Cost], deadline_hours: float | None = None, price: Price | None = None) -> str:
    """A table and a verdict per series, as Markdown, after the price they were worked out with."""
    parts, currency = [str(price)] if price else [], (price and price.currency) or ""
    for rows in by_series([cost.row for cost in found]):
        members = [cost for cost in found if cost.row.series == rows[0].series]
        columns = {
            "nodes": [str(cost.row.nodes) for cost in members],
            rows[0].unit: [str(cost.row.gpus) for cost in members],
            "samples/s": [significant(cost.samples_per_s) for cost in members],
            "hours": [cost.around(cost.hours) for cost in members],
            "GPU-hours": [cost.around(cost.gpu_hours) for cost in members],
            f"cost {currency}".strip(): [cost.around(cost.money, ".2f") for cost in members if cost.money is not None],
            "in time": [
                "yes" if cost.hours <= deadline_hours else "no" for cost in members if deadline_hours is not None
            ],
        }
        told = {name: cells for name, cells in columns.items() if cells}
        table = markdown_table(list(told), list(zip(*told.values(), strict=True)))
        parts += [f"### {rows[0].title}", table, _verdict(members, deadline_hours, currency)]
    return "\n\n".join(parts) + "\n"


def _verdict(members: Sequence[Cost], deadline_hours: float | None, currency: str) -> str:
    best = cheapest(members, deadline_hours)
    if best is None:
        fastest = min(members, key=lambda cost: cost.hours)
        takes = f"the fastest, {fastest.row.gpus} {fastest.row.unit}, takes {significant(fastest.hours)} hours"
        return f"No measured scale meets {hours_text(deadline_hours or 0)}; {takes}."
    row, spent = best.row, [f"{best.around(best.hours)} hours", f"{best.around(best.gpu_hours)} GPU-hours"]
    spent += [f"{best.around(best.money, '.2f')} {currency}".rstrip()] if best.money is not None else []
    known = row.samples_per_s_per_gpu_2sigma is not None and row.uncertainty_from
    within = f" within {hours_text(deadline_hours)}" if deadline_hours is not None else ""
    scale = f"{row.scale}, global batch {row.global_batch or 'not known'}"
    return f"Cheapest{within}: {scale}: {', '.join(spent)}{f' (±: {row.uncertainty_from})' if known else ''}."


def hours_text(hours: float) -> str:
    return f"{hours:g} hour{'' if hours == 1 else 's'}"


def main() -> None:
    description = "GPU-hours and money for a number of samples at each measured scale."
    options = parse_options(description, "inputs", *COST_OPTIONS, *INPUT_OPTIONS, required="--samples")
    rows, price = scaling_table(read_runs(options.inputs, options)), price_of(options)
    print(render(costs(rows, options.samples, price), options.deadline_hours, price), end="")
    print(f"\n{left_out(rows)}")


def command() -> None:
    """Console command `clap-cost`."""
    run_alone(main)


if __name__ == "__main__":
    command()
