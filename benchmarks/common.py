"""What the benchmark commands share: options spelled one way, taking turns, running others, tables, results. No torch."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import psutil

from clap_ds.analysis.table import markdown_table
from clap_ds.config.files import write_atomically, write_object
from clap_ds.config.places import commit, work_folder

T = TypeVar("T")
LAST_WORDS_S = 5.0  # from SIGTERM to SIGKILL


def make_parser(name: str, doc: str | None) -> argparse.ArgumentParser:
    """Parser of `python -m benchmarks.NAME`, described by its docstring's first line, with `--output` for `show`."""
    description = (doc or "").splitlines()[0]
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=description, allow_abbrev=False)
    parser.add_argument("--output", type=Path, metavar="FILE.md", help="keep the tables there, and a JSON beside it")
    return parser


def show(output: Path | None, text: str, figures: Any) -> None:
    """Print the text; where there is a file for it, keep it with the command and commit that made it, the figures in a JSON
    beside it."""
    print(text, flush=True)
    if output:
        output.parent.mkdir(parents=True, exist_ok=True)
        made_by = f"Made by `{' '.join(['python', *sys.orig_argv[1:]])}` at commit {commit()}."
        write_atomically(output, f"{made_by}\n\n{text}\n")
        write_object(output.with_suffix(".json"), figures)


def table(columns: str, rows: Iterable[Mapping[str, Any]]) -> str:
    """Markdown of columns given as `title {field:.1f} | title {rate[low]:,.1f}–{rate[high]:,.1f}`; a cell without its field
    is empty."""
    cells = {each.partition("{")[0].strip(): each[each.index("{") :] for each in columns.split(" | ")}

    def cell(template: str, row: Mapping[str, Any]) -> str:
        with contextlib.suppress(KeyError, TypeError):
            return template.format_map(row)
        return ""

    return markdown_table(list(cells), [[cell(template, row) for template in cells.values()] for row in rows])


def in_turns(actions: Mapping[str, Callable[[], T]], rounds: int, *, warm_up: int = 0) -> dict[str, list[T]]:
    """What each action returns in each round. They take turns, every second round in reverse; `warm_up` rounds before are
    dropped."""
    found: dict[str, list[T]] = {name: [] for name in actions}
    for number in range(warm_up + rounds):
        for name in list(actions)[:: -1 if number % 2 else 1]:
            found[name].append(actions[name]())
    return {name: results[warm_up:] for name, results in found.items()}


def exit_on_sigterm() -> None:
    """Have SIGTERM raise SystemExit, so that what is under way is ended or undone first."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))


def run_for(command: Sequence[str], log: Path, limit_s: float | None = None) -> str:
    """Run a command with its output in `log`, and end what it started when it or its time is over. How it ended: `completed`,
    `exit code 3` or `stopped after 60 s`."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        process = psutil.Popen(
            command, cwd=work_folder(), stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
    try:
        code = process.wait(limit_s)
        return f"exit code {code}" if code else "completed"
    except psutil.TimeoutExpired:
        return f"stopped after {limit_s:.0f} s"
    finally:
        family = process.children(recursive=True) if process.is_running() else []
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
            psutil.wait_procs([process], LAST_WORDS_S)
            os.killpg(process.pid, signal.SIGKILL)
        for each in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
