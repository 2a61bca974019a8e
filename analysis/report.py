"""Everything there is to say about some runs, as one HTML page and as Markdown, to send to a colleague.

    python analysis/report.py RUN_OR_LOG… --output report [--samples 1e9 --price_per_gpu_hour 2.5]

Puts together what the other commands of this folder work out, says where each number comes from and what is missing, and
works out nothing itself. The page holds its figures, with values on hover, and refers to nothing outside.
"""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from clap_ds.analysis import cost, efficiency, plot_run, plot_scaling, project
from clap_ds.analysis.figure import Picture, page
from clap_ds.analysis.published import FORWARD_GFLOPS, PUBLISHED_DIR, PUBLISHED_TABLES
from clap_ds.analysis.runs import COST_OPTIONS, INPUT_OPTIONS, MACHINE_OPTIONS, parse_options, read_runs
from clap_ds.analysis.step_model import Machine, Method, Series, series_of
from clap_ds.analysis.table import Row, Run, Scale, by_series, markdown_table, read_table_runs, write_csv
from clap_ds.config.errors import UserError, run_alone
from clap_ds.record.schema import STEP_PHASES

TITLE = "CLAP training: throughput and scaling"
PACKAGES = ("torch", "deepspeed", "transformers")


def build(runs: Sequence[Run], table: Path, options: argparse.Namespace) -> tuple[str, dict[str, Picture]]:
    """The whole report, Markdown and the figures it shows by file name, and the runs' scaling table written to `table`."""
    rows, figures = efficiency.scaling_table(runs, options.baseline_nodes), {}
    write_csv(table, rows)

    def shown(name: str, alt: str, picture: Picture) -> str:
        figures[name] = picture
        return f"![{alt}]({name})"

    blocks = [f"# {TITLE}", headline(runs, rows), "## Efficiency", efficiency.render(rows)]
    if any(row.rate for row in rows):
        picture = plot_scaling.draw(plot_scaling.read_curves([table]))
        blocks.append(shown("scaling.png", "Throughput, efficiency and MFU against GPUs", picture))
        blocks += ["## Against the published tables", published_comparison(rows)]
    blocks.append("## Where a step's time goes")
    blocks.append("From an instrumented pass that synchronises between the parts, after the timed one.")
    for number, members in enumerate(by_series(rows), start=1):
        blocks += [step_table(members), changes_with_scale(members)]
        if any(row.breakdown_s for row in members):
            picture = plot_run.draw_breakdown(members)
            blocks.append(shown(f"breakdown-{number}.png", f"Parts of a step, {members[0].title}", picture))
    blocks.append("## Projection")
    for number, members in enumerate(by_series(rows), start=1):
        try:
            text, picture = _projection(projectable(members, project.machine_of(options)))
            blocks += [text, shown(f"projection-{number}.png", f"Projection of {members[0].title}", picture)]
        except UserError as error:
            blocks += [f"### {members[0].title}", f"{error}."]
    if options.samples:
        found = cost.costs(rows, options.samples, options.price_per_gpu_hour)
        blocks += [f"## Cost of {options.samples:g} samples", cost.render(found, options.deadline_hours)]
    missing = "\n".join(f"- {gap}" for gap in gaps(rows, runs)) or "Nothing this report looks for."
    blocks += ["## Runs", provenance(runs), "## What is missing", missing]
    return "\n\n".join(block.strip() for block in blocks if block) + "\n", figures


def headline(runs: Sequence[Run], rows: Sequence[Row]) -> str:
    """What was measured, in a sentence for each series."""
    num_rows = sum(run.kind == "table" for run in runs)
    counts = {"run": len(runs) - num_rows, "table row": num_rows}
    read = " and ".join(_count(number, noun) for noun, number in counts.items() if number)
    lines = [f"From {read}, at {_count(len({(row.nodes, row.gpus) for row in rows}), 'scale')}.", ""]
    for members in by_series(rows):
        text = f"- **{members[0].title}**: no rate was measured ({members[0].state})"
        if measured := sorted((row for row in members if row.rate), key=lambda row: (row.nodes, row.gpus)):
            last = max(measured, key=lambda row: row.gpus)
            scale = f"{_count(last.gpus, 'GPU')} ({_count(last.nodes, 'node')})"
            text = f"- **{last.title}**: {last.cell('samples_per_s_per_gpu')} samples/s/GPU on {scale}"
            if len(measured) > 1 and last.scaling_efficiency_percent is not None:
                spread = last.scaling_efficiency_2sigma_percent
                percent = f"{last.scaling_efficiency_percent:.1f}" + (f" ± {spread:.1f}" if spread is not None else "")
                text += f", {percent} % of the rate per GPU on {_count(measured[0].gpus, 'GPU')}"
                text += f" (± from {last.uncertainty_from})" if spread is not None and last.uncertainty_from else ""
        lines.append(f"{text}.")
    return "\n".join(lines)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


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
    header = ["nodes", "GPUs", "batch per GPU", "global batch", "runs", "step ms", "slowest rank ms"]
    header += [f"{part.replace('_', ' ')} ms" for part in parts]
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
        return f"No part of the step grew from {first.gpus} to {last.gpus} GPUs."
    growth = f"{part.replace('_', ' ')} grew most: {1000 * grown[part]:+.1f} ms a step"
    return f"From {first.gpus} to {last.gpus} GPUs, {growth}."


def _projection(series: Series) -> tuple[str, Picture]:
    """Up to eight times the GPUs measured."""
    largest = max(nodes for nodes, _ in series.rates) * series.workload.gpus_per_node
    text = project.render(series, gpus=[largest * factor // 2 for factor in (1, 2, 4, 8, 16)])
    text = re.sub("^##", "###", text, flags=re.MULTILINE)
    if series.machine == Machine() and "GH200" not in series.title:
        text += (
            "\nLinks, latency and peak assumed are those of a GH200 node, which this was not measured on: "
            "give this machine's (`--node_gbytes_per_s` and so on)."
        )
    return text, plot_scaling.draw_projection([series], max_gpus=8 * largest)


def projectable(rows: Sequence[Scale], machine: Machine) -> Series:
    """A series with the method that its runs' configuration says; UserError, saying why, if it can't be projected."""
    if rows[0].scaling == "strong":
        raise UserError("Not for strong scaling: the model is one of a constant batch per GPU")
    config = next((run.config for row in rows for run in row.runs if run.config), {})
    return series_of("This series", rows, machine, method_of(config))


def method_of(config: Mapping[str, Any]) -> Method:
    """How a run was trained, from its configuration; without one, as the published runs were."""
    if not config:
        return Method()
    clap = config.get("clap", {})
    is_bf16 = bool(config.get("bf16", {}).get("enabled"))
    features = clap.get("loss", {}).get("features") or ("bf16" if is_bf16 else "fp32")
    return replace(
        project.engine_methods()["both"],
        overlap=clap.get("gradient_sync", "overlapped") == "overlapped",
        gradient_bytes=2 if is_bf16 or config.get("communication_data_type") in ("bf16", "fp16") else 4,
        feature_bytes=2 if features == "bf16" else 4,
        bucket_bytes=1e6 * clap.get("gradient_bucket_mb", project.DEFAULT_BUCKET_MB),
    )


def provenance(runs: Sequence[Run]) -> str:
    """A table with a line a run, log or table, without empty columns; then each command that is known, once."""
    by_source: dict[str, list[Run]] = {}
    for run in runs:
        by_source.setdefault(run.source, []).append(run)
    lines: dict[str, dict[str, str]] = {}
    commands: dict[str, list[str]] = {}
    for source, members in by_source.items():
        first, environment = members[0], members[0].environment
        hosts = [str(host) for host in environment.get("hosts") or ()]
        versions = environment.get("versions") or {}
        nodes, gpus = [run.nodes for run in members], [run.gpus for run in members]
        known = {
            "state": ", ".join(dict.fromkeys(run.state for run in members)),
            "nodes": "–".join(map(str, dict.fromkeys((min(nodes), max(nodes))))),
            "GPUs": "–".join(map(str, dict.fromkeys((min(gpus), max(gpus))))),
            "device": first.device, **{name: versions.get(name) for name in PACKAGES},
            "Python": environment.get("python"), "driver": environment.get("driver"), "commit": _commit(first)[:12],
            "hosts": f"{hosts[0]} … {hosts[-1]}" if len(hosts) > 2 else ", ".join(hosts),
            "finished": first.finished[:19].replace("T", " "),
        }  # fmt: skip
        lines[source] = {"run": first.name, **{name: str(value or "") for name, value in known.items()}}
        if command := environment.get("command"):
            commands.setdefault(shlex.join(map(str, command)), []).append(first.name)
    header = [name for name in lines[runs[0].source] if any(line[name] for line in lines.values())]
    text = markdown_table(header, [[line[name] for name in header] for line in lines.values()])
    listed = "\n".join(f"- `{command}`: {', '.join(names)}" for command, names in commands.items())
    return f"{text}\n\nCommands:\n\n{listed}" if listed else text


def _commit(run: Run) -> str:
    return str(run.environment.get("git_commit") or "")


def gaps(rows: Sequence[Row], runs: Sequence[Run]) -> Iterator[str]:
    """What a reader would look for and not find, and what should make them doubt."""
    for members in by_series(rows):
        title = members[0].title
        measured = [row for row in members if row.rate]
        if len({row.gpus for row in measured}) < 2:
            yield f"{title}: {_count(len(measured), 'scale')} with a rate, so no scaling efficiency"
        if without := _gpus(row for row in measured if row.samples_per_s_per_gpu_2sigma is None):
            yield f"{title}: no spread known at {without} GPUs"
        if single := _gpus(row for row in measured if row.repeats == 1 and row.state != "published"):
            yield f"{title}: one run only at {single} GPUs, so its spread over repeats is not known"
        if measured and not any(row.mfu_percent or row.mfu_model_percent for row in measured):
            yield f"{title}: no MFU; the device's peak or the model's FLOPs are not known"
        if unbroken := _gpus(row for row in measured if not row.breakdown_s):
            yield f"{title}: no breakdown of the step at {unbroken} GPUs"
    for run in runs:
        if run.state not in ("completed", "published"):
            reason = f": {' '.join(run.error.split())[:160]}" if run.error else ""
            yield f"{run.name}: state {run.state}{reason}"
    if without := _some(run for run in runs if run.kind != "record"):
        yield f"no record of versions, commit or command: {without}"
    if uncommitted := _some(run for run in runs if run.kind == "record" and not _commit(run)):
        yield f"git commit not recorded: {uncommitted}"
    versions = [
        str([known.get(name) for name in PACKAGES]) for run in runs if (known := run.environment.get("versions"))
    ]
    for what, found in (("commit", map(_commit, runs)), ("versions", versions)):
        if len(set(filter(None, found))) > 1:
            yield f"runs differ in {what}: compare them with care"


def _gpus(rows: Iterator[Row]) -> str:
    return ", ".join(str(row.gpus) for row in rows)


def _some(runs: Iterator[Run]) -> str:
    names = list(dict.fromkeys(run.name for run in runs))
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def main() -> None:
    names = ("inputs", "--output", "--baseline_nodes", *COST_OPTIONS, *INPUT_OPTIONS, *MACHINE_OPTIONS)
    description = "One page about some runs: efficiency, reasons, projection, provenance."
    options = parse_options(description, *names, output=Path("report"))
    runs = read_runs(options.inputs, options)
    options.output.mkdir(parents=True, exist_ok=True)
    markdown, figures = build(runs, options.output / "table.csv", options)
    for name, picture in figures.items():
        picture.save(options.output / name)
    drawings = {name: picture.svg(f"f{number}-") for number, (name, picture) in enumerate(figures.items())}
    (options.output / "report.md").write_text(markdown, encoding="utf-8")
    (options.output / "report.html").write_text(page(TITLE, markdown, drawings), encoding="utf-8")
    print(f"wrote {options.output / 'report.html'}, report.md and table.csv beside it")


def command() -> None:
    """Console command `clap-report`."""
    run_alone(main)


if __name__ == "__main__":
    command()
