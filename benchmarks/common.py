"""Shared helpers of the benchmark commands: options, interleaved timing, subprocesses, tables,
results. No torch."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from clap_ds.analysis.table import markdown_table
from clap_ds.config import arguments
from clap_ds.config.arguments import read_config, with_assignments, with_field
from clap_ds.utils.files import read_json, write_atomically, write_object
from clap_ds.utils.paths import commit, work_folder

# Between SIGTERM and SIGKILL.
EXIT_GRACE_S = 5.0


def make_parser(doc: str | None) -> argparse.ArgumentParser:
    """Return the parser of a benchmark, with `--output` for `show`."""
    parser = arguments.make_parser(doc)
    parser.add_argument(
        "--output", type=Path, metavar="FILE.md", help="file to write the tables to, next to a JSON"
    )
    return parser


def show(output: Path | None, text: str, figures: Any) -> None:
    """Print the text, and `save` it."""
    print(text, flush=True)
    save(output, text, figures)


def save(output: Path | None, text: str, figures: Any) -> None:
    """If `output` is given, replace it by the text with command and commit, and the JSON next to it
    by the figures."""
    if output:
        output.parent.mkdir(parents=True, exist_ok=True)
        # `orig_argv` has `-m benchmarks.NAME`, unlike `argv`.
        made_by = f"Made by `{' '.join(['python', *sys.orig_argv[1:]])}` at commit {commit()}."
        write_atomically(output, f"{made_by}\n\n{text}\n")
        write_object(output.with_suffix(".json"), figures)


def table(columns: str, rows: Iterable[Mapping[str, Any]]) -> str:
    """Return a Markdown table. `columns`: `title {field:.1f} | title
    {rate[low]:,.1f}–{rate[high]:,.1f}`; cells of missing fields are empty."""
    templates = {}
    for column in columns.split(" | "):
        # A title may have units, so only the brace ends it.
        title, brace, template = column.partition("{")
        templates[title.strip()] = brace + template
    lines = []
    for row in rows:
        lines.append([_format_cell(template, row) for template in templates.values()])
    return markdown_table(templates, lines)


def _format_cell(template: str, row: Mapping[str, Any]) -> str:
    with contextlib.suppress(KeyError, TypeError):
        return template.format_map(row)
    return ""


def changed(config: Path, assignments: Iterable[str]) -> dict[str, Any]:
    """Read a run's JSON and set fields given as `NAME=VALUE`."""
    return with_assignments(read_config(config), assignments)


def exit_on_sigterm() -> None:
    """Make SIGTERM raise SystemExit, to run cleanup code."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))


def run_config(
    content: dict[str, Any], command: Sequence[str], folder: Path, limit_s: float
) -> dict[str, Any]:
    """Run a command in a new folder with the run's `config.json`, its `output.log` and run
    directories, and end its processes. Return a row: `state` (`completed`, `exit code 3`, `stopped
    after 60 s`), `seconds`, a failure's `note`, the summary."""
    folder.mkdir(parents=True)
    # Run directories get the prefix `run-`.
    output = {"dir": str(folder), "run_name": "run"}
    write_object(folder / "config.json", with_field(content, "clap.output", output))
    log = folder / "output.log"
    began_s = time.monotonic()
    options: Any = {"cwd": work_folder(), "stdin": subprocess.DEVNULL, "start_new_session": True}
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, **options)
    try:
        code = process.wait(limit_s)
        state = f"exit code {code}" if code else "completed"
    except subprocess.TimeoutExpired:
        state = f"stopped after {limit_s:.0f} s"
    finally:
        # The command may have left processes of its group behind.
        for signal_number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(process.pid, signal_number)
                process.wait(EXIT_GRACE_S)
    # Stays empty if the command wrote no summary.
    row = dict[str, Any]()
    for path in folder.glob("run-*/summary.json"):
        row = read_json(path)
        for kind in ("peak", "reserved_peak", "context"):
            row[f"{kind}_gb"] = (row.get(f"memory_{kind}_bytes") or 0) / 1e9
    note = ""
    if state != "completed":
        note = row.get("error") or _find_error(log)
    result = {"state": state, "seconds": time.monotonic() - began_s}
    # A vertical line would end the table's cell.
    return {**row, **result, "note": note.replace("|", "/")}


def _find_error(log: Path) -> str:
    """Return the last line of a log that states an error, or its last line."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
    # Launchers end with lines of their own, so errors count first.
    lines = [line for line in lines if line] or ["no output"]
    errors = [line for line in lines if re.search(r"\berror: |Error\b", line)]
    return (errors or lines)[-1].removeprefix("error: ")[:200]
