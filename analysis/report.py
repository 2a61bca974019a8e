"""Write a report about runs, as one HTML page and as Markdown, with the results of the other
commands in this folder.

Examples:
    clap-ds report runs/sweeps/htsat_tiny-… --output report
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

from clap_ds.analysis import extrapolate, plot_run, plot_scaling, scaling
from clap_ds.analysis.figure import Picture, page
from clap_ds.analysis.read_run import read_json
from clap_ds.analysis.runs import input_parser, read_runs
from clap_ds.analysis.table import Run, Scale, by_series, markdown_table, plain_text, write_csv
from clap_ds.analysis.weak_scaling import series_of
from clap_ds.run_records.schema import STEP_PHASES, Straggler
from clap_ds.utils.errors import UserError, run_alone
from clap_ds.utils.files import write_atomically
from clap_ds.utils.paths import VERSION
from clap_ds.utils.redaction import redacted_all

TITLE = "CLAP training: throughput and scaling"
VERSIONS = ("torch", "deepspeed", "transformers", "python", "driver")
STEP_COLUMNS = {
    "nodes": "nodes", "GPUs": "gpus", "batch of each": "batch_per_gpu", "global batch": "global_batch", "runs": "repeats",
    "step s": "step_time_s", "slowest rank s": "slowest_rank_step_time_s",
}  # fmt: skip


def figure(path: Path, caption: str, picture: Picture) -> str:
    """Save a picture next to the report and return its Markdown."""
    picture.save(path)
    return f"![]({path.name})\n\n*{caption}*"


def efficiencies(rows: Sequence[Scale], folder: Path) -> Iterator[str]:
    yield scaling.render(rows)
    if series := by_series([row for row in rows if row.rate]):
        picture = plot_scaling.draw({members[0].title: members for members in series})
        yield figure(
            folder / "scaling.png",
            "Scaling efficiency, and total samples/s beside the ideal line",
            picture,
        )


def step_times(rows: Sequence[Scale], folder: Path) -> Iterator[str]:
    """Yield tables of batch, seconds per step and its parts, at every scale of each series."""
    yield "Parts are from an instrumented pass after the timed one, which synchronizes between them."
    for number, members in enumerate(by_series(rows), start=1):
        columns = {
            **STEP_COLUMNS,
            **{f"{part.replace('_', ' ')} s": f"{part}_s" for part in STEP_PHASES},
        }
        yield f"### {members[0].title}"
        header = [name.replace("GPU", members[0].unit) for name in columns]
        yield markdown_table(
            header, [[row.cell(column) for column in columns.values()] for row in members]
        )
        if any(row.breakdown_s for row in members):
            caption = f"Parts of a step, {members[0].title}, with shares at the largest scale"
            yield figure(
                folder / f"breakdown-{number}.png", caption, plot_run.draw_breakdown(members)
            )


def projections(rows: Sequence[Scale], folder: Path) -> Iterator[str]:
    """Yield each series' projection to four times the measured GPUs, or why there is none."""
    yield "Values are computed by a model fitted to the measurements, except those labeled measured."
    for number, members in enumerate(by_series(rows), start=1):
        try:
            series = series_of(members)
        except UserError as error:
            yield f"Not projected: {plain_text(str(error))}."
            continue
        yield re.sub("^##", "###", extrapolate.render(series), flags=re.MULTILINE)
        caption = f"Projection of {series.title}: points measured, dashed extrapolated, in the band described above"
        yield figure(
            folder / f"projection-{number}.png", caption, plot_scaling.draw_projection([series])
        )


def summary(rows: Sequence[Scale]) -> Iterator[str]:
    """Yield each series' throughput and scaling."""
    for members in by_series(rows):
        measured = [row for row in members if row.rate]
        found = (
            plot_scaling.answer(measured)
            if measured
            else f"No rate was measured ({plain_text(members[0].state)})"
        )
        yield f"- **{members[0].title}**: {found}."


def provenance(runs: Sequence[Run]) -> Iterator[str]:
    """Yield a table with one line per run, then each known command once."""
    lines = []
    commands = dict[str, None]()
    for run in runs:
        known = {**(run.environment.get("versions") or {}), **run.environment}
        lines.append({
            "run": run.name, "nodes": run.nodes, "GPUs": run.gpus, "samples/s/GPU": run.cell("samples_per_s_per_gpu"),
            "state": run.state, "device": run.device, **{name: known.get(name) for name in VERSIONS},
            "commit": (known.get("git_commit") or "")[:12], "hosts": ", ".join(known.get("hosts") or ()),
            "finished": run.finished[:19].replace("T", " "),
        })  # fmt: skip
        if command := known.get("command"):
            commands[f"- Command: `{plain_text(shlex.join(redacted_all(command)))}`"] = None
    yield markdown_table(
        lines[0], [[str(value or "") for value in line.values()] for line in lines]
    )
    yield "\n".join(commands)


def stragglers(runs: Sequence[Run]) -> str:
    """Return a table of the ranks that were slow at the end of their run; empty if there are
    none."""
    names = list(Straggler.__annotations__)
    found = [
        (run.name, slow)
        for run in runs
        for slow in read_json(Path(run.source), "summary").get("stragglers") or ()
    ]
    rows = [[name, *(str(slow.get(column, "")) for column in names)] for name, slow in found]
    return markdown_table(["run", *names], rows)


def main(argv: Sequence[str] | None = None) -> None:
    parser = input_parser(__doc__)
    output_help = "write report.html, report.md, table.csv and pictures to this folder"
    parser.add_argument(
        "--output", type=Path, default=Path("report"), metavar="FOLDER", help=output_help
    )
    options = parser.parse_args(argv)
    runs = read_runs(options.inputs, options)
    folder = options.output
    rows = scaling.scaling_table(runs)
    folder.mkdir(parents=True, exist_ok=True)
    write_csv(folder / "table.csv", rows)
    sections: dict[str, Iterable[str]] = {
        "Summary": summary(rows),
        "Efficiency": efficiencies(rows, folder),
        "Where a step's time goes": step_times(rows, folder),
        "Projection": projections(rows, folder),
        "Runs": provenance(runs),
        "Stragglers": [stragglers([run for run in runs if run.kind == "record"])],
    }
    markdown = f"# {TITLE}\n\n{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, by version {VERSION}\n"
    for heading, section in sections.items():
        if blocks := [block.strip() for block in section if block]:
            markdown += "\n" + "\n\n".join([f"## {heading}", *blocks]) + "\n"
    write_atomically(folder / "report.md", markdown)
    write_atomically(folder / "report.html", page(TITLE, markdown, folder))
    print(f"wrote {folder / 'report.html'}, with report.md and table.csv")


if __name__ == "__main__":
    run_alone(main)
