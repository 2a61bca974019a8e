"""This project's run directory → a run, whatever state the run ended in.

`summary.json` is believed first; what it lacks comes from `config.json` and `environment.json`, and the rates of a
run that was killed before it could sum up come from `metrics.jsonl`.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from clap_ds.analysis.intervals import median_interval
from clap_ds.analysis.runs import BREAKDOWN_PARTS, InputError, Run, non_negative, positive, whole

RECORD_FILES = ("summary.json", "metrics.jsonl", "config.json", "environment.json")


def is_record(path: Path) -> bool:
    """Whether `path` is a run directory."""
    return path.is_dir() and any((path / name).is_file() for name in RECORD_FILES)


def read_record(path: Path) -> Run:
    """Read a run directory.

    Returns:
        the run; its rates are None where it ended before one window was complete, and `notes` says what is missing.

    Raises:
        InputError: no node or GPU count anywhere, or only unreadable files.
    """
    notes: list[str] = []
    summary = _load(path / "summary.json", notes)
    config = _load(path / "config.json", notes)
    environment = _load(path / "environment.json", notes)
    if not (summary or config or environment):
        raise InputError(f"{path}: none of {', '.join(RECORD_FILES)} holds a JSON object")
    clap = _section(config, "clap")
    num_gpus = whole(summary.get("world_size")) or whole(environment.get("world_size"))
    num_nodes = whole(summary.get("num_nodes")) or whole(environment.get("num_nodes"))
    micro_batch = whole(summary.get("micro_batch_per_gpu")) or whole(config.get("train_micro_batch_size_per_gpu"))
    accumulation = (
        whole(summary.get("gradient_accumulation_steps")) or whole(config.get("gradient_accumulation_steps")) or 1
    )
    rates = _section(summary, "samples_per_s_per_gpu")
    windows = tuple(rate for value in _list(rates.get("windows")) if (rate := positive(value)))
    step = _section(summary, "step_time_s")
    if not windows and not positive(rates.get("median")) and micro_batch:
        windows, step = _windows_of_metrics(path / "metrics.jsonl", micro_batch * accumulation, _window_steps(clap))
        if windows:
            notes.append(f"{len(windows)} whole windows read from metrics.jsonl, as the run did not sum up")
    if not windows and not positive(rates.get("median")):
        notes.append("no complete window was measured")
    return Run(
        source=str(path),
        kind="record",
        state=str(summary.get("state") or "unknown"),
        error=_text(summary.get("error")),
        model=_text(summary.get("preset")) or _text(_section(clap, "model").get("preset")),
        device_name=_text(summary.get("device_name")) or _text(environment.get("device_name")),
        precision=_text(summary.get("precision")),
        text_tokens=whole(summary.get("text_tokens")) or whole(clap.get("text_tokens")),
        num_nodes=num_nodes,
        num_gpus=num_gpus,
        micro_batch_per_gpu=micro_batch,
        gradient_accumulation_steps=accumulation,
        **_rate_fields(rates, windows),
        step_time_s=positive(step.get("median")),
        slowest_rank_step_time_s=positive(step.get("slowest_rank_median")),
        data_wait_percent=non_negative(summary.get("data_wait_percent")),
        memory_peak_bytes=positive(summary.get("memory_peak_bytes")),
        breakdown_s={
            part: seconds
            for part in BREAKDOWN_PARTS
            if (seconds := non_negative(_section(summary, "breakdown_s").get(part))) is not None
        },
        mfu_model_percent=positive(summary.get("mfu_model_percent")),
        peak_tflops=positive(summary.get("peak_tflops")),
        time_to_target_s=positive(summary.get("time_to_target_s")),
        notes=tuple(notes),
        config=config,
    )


def _rate_fields(rates: Mapping[str, Any], windows: tuple[float, ...]) -> dict[str, Any]:
    """The median rate and its interval, from the summary where it has them, else from the windows."""
    rate = positive(rates.get("median")) or (median(windows) if windows else None)
    low, high = positive(rates.get("low")), positive(rates.get("high"))
    if rate is not None and low is not None and high is not None:
        return {
            "rate": rate,
            "rate_low": low,
            "rate_high": high,
            "windows": windows,
            "interval_from": f"95 % interval of {len(windows)} windows of 1 run" if windows else "interval of 1 run",
        }
    return {"rate": rate, **interval_fields(windows)}


def interval_fields(windows: tuple[float, ...]) -> dict[str, Any]:
    """`Run` fields of the interval that order statistics of the windows give; nothing for fewer than two windows."""
    if len(windows) < 2:
        return {"windows": windows}
    low, high, coverage = median_interval(windows)
    kind = "95 % interval" if coverage >= 0.95 else "range"
    described = f"{kind} of {len(windows)} windows of 1 run"
    return {"windows": windows, "rate_low": low, "rate_high": high, "interval_from": described}


def _windows_of_metrics(
    path: Path, batch_per_gpu: int, steps_per_window: int | None
) -> tuple[tuple[float, ...], dict[str, float]]:
    """Samples/s/GPU of each whole window in `metrics.jsonl`, and the step times; a cut last line is left out."""
    times: dict[int, list[float]] = defaultdict(list)
    slowest: list[float] = []
    if path.is_file():
        with path.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                try:
                    entry = json.loads(line)
                except json.JSONDecodeError:
                    continue
                if not isinstance(entry, dict) or entry.get("phase") != "window":
                    continue
                time, window = positive(entry.get("time_s")), non_negative(entry.get("window"))
                if time is not None and window is not None:
                    times[int(window)].append(time)
                    slowest.append(positive(entry.get("slowest_rank_time_s")) or time)
    wanted = steps_per_window or max((len(steps) for steps in times.values()), default=0)
    whole_windows = [steps for _, steps in sorted(times.items()) if len(steps) == wanted]
    if not whole_windows:
        return (), {}
    rates = tuple(batch_per_gpu * len(steps) / sum(steps) for steps in whole_windows)
    every_step = [time for steps in whole_windows for time in steps]
    return rates, {"median": median(every_step), "slowest_rank_median": median(slowest)}


def _window_steps(clap: Mapping[str, Any]) -> int | None:
    return whole(_section(clap, "bench").get("steps_per_window"))


def _load(path: Path, notes: list[str]) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, OSError):
        value = None
    if isinstance(value, dict):
        return value
    notes.append(f"{path.name} is not readable JSON")
    return {}


def _section(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    section = values.get(name)
    return section if isinstance(section, dict) else {}


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None
