"""Command: everything there is to say about some runs, as one HTML page and as Markdown, to send to a colleague.

    python analysis/report.py RUN_OR_LOG… --output report [--samples 1e9 --price_per_gpu_hour 2.5]

Puts together what the other commands of this folder work out, says where each number comes from and what is missing, and
works out nothing itself. The page holds its figures, with values on hover, and refers to nothing outside.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if __name__ == "__main__" and not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from clap_ds.analysis import cost, efficiency
from clap_ds.analysis.page import from_markdown, page
from clap_ds.analysis.project import FIT_NODES, add_machine_options, machine_of
from clap_ds.analysis.provenance import provenance_gaps, read_provenance, render_provenance
from clap_ds.analysis.report_parts import (
    by_series,
    changes_with_scale,
    gaps,
    headline,
    projected,
    published_comparison,
    step_table,
)
from clap_ds.analysis.runs import InputError, Run, run_command
from clap_ds.analysis.step_model import Machine
from clap_ds.analysis.table import Row, series_title, write_csv, write_text
from clap_ds.analysis.throughput import add_input_options, given_of, positive_float, positive_int, read_all

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from clap_ds.analysis.figure import HoverPoints

TITLE = "CLAP training: throughput and scaling"


@dataclass(frozen=True)
class Budget:
    """What to train, for the costs; nothing of it is assumed."""

    samples: float | None = None
    price_per_gpu_hour: float | None = None
    deadline_hours: float | None = None


@dataclass
class Report:
    """Markdown blocks, and the figures they show by file name."""

    blocks: list[str] = field(default_factory=list)
    figures: dict[str, tuple[Figure, HoverPoints]] = field(default_factory=dict)

    def add(self, *blocks: str) -> None:
        self.blocks += [block.strip() for block in blocks if block.strip()]

    def show(self, name: str, alt: str, drawn: tuple[Figure, HoverPoints]) -> None:
        self.figures[name] = drawn
        self.add(f"![{alt}]({name})")

    @property
    def markdown(self) -> str:
        return "\n\n".join(self.blocks) + "\n"


def build(runs: Sequence[Run], rows: Sequence[Row], machine: Machine, table: Path, budget: Budget) -> Report:
    """The whole report.

    Args:
        runs: what was read.
        rows: their scaling table.
        machine: what the projection assumes of links and GPUs.
        table: the rows as CSV, for the plots.
        budget: for the costs.
    """
    from clap_ds.analysis import plot_breakdown, plot_scaling

    report = Report()
    report.add(f"# {TITLE}", headline(runs, rows))
    report.add("## Efficiency", _deeper(efficiency.render(rows)))
    if any(row.samples_per_s_per_gpu for row in rows):
        report.show("scaling.png", "Throughput, efficiency and MFU against GPUs",
                    plot_scaling.draw(plot_scaling.read_curves([table])))  # fmt: skip
        report.add("## Against the published tables", published_comparison(rows))
    report.add(
        "## Where a step's time goes",
        "From an instrumented pass that synchronises between the parts, after the timed one.",
    )
    for number, members in enumerate(by_series(rows), start=1):
        report.add(step_table(members), changes_with_scale(members))
        if any(row.breakdown_s for row in members):
            name = f"breakdown-{number}.png"
            report.show(name, f"Parts of a step, {series_title(members[0])}", plot_breakdown.draw(members))
    report.add("## Projection")
    for number, members in enumerate(by_series(rows), start=1):
        _add_projection(report, number, members, runs, machine)
    if budget.samples:
        found = cost.costs(rows, budget.samples, budget.price_per_gpu_hour)
        report.add(f"## Cost of {budget.samples:g} samples", _deeper(cost.render(found, budget.deadline_hours)))
    provenance = [read_provenance(run) for run in runs]
    report.add("## Runs", render_provenance(provenance))
    missing = [*gaps(rows, runs), *provenance_gaps(provenance)]
    report.add("## What is missing", "\n".join(f"- {gap}" for gap in missing) or "Nothing this report looks for.")
    return report


def _add_projection(report: Report, number: int, members: Sequence[Row], runs: Sequence[Run], machine: Machine) -> None:
    from clap_ds.analysis import plot_projection

    try:
        found = projected(members, runs, machine)
    except InputError as error:
        report.add(f"### {series_title(members[0])}", f"{error}.")
        return
    report.add(_deeper(found.render()))
    drawn = plot_projection.draw([found.measured], found.setting, FIT_NODES, max(found.gpus))
    report.show(f"projection-{number}.png", f"Projection of {found.measured.title}", drawn)


def _deeper(markdown: str) -> str:
    """Headings from level 3 down, whatever they started at."""
    lines = markdown.splitlines()
    levels = [len(line) - len(line.lstrip("#")) for line in lines if line.startswith("#")]
    more = "#" * max(0, 3 - min(levels, default=3))
    return "\n".join(more + line if line.startswith("#") else line for line in lines)


def write(report: Report, folder: Path) -> None:
    """Write `report.md` with its PNGs, and `report.html`, which needs none of them.

    Raises:
        InputError: the folder can't be written.
    """
    from clap_ds.analysis.figure import figure_svg, save

    drawings = {}
    for number, (name, (figure, hover)) in enumerate(report.figures.items()):
        save(figure, folder / name, hover, "")
        drawings[name] = figure_svg(figure, hover.texts, f"f{number}-")
    write_text(folder / "report.md", report.markdown)
    write_text(folder / "report.html", page(TITLE, from_markdown(report.markdown, drawings)))


def main() -> None:
    parser = argparse.ArgumentParser(
        description="One page about some runs: efficiency, reasons, projection, provenance."
    )
    parser.add_argument("inputs", nargs="+", type=Path, help="run directories, folders of them, DeepSpeed logs, tables")
    parser.add_argument("--output", type=Path, default=Path("report"), help="folder to write (default: report)")
    parser.add_argument("--baseline_nodes", type=positive_int, help="node count that is 100 %% (default: the smallest)")
    parser.add_argument("--samples", type=positive_float, help="samples to train on, for the costs")
    parser.add_argument("--price_per_gpu_hour", type=positive_float, help="in any unit of money")
    parser.add_argument("--deadline_hours", type=positive_float, help="name the cheapest scale that meets it")
    add_input_options(parser)
    add_machine_options(parser, peak=False)
    options = parser.parse_args()
    runs = read_all(options.inputs, given_of(options))
    rows = efficiency.scaling_table(runs, options.baseline_nodes)
    try:
        options.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{options.output}: can't be made ({error.strerror})") from error
    table = options.output / "table.csv"
    write_csv(table, rows)
    budget = Budget(options.samples, options.price_per_gpu_hour, options.deadline_hours)
    write(build(runs, rows, machine_of(options), table, budget), options.output)
    print(f"wrote {options.output / 'report.html'}, report.md and table.csv beside it")


def command() -> None:
    """Console command `clap-report`."""
    run_command(main)


if __name__ == "__main__":
    command()
