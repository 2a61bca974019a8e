"""Everything there is to say about some runs, as one HTML page and as Markdown, to send to a colleague.

    python analysis/report.py RUN_OR_LOG… --output report [--samples 1e9 --price_per_gpu_hour 2.5]

Puts together what the other commands of this folder work out, says where each number comes from and what is missing, and
works out nothing itself. The page holds its figures, with values on hover, and refers to nothing outside.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from clap_ds.analysis import cost, efficiency, plot_run, plot_scaling, project
from clap_ds.analysis.figure import Picture, anchor, page
from clap_ds.analysis.provenance import gaps, provenance
from clap_ds.analysis.published import FORWARD_GFLOPS, PUBLISHED_DIR, PUBLISHED_TABLES
from clap_ds.analysis.runs import COST_OPTIONS, INPUT_OPTIONS, MACHINE_OPTIONS, parse_options, read_runs
from clap_ds.analysis.step_model import Machine, Series, series_of
from clap_ds.analysis.table import (
    Row,
    Run,
    Scale,
    by_series,
    count_of,
    markdown_table,
    read_table_runs,
    unit,
    write_csv,
)
from clap_ds.config.errors import UserError, run_alone
from clap_ds.config.places import VERSION
from clap_ds.record.schema import STEP_PHASES

TITLE = "CLAP training: throughput and scaling"


@dataclass
class Report:
    """Sections of a report, each as its blocks of Markdown; figures are written to `folder` and kept as SVG by file name."""

    runs: Sequence[Run]
    rows: Sequence[Scale]
    folder: Path
    options: argparse.Namespace
    drawings: dict[str, str] = field(default_factory=dict)

    def markdown(self) -> str:
        """The whole of it. A part that can't be made is named in its place."""
        sections: dict[str, Callable[[], Iterable[str]]] = {
            "Efficiency": self.efficiency,
            "Against the published tables": lambda: [published_comparison(self.rows)],
            "Where a step's time goes": self.step_time,
            "Projection": self.projections,
            **({f"Cost of {self.options.samples:g} samples": self.cost} if self.options.samples else {}),
            "Runs": lambda: [provenance(self.runs)],
            "What is missing": lambda: ["\n".join(f"- {gap}" for gap in gaps(self.rows, self.runs)) or "Nothing."],
        }
        made = f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, by version {VERSION}"
        blocks = [f"# {TITLE}", made, *attempt("The summary", lambda: [headline(self.runs, self.rows)]), "Contents:"]
        blocks.append("\n".join(f"- [{heading}](#{anchor(heading)})" for heading in sections))
        for heading, make in sections.items():
            blocks += [f"## {heading}", *attempt("This part", make)]
        return "\n\n".join(block.strip() for block in blocks if block) + "\n"

    def figure(self, name: str, caption: str, draw: Callable[[], Picture]) -> Iterator[str]:
        def shown() -> Iterator[str]:
            picture = draw()
            picture.save(self.folder / name)
            self.drawings[name] = picture.svg(f"f{len(self.drawings)}-")
            yield f"![{caption}]({name})"

        return attempt("The picture", shown)

    def efficiency(self) -> Iterator[str]:
        yield efficiency.render(self.rows)
        if any(row.rate for row in self.rows):
            what = unit(*(row.device for row in self.rows))
            caption = f"Throughput, efficiency and MFU against {what}; published values open"
            table = [self.folder / "table.csv"]
            yield from self.figure("scaling.png", caption, lambda: plot_scaling.draw(plot_scaling.read_curves(table)))

    def step_time(self) -> Iterator[str]:
        yield "From an instrumented pass that synchronises between the parts, after the timed one."
        for number, members in enumerate(by_series(self.rows), start=1):
            yield from (step_table(members), changes_with_scale(members))
            if any(row.breakdown_s for row in members):
                caption = f"Parts of a step, {members[0].title}, with shares at the largest scale"
                yield from self.figure(f"breakdown-{number}.png", caption, partial(plot_run.draw_breakdown, members))

    def projections(self) -> Iterator[str]:
        yield "Calculated by a model fitted to what was measured; only what is called measured was."
        for number, members in enumerate(by_series(self.rows), start=1):
            what = f"The projection of {members[0].title}"
            yield from attempt(what, partial(self.projection, members, f"projection-{number}.png"))

    def projection(self, members: Sequence[Scale], name: str) -> Iterator[str]:
        """Up to eight times the GPUs measured."""
        series = projectable(members, project.machine_of(self.options))
        largest = max(nodes for nodes, _ in series.rates) * series.workload.gpus_per_node
        text = project.render(series, gpus=[largest * factor // 2 for factor in (1, 2, 4, 8, 16)])
        yield re.sub("^##", "###", text, flags=re.MULTILINE)
        if series.machine == Machine() and "GH200" not in series.title:
            yield (
                "Links, latency and peak assumed are those of a GH200 node, which this was not measured on: "
                "give this machine's (`--node_gbytes_per_s` and so on)."
            )
        caption = f"Projection of {series.title}: points measured, dashed extrapolated, with the band described above"
        yield from self.figure(name, caption, partial(plot_scaling.draw_projection, [series], max_gpus=8 * largest))

    def cost(self) -> Iterator[str]:
        price = cost.price_of(self.options)
        yield cost.render(cost.costs(self.rows, self.options.samples, price), self.options.deadline_hours, price)


def attempt(what: str, make: Callable[[], Iterable[str]]) -> Iterator[str]:
    """The blocks that `make` gives, as far as it gets; then that `what` can't be made, and why."""
    try:
        yield from make()
    except Exception as error:
        reason = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        yield f"**{what} can't be made**: {reason.rstrip('.')}."


def headline(runs: Sequence[Run], rows: Sequence[Row]) -> str:
    """What was measured, in a sentence for each series."""
    num_rows = sum(run.kind == "table" for run in runs)
    counts = {"run": len(runs) - num_rows, "table row": num_rows}
    read = " and ".join(count_of(number, noun) for noun, number in counts.items() if number)
    lines = [f"From {read}, at {count_of(len({(row.nodes, row.gpus) for row in rows}), 'scale')}.", ""]
    for members in by_series(rows):
        text = f"- **{members[0].title}**: no rate was measured ({members[0].state})"
        if measured := sorted((row for row in members if row.rate), key=lambda row: (row.nodes, row.gpus)):
            last = max(measured, key=lambda row: row.gpus)
            one = last.unit.removesuffix("s")
            scale = f"{count_of(last.gpus, one)} ({count_of(last.nodes, 'node')})"
            text = f"- **{last.title}**: {last.cell('samples_per_s_per_gpu')} samples/s/{one} on {scale}"
            if len(measured) > 1 and last.scaling_efficiency_percent is not None:
                spread = last.scaling_efficiency_2sigma_percent
                percent = f"{last.scaling_efficiency_percent:.1f}" + (f" ± {spread:.1f}" if spread is not None else "")
                text += f", {percent} % of the rate per {one} on {count_of(measured[0].gpus, one)}"
                text += f" (± from {last.uncertainty_from})" if spread is not None and last.uncertainty_from else ""
        lines.append(f"{text}.")
    return "\n".join(lines)


def published_comparison(rows: Sequence[Row]) -> str:
    """Ours beside LAION's at the same scale, or beside its one node where it has no such scale."""
    blocks = []
    header = ("nodes", "GPUs", "device", "samples/s/GPU", "published", "on GPUs", "ratio", "efficiency %", "published %",
              "MFU % (published)", "published %")  # fmt: skip
    for stem, facts in PUBLISHED_TABLES.items():
        ours = [row for row in rows if row.model == facts["model"] and row.rate and row.state != "published"]
        if ours:
            published = efficiency.scaling_table(read_table_runs(PUBLISHED_DIR / f"{stem}.csv"))
            table = markdown_table(header, [_published_cells(row, published) for row in ours])
            blocks += [f"### {facts['model'].replace('_', '-')}", table]
            if devices := {row.device for row in ours} - {facts["device"]}:
                here = f"Published on {facts['device']}, here on {', '.join(sorted(devices))}"
                blocks.append(f"{here}: the ratio compares machines as much as programs.")
    if any(row.state == "published" for row in rows):
        blocks.append("The published tables are among the inputs themselves.")
    return "\n\n".join(blocks) or f"Published are {', '.join(FORWARD_GFLOPS)}; none of these was measured here."


def _published_cells(row: Row, published: Sequence[Row]) -> list[str]:
    same = next((other for other in published if other.gpus == row.gpus), None)
    other = same or published[0]
    assert row.rate
    assert other.rate
    cells = row.cells("nodes", "gpus", "device", "samples_per_s_per_gpu")
    cells += [*other.cells("samples_per_s_per_gpu", "gpus"), f"{row.rate / other.rate:#.4g}"]
    cells += [row.cell("scaling_efficiency_percent"), same.cell("scaling_efficiency_percent") if same else ""]
    return [*cells, row.cell("mfu_percent"), other.cell("mfu_percent")]


def step_table(rows: Sequence[Row]) -> str:
    """Batch, step time and the parts of a step at every scale of one series."""
    parts = [part for part in STEP_PHASES if any(part in row.breakdown_s for row in rows)]
    what = rows[0].unit
    header = ["nodes", what, f"batch per {what.removesuffix('s')}", "global batch", "runs", "step ms"]
    header += ["slowest rank ms", *(f"{part.replace('_', ' ')} ms" for part in parts)]
    body = []
    for row in rows:
        step_s = row.step_time_s or (row.batch_per_gpu / row.rate if row.batch_per_gpu and row.rate else None)
        seconds = [step_s, row.slowest_rank_step_time_s, *(row.breakdown_s.get(part) for part in parts)]
        milliseconds = ["" if value is None else f"{1000 * value:.1f}" for value in seconds]
        body.append(row.cells("nodes", "gpus", "batch_per_gpu", "global_batch", "repeats") + milliseconds)
    text = f"### {rows[0].title}\n\n{markdown_table(header, body)}"
    return text if parts else f"{text}\n\nNo breakdown was recorded."


def changes_with_scale(rows: Sequence[Row]) -> str:
    """Which part of the step grew most from the smallest scale to the largest; empty where that isn't known."""
    known = sorted((row for row in rows if row.breakdown_s and row.rate), key=lambda row: row.gpus)
    if not known or known[0].gpus == known[-1].gpus:
        return ""
    first, last = known[0], known[-1]
    grown = {part: last.breakdown_s.get(part, 0.0) - seconds for part, seconds in first.breakdown_s.items()}
    part = max(grown, key=lambda name: grown[name])
    if grown[part] <= 0:
        return f"No part of the step grew from {first.gpus} to {last.gpus} {last.unit}."
    growth = f"{part.replace('_', ' ')} grew most: {1000 * grown[part]:+.1f} ms a step"
    return f"From {first.gpus} to {last.gpus} {last.unit}, {growth}."


def projectable(rows: Sequence[Scale], machine: Machine) -> Series:
    """A series with the method that its runs' configuration says; UserError, saying why, if it can't be projected."""
    if rows[0].scaling == "strong":
        raise UserError("Not for strong scaling: the model is one of a constant batch per GPU")
    config = next((run.config for row in rows for run in row.runs if run.config), {})
    return series_of("This series", rows, machine, project.method_of(config))


def main() -> None:
    names = ("inputs", "--output", "--baseline_nodes", *COST_OPTIONS, *INPUT_OPTIONS, *MACHINE_OPTIONS)
    description = "One page about some runs: efficiency, reasons, projection, provenance."
    options = parse_options(description, *names, output=Path("report"))
    runs = read_runs(options.inputs, options)
    options.output.mkdir(parents=True, exist_ok=True)
    rows = efficiency.scaling_table(runs, options.baseline_nodes)
    write_csv(options.output / "table.csv", rows)
    report = Report(runs, rows, options.output, options)
    markdown = report.markdown()
    (options.output / "report.md").write_text(markdown, encoding="utf-8")
    (options.output / "report.html").write_text(page(TITLE, markdown, report.drawings), encoding="utf-8")
    print(f"wrote {options.output / 'report.html'}, report.md and table.csv beside it")


def command() -> None:
    """Console command `clap-report`."""
    run_alone(main)


if __name__ == "__main__":
    command()
