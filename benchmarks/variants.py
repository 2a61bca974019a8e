"""Command: settings of a run tried one against the other on this machine, a short run each: which are the quickest here?

    python -m benchmarks.variants ds_configs/htsat_tiny.json --vary clap.compile=off,towers,towers-max-autotune

Runs every combination and makes a table of samples/s/GPU with its interval and the ratio to the first. One that fails, doesn't
fit or takes too long is a row like any other. Output, settings and run directory of each are kept in the folder, whose
`variants.json` holds the rows so far. No torch, no DeepSpeed.
"""

from __future__ import annotations

import itertools
import json
import re
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import exit_on_sigterm, make_parser, run_for, show, table
from clap_ds.config.changes import parse_assignment, parse_varied, read_config, with_field
from clap_ds.config.errors import UserError, run_alone
from clap_ds.config.files import write_object
from clap_ds.config.places import PACKAGE, work_folder

BENCH = [sys.executable, "-m", "clap_ds.ranks.start", str(PACKAGE / "bench.py"), "--deepspeed_config"]
"""A run's command, on all GPUs of this machine, before the name of its JSON."""
SHORT = [f"clap.bench.{each}" for each in ("warmup_steps=5", "windows=6", "steps_per_window=4", "breakdown_steps=0")]
COLUMNS = (
    "settings {title} | samples/s/GPU {samples_per_s_per_gpu[mean]:,.2f}"
    " | interval {samples_per_s_per_gpu[low]:,.2f}–{samples_per_s_per_gpu[high]:,.2f}"
    " | its coverage {samples_per_s_per_gpu[coverage]:.1%} | ratio {ratio:.3f}"
    " | memory, GB {memory_gb:.2f} | seconds {seconds:.0f} | state {state} | note {note}"
)


def run_bench(content: dict[str, Any], settings: Mapping[str, Any], folder: Path, limit_s: float) -> dict[str, Any]:
    """Run a benchmark with some settings changed, its output in `output.log` of a folder, its run directory beside that. Its
    row: `settings`, `state` (`failed` where the run has none), `seconds`, rate and memory, or why not in `note`."""
    for name, value in {**settings, "clap.output": {"root": str(folder.parent), "label": folder.name}}.items():
        content = with_field(content, name, value)
    config, log = folder / "config.json", folder / "output.log"
    folder.mkdir(parents=True, exist_ok=True)
    write_object(config, content)
    began_s = time.monotonic()
    ending = run_for([*BENCH, str(config)], log, limit_s)
    row = {"settings": dict(settings), "state": "failed", "seconds": time.monotonic() - began_s, "note": ""}
    found = sorted(folder.parent.glob(f"{folder.name}-*/summary.json"), key=lambda path: path.stat().st_mtime)
    summary = json.loads(found[-1].read_text()) if found else {}
    if ending == summary.get("state") == "completed":
        figures = {name: summary.get(name) for name in ("samples_per_s_per_gpu", "memory_peak_bytes")}
        return {**row, "state": "completed", **figures}
    if summary.get("state") not in (None, "completed", "running"):
        row["state"] = summary["state"]
    note = ending if ending.startswith("stopped") else summary.get("error") or last_error(log)
    return {**row, "note": note.replace("|", "/")}


def last_error(log: Path) -> str:
    """What a run's output ends with."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if re.search(r"\berror: |Error\b", line)]
    return (errors or lines or ["no output"])[-1].removeprefix("error: ")[:200]


def title(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={each if isinstance(each, str) else json.dumps(each)}" for name, each in settings.items())


def format_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Markdown, a row each; ratios are to the first that has a rate."""
    rates = [(row.get("samples_per_s_per_gpu") or {}).get("mean") for row in rows]
    first = next(filter(None, rates), 1.0)
    return table(COLUMNS, [
        {**row, "title": title(row["settings"]), "memory_gb": (row.get("memory_peak_bytes") or 0) / 1e9}
        | ({"ratio": rate / first} if rate else {})
        for row, rate in zip(rows, rates, strict=True)
    ])  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Run every combination, the last field changing quickest, and keep the rows and their table as they come. 1 where no run
    completed, a UserError where the configuration or an option is wrong."""
    parser = make_parser("variants", __doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("--vary", action="append", required=True, metavar="NAME=VALUE,VALUE…", help="any field; repeat")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="any field, for all of them")
    parser.add_argument("--folder", type=Path, help="default: runs/variants/<config>-<time>")
    parser.add_argument("--limit_s", type=float, default=300.0, help="longest a run may take; default 300")
    parser.epilog = f"Runs are short ({', '.join(SHORT)}) unless --set says otherwise."
    exit_on_sigterm()
    arguments = parser.parse_args(argv)
    content = read_config(arguments.config)
    for assignment in (*SHORT, *arguments.set):
        content = with_field(content, *parse_assignment(assignment))
    varied = dict(parse_varied(text) for text in arguments.vary)
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    folder = arguments.folder or work_folder() / "runs" / "variants" / f"{arguments.config.stem}-{stamp}"
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"--folder {folder}: expected a new or empty folder")
    rows: list[dict[str, Any]] = []
    for number, values in enumerate(itertools.product(*varied.values()), start=1):
        settings = dict(zip(varied, values, strict=True))
        print(f"{number}  {title(settings)}, in {folder}", flush=True)
        rows.append(run_bench(content, settings, folder.resolve() / f"{number:02}", arguments.limit_s))
        show(arguments.output or folder / "variants.md", format_table(rows), rows)
    return int(all(row["state"] != "completed" for row in rows))


if __name__ == "__main__":
    run_alone(main)
