"""Command: settings of a run tried one against the other on this machine, a short run each: which are the quickest here?

    python -m benchmarks.variants ds_configs/htsat_tiny.json --vary clap.compile=off,step

Runs every combination and makes a table of samples/s/GPU with its interval and the ratio to the first. One that fails, doesn't
fit or takes too long is a row like any other. Output, settings and run directory of each are kept in the folder, whose
`variants.json` holds the rows so far. No torch, no DeepSpeed.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from clap_ds.analysis.table import markdown_table
from clap_ds.config.errors import told
from clap_ds.config.files import write_atomically
from clap_ds.config.places import PACKAGE, work_folder
from clap_ds.launch.run_config import parse_assignment, read_config, with_field

CONFIG = "{config}"
"""Stands in a command for the JSON of a combination."""
DEEPSPEED = [sys.executable, "-m", "deepspeed.launcher.runner", str(PACKAGE / "bench.py"), "--deepspeed_config", CONFIG]
SHORT = (
    "clap.bench.warmup_steps=5",
    "clap.bench.windows=6",
    "clap.bench.steps_per_window=4",
    "clap.bench.breakdown_steps=0",
)
LAST_WORDS_S = 10.0
"""Time a run that is stopped has to record its end."""

Choice = dict[str, Any]


@dataclass
class Row:
    """What one combination gave.

    Attributes:
        settings: the varied fields and their values.
        state: the run's, `failed` where it has none.
        seconds: from start to end, compilation included.
        note: why it isn't `completed`.
    """

    settings: Choice
    state: str
    seconds: float
    samples_per_s_per_gpu: dict[str, Any] | None = None
    memory_peak_bytes: float | None = None
    note: str = ""


def combinations(varied: Sequence[tuple[str, list[Any]]]) -> list[Choice]:
    """Every combination of the values, the last field changing quickest."""
    names = [name for name, _ in varied]
    return [dict(zip(names, values, strict=True)) for values in itertools.product(*(values for _, values in varied))]


def parse_varied(text: str) -> tuple[str, list[Any]]:
    """`a.b=1,2` as name and values.

    Raises:
        ValueError: no `=`, an empty name or value, or a value twice.
    """
    name, equals, values = text.partition("=")
    found = [parse_assignment(f"{name}={value}")[1] for value in values.split(",")] if equals and name else []
    if not found or "" in found:
        raise ValueError(f"--vary {text!r}: expected NAME=VALUE,VALUE…, such as clap.compile=off,step")
    if len({json.dumps(value) for value in found}) < len(found):
        raise ValueError(f"--vary {text!r}: the same value twice")
    return name, found


def title(settings: Choice) -> str:
    shown = {name: value if isinstance(value, str) else json.dumps(value) for name, value in settings.items()}
    return ", ".join(f"{name}={value}" for name, value in shown.items())


def run_one(content: dict[str, Any], settings: Choice, folder: Path, command: list[str], limit_s: float) -> Row:
    """Run a combination in its own folder, with its output in `output.log`, and end it when its time is up."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in settings.items():
        content = with_field(content, name, value)
    content = with_field(content, "clap.output", {"root": str(folder), "label": "run"})
    config = folder / "config.json"
    write_atomically(str(config), json.dumps(content, indent=2) + "\n")
    words = [word.replace(CONFIG, str(config)) for word in command]
    began_s, late = time.monotonic(), False
    with (folder / "output.log").open("wb") as log:
        process = subprocess.Popen(
            words, cwd=work_folder(), stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
        )
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            late = True
        finally:
            _end(process)
    row = Row(settings, "failed", time.monotonic() - began_s)
    found = sorted(folder.glob("run-*/summary.json"), key=lambda path: path.stat().st_mtime)
    summary = json.loads(found[-1].read_text()) if found else {}
    row.state = str(summary.get("state") or "failed")
    if process.returncode == 0 and row.state == "completed":
        row.samples_per_s_per_gpu = summary.get("samples_per_s_per_gpu")
        row.memory_peak_bytes = summary.get("memory_peak_bytes")
        return row
    row.state = "failed" if row.state in ("completed", "running") else row.state
    row.note = (
        f"stopped after {limit_s:.0f} s" if late else str(summary.get("error") or _last_error(folder / "output.log"))
    )
    return row


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the run with all its ranks, whether it is done or not."""
    for number, patience_s in ((signal.SIGTERM, LAST_WORDS_S), (signal.SIGKILL, LAST_WORDS_S)):
        if process.poll() is not None and number == signal.SIGTERM:
            continue
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience_s)


def _last_error(log: Path) -> str:
    """The error a run's output ends with."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if re.search(r"\berror: |Error\b", line)]
    return (errors or lines or ["no output"])[-1].removeprefix("error: ")[:200]


def format_table(rows: Sequence[Row]) -> str:
    """Markdown, a row each; ratios are to the first that has a rate."""
    first = next((row.samples_per_s_per_gpu["median"] for row in rows if row.samples_per_s_per_gpu), None)
    header = ["settings", "samples/s/GPU", "interval", "ratio", "memory, GB", "seconds", "note"]
    lines = []
    for row in rows:
        rate = row.samples_per_s_per_gpu
        note = row.note.replace("|", "/")
        lines.append(
            [
                title(row.settings),
                f"{rate['median']:,.2f}" if rate else "",
                f"{rate['low']:,.2f}–{rate['high']:,.2f}" if rate else "",
                f"{rate['median'] / first:.3f}" if rate and first else "",
                f"{row.memory_peak_bytes / 1e9:.2f}" if row.memory_peak_bytes else "",
                f"{row.seconds:.0f}",
                f"{row.state}: {note}" if row.state != "completed" else "",
            ]
        )
    return markdown_table(header, lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks/variants.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("config", type=Path)
    parser.add_argument("--vary", action="append", required=True, metavar="NAME=VALUE,VALUE…", help="any field; repeat")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="any field, for all of them")
    parser.add_argument("--folder", type=Path, help="default: runs/variants/<config>-<time>")
    parser.add_argument("--table", type=Path, help="the table in Markdown; default: variants.md in the folder")
    parser.add_argument("--limit_s", type=float, default=300.0, help="longest a run may take; default 300")
    parser.epilog = (
        f"Runs are short ({', '.join(SHORT)}) unless --set says otherwise. After -- follows another command that runs one, with"
        f" {CONFIG} where its JSON belongs; the default is DeepSpeed's launcher on all GPUs of this machine."
    )
    words = sys.argv[1:] if argv is None else argv
    split = words.index("--") if "--" in words else len(words)
    arguments, command = parser.parse_args(words[:split]), words[split + 1 :] or DEEPSPEED
    rows: list[Row] = []
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # ends the run that is under way first
    code = told(lambda: try_all(arguments, command, rows))
    return code or int(not any(row.state == "completed" for row in rows))


def try_all(arguments: argparse.Namespace, command: list[str], rows: list[Row]) -> None:
    """Run every combination and append its row.

    Raises:
        ValueError: the configuration or an option is wrong.
    """
    content = read_config(arguments.config)
    if not any(CONFIG in word for word in command):
        raise ValueError(f"no {CONFIG} in the command after --")
    for assignment in (*SHORT, *arguments.set):
        content = with_field(content, *parse_assignment(assignment))
    varied = [parse_varied(text) for text in arguments.vary]
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    folder = arguments.folder or work_folder() / "runs" / "variants" / f"{arguments.config.stem}-{stamp}"
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"--folder {folder}: expected a new or empty folder")
    choices = combinations(varied)
    print(f"{len(choices)} runs in {folder}", flush=True)
    for number, settings in enumerate(choices, start=1):
        print(f"{number}/{len(choices)}  {title(settings)}", flush=True)
        rows.append(run_one(content, settings, folder.resolve() / f"{number:02}", command, arguments.limit_s))
        print(f"    {rows[-1].state} in {rows[-1].seconds:.0f} s  {rows[-1].note}".rstrip(), flush=True)
        write_atomically(str(folder / "variants.json"), json.dumps([asdict(row) for row in rows], indent=2) + "\n")
        write_atomically(str(arguments.table or folder / "variants.md"), format_table(rows) + "\n")
    print(format_table(rows))


if __name__ == "__main__":
    sys.exit(main())
