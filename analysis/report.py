"""Write a report about runs, as one HTML page and as Markdown, with the results of the other
commands in this folder.

Examples:
    clap-ds report runs/sweeps/htsat_tiny-… --output report
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from clap_ds.analysis import extrapolate, plot_run, plot_scaling, scaling
from clap_ds.analysis.figure import FigureBuilder, render_page
from clap_ds.analysis.read_run import read_json
from clap_ds.analysis.runs import input_parser, read_runs
from clap_ds.analysis.table import (
    Run,
    Scale,
    group_by_series,
    markdown_table,
    plain_text,
    write_csv,
)
from clap_ds.analysis.weak_scaling import make_series
from clap_ds.run_records.schema import STEP_PHASES, Straggler
from clap_ds.utils.errors import UserError, run_alone
from clap_ds.utils.files import write_atomically
from clap_ds.utils.paths import VERSION
from clap_ds.utils.redaction import redact_all

TITLE = "CLAP training: throughput and scaling"
VERSIONS = ("torch", "deepspeed", "transformers", "python", "driver")
STEP_COLUMNS = {
    "nodes": "nodes",
    "GPUs": "gpus",
    "batch of each": "batch_per_gpu",
    "global batch": "global_batch",
    "runs": "repeats",
    "step s": "step_time_s",
    "slowest rank s": "slowest_rank_step_time_s",
}


def save_figure(path: Path, caption: str, figure: FigureBuilder) -> str:
    """Save a figure next to the report and return its Markdown."""
    figure.save(path)
    return f"![]({path.name})\n\n*{caption}*"


def render_summary(rows: Sequence[Scale]) -> Iterator[str]:
    """Yield each series' throughput and scaling."""
    for members in group_by_series(rows):
        # All runs of the series failed.
        summary = f"No rate was measured ({plain_text(members[0].state)})"
        if measured := [row for row in members if row.rate]:
            summary = plot_scaling.summarize(measured)
        yield f"- **{members[0].title}**: {summary}."


def render_efficiencies(rows: Sequence[Scale], folder: Path) -> Iterator[str]:
    yield scaling.render(rows)
    curves = plot_scaling.select_curves(rows)
    if curves:
        figure = plot_scaling.draw_scaling(curves)
        caption = "Scaling efficiency, and total samples/s beside the ideal line"
        yield save_figure(folder / "scaling.png", caption, figure)


def render_step_times(rows: Sequence[Scale], folder: Path) -> Iterator[str]:
    """Yield tables of batch, seconds per step and its parts, at every scale of each series."""
    yield (
        "Parts are from an instrumented pass after the timed one, which synchronizes between them."
    )
    columns = {
        **STEP_COLUMNS,
        **{f"{part.replace('_', ' ')} s": f"{part}_s" for part in STEP_PHASES},
    }
    for number, members in enumerate(group_by_series(rows), start=1):
        title = members[0].title
        yield f"### {title}"
        # Ranks on CPUs aren't GPUs.
        header = [name.replace("GPU", members[0].unit) for name in columns]
        yield markdown_table(header, [map(row.cell, columns.values()) for row in members])
        if any(row.breakdown_s for row in members):
            caption = f"Parts of a step, {title}, with shares at the largest scale"
            path = folder / f"breakdown-{number}.png"
            yield save_figure(path, caption, plot_run.draw_breakdown(members))


def render_projections(rows: Sequence[Scale], folder: Path) -> Iterator[str]:
    """Yield each series' projection to four times the measured GPUs, or why there is none."""
    yield (
        "Values are computed by a model fitted to the measurements, except those labeled measured."
    )
    for number, members in enumerate(group_by_series(rows), start=1):
        try:
            series = make_series(members)
        except UserError as error:
            yield f"Not projected: {plain_text(str(error))}."
            continue
        # One level below this section's heading.
        yield re.sub("^##", "###", extrapolate.render(series), flags=re.MULTILINE)
        points = "points measured, dashed extrapolated, in the band described above"
        caption = f"Projection of {series.title}: {points}"
        path = folder / f"projection-{number}.png"
        yield save_figure(path, caption, plot_scaling.draw_projection([series]))


def render_runs(runs: Sequence[Run]) -> Iterator[str]:
    """Yield a table with one line per run, then each known command once."""
    lines: list[dict[str, Any]] = []
    commands = dict[str, None]()
    for run in runs:
        # Versions stand in an object of their own.
        environment = {**(run.environment.get("versions") or {}), **run.environment}
        lines.append(
            {
                "run": run.name,
                "nodes": run.nodes,
                "GPUs": run.gpus,
                "samples/s/GPU": run.cell("samples_per_s_per_gpu"),
                "state": run.state,
                "device": run.device,
                **{name: environment.get(name) for name in VERSIONS},
                "commit": (environment.get("git_commit") or "")[:12],
                "hosts": ", ".join(environment.get("hosts") or ()),
                # `2026-11-20T19:21:05+00:00`
                "finished": run.finished[:19].replace("T", " "),
            }
        )
        if command := environment.get("command"):
            # Equal commands are listed once, without secrets.
            commands[f"- Command: `{plain_text(shlex.join(redact_all(command)))}`"] = None
    cells = []
    for line in lines:
        cells.append([str(value or "") for value in line.values()])
    yield markdown_table(lines[0], cells)
    yield "\n".join(commands)


def render_stragglers(runs: Sequence[Run]) -> Iterator[str]:
    """Yield a table of the ranks that were slow at the end of their run, if there are any."""
    columns = list(Straggler.__annotations__)
    rows = []
    for run in runs:
        if run.kind == "record":
            summary = read_json(Path(run.source), "summary")
            for straggler in summary.get("stragglers") or ():
                values = [str(straggler.get(column, "")) for column in columns]
                rows.append([run.name, *values])
    yield markdown_table(["run", *columns], rows)


def main(argv: Sequence[str] | None = None) -> None:
    parser = input_parser(__doc__)
    output_help = "write report.html, report.md, table.csv and pictures to this folder"
    default = Path("report")
    parser.add_argument("--output", type=Path, default=default, metavar="FOLDER", help=output_help)
    options = parser.parse_args(argv)
    runs = read_runs(options.inputs, options)
    folder = options.output
    rows = scaling.scaling_table(runs)
    folder.mkdir(parents=True, exist_ok=True)
    write_csv(folder / "table.csv", rows)
    # A section draws its pictures into the folder while it is rendered.
    sections = {
        "Summary": render_summary(rows),
        "Efficiency": render_efficiencies(rows, folder),
        "Where a step's time goes": render_step_times(rows, folder),
        "Projection": render_projections(rows, folder),
        "Runs": render_runs(runs),
        "Stragglers": render_stragglers(runs),
    }
    markdown = f"# {TITLE}\n\n{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, by version {VERSION}\n"
    for heading, section in sections.items():
        # An empty section has no heading.
        blocks = [block.strip() for block in section if block]
        if blocks:
            markdown += "\n" + "\n\n".join([f"## {heading}", *blocks]) + "\n"
    write_atomically(folder / "report.md", markdown)
    write_atomically(folder / "report.html", render_page(TITLE, markdown, folder))
    print(f"wrote {folder / 'report.html'}, with report.md and table.csv")


if __name__ == "__main__":
    run_alone(main)
