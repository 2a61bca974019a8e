"""Everything there is to say about some runs, as one HTML page and as Markdown, to send to a colleague.

    python analysis/report.py RUN_OR_LOG… --output report [--samples 1e9 --price_per_gpu_hour 2.5]

Puts together what the other commands of this folder work out, says where each number comes from, and works out nothing itself.
The page holds its figures and refers to nothing outside.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from clap_ds.analysis import cost, efficiency, monitor, plot_run, plot_scaling, project
from clap_ds.analysis.csv_table import read_table_runs
from clap_ds.analysis.figure import Picture, anchor, page
from clap_ds.analysis.provenance import provenance
from clap_ds.analysis.published import FORWARD_GFLOPS, PUBLISHED_DIR, PUBLISHED_TABLES
from clap_ds.analysis.runs import COST_OPTIONS, INPUT_OPTIONS, MACHINE_OPTIONS, parse_options, read_runs
from clap_ds.analysis.step_model import Machine
from clap_ds.analysis.table import Row, Run, Scale, by_series, count_of, markdown_table, write_csv
from clap_ds.analysis.weak_scaling import Series, series_of
from clap_ds.config.errors import UserError, run_alone
from clap_ds.config.places import VERSION
from clap_ds.record.schema import STEP_PHASES

TITLE = "CLAP training: throughput and scaling"
EFFICIENT = 90
"""Per cent; the furthest scale that has them is in the summary."""
ANOMALY = re.compile(r"outlier|above 100 %|more than any|did not complete|MFU|settings differ|^(?!completed)\w+: ")
"""Of a row's notes, those that go to the top."""


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
            "Runs": lambda: [provenance(self.runs)],
        }
        if watched := monitor.table([Path(source) for source in dict.fromkeys(run.source for run in self.runs)]):
            sections["What the GPUs did meanwhile"] = lambda: [watched]
        if self.options.samples:
            sections[f"Cost of {self.options.samples:g} samples"] = self.cost
        made = f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, by version {VERSION}"
        blocks = [f"# {TITLE}", made, *attempt("The summary", self.summary), "Contents:"]
        blocks.append("\n".join(f"- [{heading}](#{anchor(heading)})" for heading in sections))
        for heading, make in sections.items():
            blocks += [f"## {heading}", *attempt("This part", make)]
        return "\n\n".join(block.strip() for block in blocks if block) + "\n"

    def summary(self) -> Iterator[str]:
        """The answer: of each series what was measured, how well it scales, how far it would, and what stands out."""
        num_rows = sum(run.kind == "table" for run in self.runs)
        counts = {"run": len(self.runs) - num_rows, "table row": num_rows}
        read = " and ".join(count_of(number, noun) for noun, number in counts.items() if number)
        yield f"From {read}, at {count_of(len({(row.nodes, row.gpus) for row in self.rows}), 'scale')}."
        for members in by_series(self.rows):
            lines = list(findings(members))
            if len({row.nodes for row in members if row.rate}) > 1:
                lines += attempt("A projection", lambda: [f"Projected: {project.headline(self.series(members))}."])  # noqa: B023
            yield "\n".join([f"**{members[0].title}**", "", *(f"- {line}" for line in lines)])

    def figure(self, name: str, caption: str, picture: Picture) -> str:
        """The picture, kept and written, as Markdown."""
        picture.save(self.folder / name)
        self.drawings[name] = picture.svg(f"f{len(self.drawings)}-")
        return f"![{caption}]({name})"

    def efficiency(self) -> Iterator[str]:
        yield efficiency.render(self.rows)
        if series := by_series([row for row in self.rows if row.rate]):
            picture = plot_scaling.draw(plot_scaling.curves_of(series))
            yield self.figure("scaling.png", "Efficiency, throughput and MFU by scale; published in grey", picture)

    def step_time(self) -> Iterator[str]:
        yield "Parts are from an instrumented pass that synchronises between them, after the timed one."
        for number, members in enumerate(by_series(self.rows), start=1):
            yield step_table(members)
            if any(row.breakdown_s for row in members):
                caption = f"Parts of a step, {members[0].title}, with shares at the largest scale"
                yield self.figure(f"breakdown-{number}.png", caption, plot_run.draw_breakdown(members))

    def series(self, rows: Sequence[Scale]) -> Series:
        """A series with the method that its runs' configuration says; UserError, saying why, if it can't be projected."""
        config = next((run.config for row in rows for run in row.runs if run.config), {})
        return series_of("This series", rows, project.machine_of(self.options), project.method_of(config))

    def projections(self) -> Iterator[str]:
        yield "Calculated by a model fitted to what was measured; only what is called measured was."
        for number, members in enumerate(by_series(self.rows), start=1):
            what = f"The projection of {members[0].title}"
            yield from attempt(what, lambda: self.projection(members, f"projection-{number}.png"))  # noqa: B023

    def projection(self, members: Sequence[Scale], name: str) -> Iterator[str]:
        """Up to four times the GPUs measured."""
        series = self.series(members)
        yield re.sub("^##", "###", project.render(series), flags=re.MULTILINE)
        if series.machine == Machine() and "GH200" not in series.title:
            yield (
                "Links, latency and peak assumed are those of a GH200 node, which this was not measured on: "
                "give this machine's (`--node_gbytes_per_s` and so on)."
            )
        caption = f"Projection of {series.title}: points measured, dashed extrapolated, with the band described above"
        yield self.figure(name, caption, plot_scaling.draw_projection([series], project.headline(series)))

    def cost(self) -> Iterator[str]:
        price = cost.price_of(self.options)
        yield cost.render(cost.costs(self.rows, self.options.samples, price), self.options.deadline_hours, price)
        yield cost.left_out(self.rows)


def attempt(what: str, make: Callable[[], Iterable[str]]) -> Iterator[str]:
    """The blocks that `make` gives, as far as it gets; then that `what` can't be made, and why."""
    try:
        yield from make()
    except Exception as error:
        reason = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        yield f"**{what} can't be made**: {reason.rstrip('.')}."


def findings(members: Sequence[Row]) -> Iterator[str]:
    """A series' answer in sentences: the largest scale, the furthest that keeps its efficiency, and what stands out."""
    measured = [row for row in members if row.rate]
    if not measured:
        yield f"No rate was measured ({members[0].state})."
        return
    last = max(measured, key=lambda row: row.gpus)
    yield f"{plot_scaling.answer(measured)}, {last.cell('samples_per_s')} samples/s in all."
    kept = [row for row in measured if (row.scaling_efficiency_percent or 0.0) >= EFFICIENT]
    if len(measured) > 1 and kept:
        yield f"{EFFICIENT} % efficiency or more up to {max(kept, key=lambda row: row.gpus).scale}."
    if last.uncertainty_from:
        yield f"± from: {last.uncertainty_from}."
    for row in members:
        yield from (f"On {row.scale}: {note}." for note in row.notes.split("; ") if ANOMALY.search(note))


def published_comparison(rows: Sequence[Row]) -> str:
    """Ours beside LAION's at the same scale, or beside its one node where it has no such scale."""
    blocks = []
    header = ("nodes", "GPUs", "samples/s/GPU", "efficiency %", "published", "on GPUs", "efficiency %", "ratio")
    for stem, facts in PUBLISHED_TABLES.items():
        published = efficiency.scaling_table(read_table_runs(PUBLISHED_DIR / f"{stem}.csv"))
        ours = [row for row in rows if row.model == facts["model"] and row.rate and row.state != "published"]
        body = []
        for row in ours:
            other = next((other for other in published if other.gpus == row.gpus), published[0])
            cells = row.cells("nodes", "gpus", "samples_per_s_per_gpu", "scaling_efficiency_percent")
            cells += other.cells("samples_per_s_per_gpu", "gpus", "scaling_efficiency_percent")
            body.append([*cells, f"{(row.rate or 0.0) / (other.rate or 1.0):#.4g}"])
        if body:
            blocks += [f"### {facts['model'].replace('_', '-')}", markdown_table(header, body)]
            if others := {row.device for row in ours} - {facts["device"]}:
                here = f"Published on {facts['device']}, here on {', '.join(sorted(others))}"
                blocks.append(f"{here}: the ratio compares machines as much as programs.")
    return "\n\n".join(blocks) or f"Published are {', '.join(FORWARD_GFLOPS)}; none of these was measured here."


def step_table(rows: Sequence[Row]) -> str:
    """Batch, seconds a step and those of its parts at every scale of one series."""
    parts = [f"{part}_s" for part in STEP_PHASES if any(part in row.breakdown_s for row in rows)]
    columns = ("nodes", "gpus", "batch_per_gpu", "global_batch", "repeats", "step_time_s", "slowest_rank_step_time_s")
    what = rows[0].unit
    header = ["nodes", what, f"batch per {what.removesuffix('s')}", "global batch", "runs", "step s", "slowest rank s"]
    header += [part.removesuffix("_s").replace("_", " ") + " s" for part in parts]
    text = f"### {rows[0].title}\n\n{markdown_table(header, [row.cells(*columns, *parts) for row in rows])}"
    return text if parts else f"{text}\n\nNo breakdown was recorded."


def main() -> None:
    names = ("inputs", "--output", "--baseline_nodes", *COST_OPTIONS, *INPUT_OPTIONS, *MACHINE_OPTIONS)
    description = "One page about some runs: efficiency, reasons, projection, provenance."
    told = "folder to write report.html, report.md, table.csv and the pictures to (default: report)"
    options = parse_options(description, *names, output={"default": Path("report"), "help": told, "metavar": "FOLDER"})
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
