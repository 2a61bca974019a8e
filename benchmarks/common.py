"""What the benchmark commands share: options spelled one way, the device, taking turns, running others, tables, results.

Loads torch only in the functions that need it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import psutil

from clap_ds.analysis.table import markdown_table
from clap_ds.config.files import write_atomically, write_object
from clap_ds.config.places import commit, work_folder
from clap_ds.ranks.accelerator import choose_accelerator, set_up_cuda
from clap_ds.ranks.distributed import keep_freed_memory

if TYPE_CHECKING:
    import torch

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
    """Markdown of columns given as `title {field:.1f} | title {rate[low]:,.1f}–{rate[high]:,.1f}`: a row's fields go into the
    format strings; a cell whose field a row lacks is empty. A run's `memory_peak_bytes` and `memory_reserved_peak_bytes` are
    `memory_gb` and `reserved_gb`, too."""
    cells = {each.partition("{")[0].strip(): each[each.index("{") :] for each in columns.split(" | ")}

    def cell(template: str, row: Mapping[str, Any]) -> str:
        for name, field in {"memory_gb": "memory_peak_bytes", "reserved_gb": "memory_reserved_peak_bytes"}.items():
            if row.get(field):
                row = {**row, name: row[field] / 1e9}
        try:
            return template.format_map(row)
        except (KeyError, TypeError):
            return ""

    return markdown_table(list(cells), [[cell(template, row) for template in cells.values()] for row in rows])


def choose_device() -> torch.device:
    """The first GPU, or the CPU where there is none or `DS_ACCELERATOR=cpu` wants it, set up as for ranks. A UserError where
    there is a GPU that torch can't use."""
    import torch

    device = torch.device(choose_accelerator())
    if device.type == "cuda":
        set_up_cuda()
    else:
        keep_freed_memory()
    return device


def in_turns(actions: Mapping[str, Callable[[], T]], rounds: int, *, warm_up: int = 0) -> dict[str, list[T]]:
    """What each action returns in each round. They take turns, every second round in reverse, so that whatever else the
    machine does falls on all; `warm_up` rounds before are dropped."""
    found: dict[str, list[T]] = {name: [] for name in actions}
    for number in range(warm_up + rounds):
        for name in list(actions)[:: -1 if number % 2 else 1]:
            found[name].append(actions[name]())
    return {name: results[warm_up:] for name, results in found.items()}


def exit_on_sigterm() -> None:
    """Have SIGTERM raise SystemExit, so that what is under way is ended or undone first."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))


def run_for(command: Sequence[str], log: Path, limit_s: float | None = None) -> str:
    """Run a command with its output in `log`, and end what it started when it or its time is over: its group's processes and,
    of a command that is stopped, its descendants. How it ended: `completed`, `exit code 3` or `stopped after 60 s`."""
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
        family = [process, *(process.children(recursive=True) if process.is_running() else [])]
        for ending in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, ending)
            for each in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.send_signal(ending)
            psutil.wait_procs(family, LAST_WORDS_S)
