"""What the benchmark commands share: options spelled one way, the device, taking turns, running others, tables, results.

Loads torch only in the functions that need it.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from uuid import uuid4

import psutil

from clap_ds.analysis.table import markdown_table
from clap_ds.config.files import write_atomically, write_object
from clap_ds.config.places import work_folder
from clap_ds.ranks.accelerator import choose_accelerator, set_up_cuda
from clap_ds.ranks.distributed import keep_freed_memory

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
MARK = "CLAP_BENCHMARK"
LAST_WORDS_S = 5.0  # from SIGTERM to SIGKILL


def make_parser(name: str, doc: str | None) -> argparse.ArgumentParser:
    """Parser of `python -m benchmarks.NAME`, described by its docstring's first line, with `--output` for `show`."""
    description = (doc or "").splitlines()[0]
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=description, allow_abbrev=False)
    parser.add_argument("--output", type=Path, metavar="FILE.md", help="keep the tables there, and a JSON beside it")
    return parser


def show(output: Path | None, text: str, figures: Any) -> None:
    """Print the text, and keep it where there is a file for it."""
    print(text, flush=True)
    if output:
        keep(output, text, figures)


def keep(output: Path, text: str, figures: Any) -> None:
    """Write the text, with the command that made it, and the figures to a JSON beside it."""
    output.parent.mkdir(parents=True, exist_ok=True)
    command = " ".join(["python", *sys.orig_argv[1:]])
    write_atomically(output, f"`{command}`\n\n{text}\n")
    write_object(output.with_suffix(".json"), figures)


def table(columns: str, rows: Iterable[Mapping[str, Any]]) -> str:
    """Markdown of columns given as `title {field:.1f} | title {rate[low]:,.1f}–{rate[high]:,.1f}`: a row's fields go into the
    format strings, with `memory_gb` of its `memory_peak_bytes`, `reserved_gb` of its `memory_reserved_peak_bytes`; a cell whose
    field a row lacks is empty."""
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


def choose_device(*, plain_allocator: bool = False) -> torch.device:
    """The first GPU, set up as for ranks, or the CPU where there is none or `DS_ACCELERATOR=cpu` wants it; its memory is then
    allocated as by CPU ranks, unless `plain_allocator`. A UserError where there is a GPU that torch can't use."""
    import torch

    device = torch.device(choose_accelerator())
    if device.type == "cuda":
        set_up_cuda()
    elif not plain_allocator:
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


def allocated_peak(prepare: Callable[[], Callable[[], object]]) -> int:
    """Most bytes that the CPU's allocator holds while what `prepare` returns runs, of all allocated since before that."""
    from torch.profiler import ProfilerActivity, profile, record_function

    gc.collect()  # what earlier ones left would be freed, and counted, in between
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        action = prepare()
        gc.collect()
        with record_function("measured"):
            action()
    results: Any = profiler.profiler and profiler.profiler.kineto_results
    events = list(results.events())
    (window,) = [event for event in events if event.name() == "measured"]
    live = peak = 0
    for event in sorted((event for event in events if event.name() == "[memory]"), key=lambda event: event.start_ns()):
        live += event.nbytes()
        if window.start_ns() <= event.start_ns() <= window.end_ns():
            peak = max(peak, live)
    return peak


def run_for(command: Sequence[str], log: Path, limit_s: float | None = None) -> str:
    """Run a command with its output in `log`, and end every process it started when it or its time is over, orphans and those
    with sessions of their own among them: how it ended, `completed`, `exit code 3` or `stopped after 60 s`."""
    log.parent.mkdir(parents=True, exist_ok=True)
    mark = f"{os.environ.get(MARK, '')}{uuid4().hex}."  # begins with that of a command above this one, which ends both
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=work_folder(),
            env={**os.environ, MARK: mark},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        code = process.wait(limit_s)
        return f"exit code {code}" if code else "completed"
    except subprocess.TimeoutExpired:
        return f"stopped after {limit_s:.0f} s"
    finally:
        with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(LAST_WORDS_S)
        _kill_all(mark)
        with contextlib.suppress(subprocess.TimeoutExpired):  # one that a driver holds on to stays
            process.wait(LAST_WORDS_S)


def _kill_all(mark: str) -> None:
    """Kill every process that has the mark, wherever it stands in the tree, and wait until it is gone."""
    killed = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid != os.getpid() and process.environ().get(MARK, "").startswith(mark):
                process.kill()
                killed.append(process)
    psutil.wait_procs(killed, LAST_WORDS_S)
