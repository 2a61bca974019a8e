"""Logs of DeepSpeed, open_clip, LAION-CLAP and this project's benchmark → runs.

Lines of progress say by which time which step was done (`dialects.py`): the rate is all samples over all seconds after the
warm-up, whatever the log's length and how often it prints. The launcher's lines give nodes and ranks, the engine's printed
configuration batch sizes. What the benchmark printed has its own figures, which count the wait for data as DeepSpeed's timer
doesn't, and are of its timed windows alone: they are taken, with DeepSpeed's rate beside them. The parts of a step are those
of `wall_clock_breakdown`, whose n-th line is of a start's n-th step: the loss within forward, data loading not at all.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from clap_ds.analysis.log_scan import LogStart, Scan, scan_log
from clap_ds.analysis.record import HOST_ALONE, interval_fields, positive, rate_over
from clap_ds.analysis.table import Run
from clap_ds.config.errors import UserError
from clap_ds.record.plausible import uneven_steps


def read_log(path: Path, warmup_steps: int = 10) -> list[Run]:
    """Runs of a log: one for each of the benchmark's; of an engine's, one per size (nodes, GPUs, batch), restarts of the same
    size taken together.

    Where the log doesn't say how many GPUs there are (`gpus` is 0), rates and batch are of all of them.
    Raises UserError where the file can't be read, is empty or binary, or has no rate that is possible; says which.
    """
    scan = scan_log(path, warmup_steps)
    found, last = [start for start in scan.starts if start.measured], scan.starts[-1]
    # What measured nothing and didn't end by itself is a run, unless it is but another host's part of the run before.
    if last.is_broken_off and not last.measured and (last.announced or not found or last.size != found[-1].size):
        found.append(last)
    if not found:
        raise UserError(f"{path}: {_why_nothing(scan)}")
    groups: dict[object, list[LogStart]] = {}
    for start in found:
        groups.setdefault(id(start) if start.is_bench else start.size, []).append(start)
    return [
        _bench_run(path, starts[0]) if starts[0].is_bench else _run(path, starts, scan) for starts in groups.values()
    ]


def _why_nothing(scan: Scan) -> str:
    if not scan.num_bytes:
        return "empty file" + (" (truncated gzip)" if scan.truncated_gzip else "")
    if scan.left_out:
        return f"all {scan.left_out} throughput lines have a zero, negative or infinite rate, or are damaged"
    return (
        'no throughput lines (DeepSpeed prints them at "log_level": "info" every "steps_per_print" steps) and no table'
        " of the benchmark"
    )


def _run(path: Path, starts: Sequence[LogStart], scan: Scan) -> Run:
    windows_of = [start.windows(scan.warmup_steps) for start in starts]
    last, facts, gpus = starts[-1], starts[-1].facts, starts[-1].facts.get("gpus", 1)
    rates = [rate / gpus for windows in windows_of for rate in windows.rates]
    window_s = [seconds for windows in windows_of for seconds in windows.window_s]
    averages = [windows.average / gpus for windows in windows_of if windows.average]
    rate = rate_over(rates, window_s) or (averages[-1] if averages else None)
    step_s = next((windows.step_s for windows in windows_of if windows.step_s), None)
    by_timer = any(start.dialect and not start.dialect.counts_data_wait for start in starts)
    noted = {
        "DeepSpeed's timer: leaves out data loading": by_timer,
        HOST_ALONE: by_timer and "host_alone" in facts,
        "too short to drop the warm-up: the running average is given": averages and not rates,
        f"{len(scan.starts)} starts in the log": len(scan.starts) > 1,
        f"{scan.left_out} throughput lines left out (repeated, damaged or impossible)": scan.left_out,
        "the gzip file is cut or damaged": scan.truncated_gzip,
    }
    notes = [note for note, holds in noted.items() if holds]
    if rate and step_s:
        notes += uneven_steps(rate, (last.global_batch or 1) / gpus, step_s)
    accumulation = facts.get("accumulation", 1)
    micro_batch = facts.get("micro_batch") or facts.get("global_batch", 0) // gpus // accumulation
    return Run(
        **_known(path, last, facts), gpus=facts.get("gpus", 0), batch_per_gpu=micro_batch * accumulation or None,
        accumulation=accumulation, samples_per_s_per_gpu=rate, engine_samples_per_s_per_gpu=rate if by_timer else None,
        **interval_fields(rates, window_s), **_breakdown(starts), step_time_s=step_s if last.global_batch else None,
        memory_peak_gib=max(start.max_memory_gib for start in starts) or None, notes="; ".join(notes),
    )  # fmt: skip


def _breakdown(starts: Sequence[LogStart]) -> dict[str, Any]:
    """Seconds a step; empty where no step was told after the warm-up."""
    names = ("forward_s", "backward_s", "exposed_communication_s", "optimizer_s")
    steps = sum(start.breakdown_steps for start in starts)
    sums_ms = np.sum([start.breakdown_ms for start in starts], axis=0)
    return dict(zip(names, (sums_ms / steps / 1000).tolist(), strict=True)) if steps else {}


def _bench_run(path: Path, start: LogStart) -> Run:
    """The rate that the benchmark printed in its table, with its interval and DeepSpeed's beside it."""
    facts = start.facts | start.title
    rate, engine, step_ms = (
        _figure(start, name)[0] for name in ("samples/s/", "samples/s in all, by DeepSpeed", "step time")
    )
    interval = next((name for name in start.figures if "interval of" in name or "range of" in name), "")
    low, high = _figure(start, interval)
    fields: dict[str, Any] = {}
    if rate and low and high and low <= rate <= high:
        fields = {"interval": (low, high), "uncertainty_from": f"{interval} of 1 run"}
    gpus, micro_batch, accumulation = (facts.get(name, 0) for name in ("gpus", "micro_batch", "accumulation"))
    if rate and step_ms and micro_batch:
        accumulation = accumulation or round(rate * step_ms / 1000 / micro_batch)
    return Run(
        **_known(path, start, facts), **fields, device=facts.get("device", ""), text_tokens=facts.get("text_tokens"), gpus=gpus,
        batch_per_gpu=micro_batch * max(accumulation, 1) or None, accumulation=max(accumulation, 1),
        samples_per_s_per_gpu=rate, engine_samples_per_s_per_gpu=engine and engine / (gpus or 1),
        notes=HOST_ALONE if any("(the" in name for name in start.figures) else "",
    )  # fmt: skip


def _figure(start: LogStart, begins: str) -> list[float | None]:
    """The first two numbers of a line of the benchmark's table, None for those that there aren't or that can't be."""
    text = next((text for name, text in start.figures.items() if begins and name.startswith(begins)), "")
    numbers = [positive(float(number.replace(",", ""))) for number in re.findall(r"\d[\d,]*(?:\.\d+)?", text)]
    return [*numbers, None, None][:2]


def _known(path: Path, start: LogStart, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of `Run` that a log tells of any program."""
    known = {name: facts.get(name, "") for name in ("precision", "model", "directory")}
    return {"source": str(path), "kind": "log", "state": start.state, "nodes": facts.get("nodes", 0), **known}
