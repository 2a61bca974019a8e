"""This project's run directory → a run, whatever state the run ended in and whichever version wrote it.

`summary.json` is believed first; what it lacks comes from `config.json` and `environment.json`, and the rates of a
run that was killed before it could sum up come from `metrics.jsonl`.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, TypeGuard

from clap_ds.analysis.table import MOST, Run, is_measurable, unit
from clap_ds.config.errors import UserError
from clap_ds.record.plausible import uneven_steps
from clap_ds.record.schema import RECORD_FILES, STEP_PHASES
from clap_ds.record.statistics import interval_label, rate_interval

DEEPEST = 30
"""Levels of a file's fields within fields; no record has ten."""


SILENT_S = 1800.0
"""A run that is said to be running and has written nothing for so long was killed, most likely."""


def is_record(path: Path) -> bool:
    """Whether `path` is a run directory that can be looked into."""
    return any(os.path.isfile(path / name) for name in RECORD_FILES)


HOST_ALONE = "the engine's timer doesn't wait for the GPU: its rate is that of the host, queueing steps"
UNTRUE_PARTS = ("backward", "exposed_communication")
"""Of a breakdown before schema 3 with `clap.gradient_sync` overlapped: its pass without reductions had them, too."""


def read_record(path: Path, micro_batch: int | None = None) -> Run:
    """The run of a run directory; UserError where no file of one can be read. Of a `metrics.jsonl` alone the rate is
    known where `micro_batch` is given.

    Its rates are None where it ended before one window was complete, and `notes` says what is missing. A file that is empty or
    damaged, and a field that is not of its type, cost no more than themselves.
    """
    notes: list[str] = []
    folder = path.parent / path.stem if path.suffix == ".jsonl" else path  # which isn't there where a file is alone
    summary, config, environment = (read_json(folder, name, notes) for name in ("summary", "config", "environment"))
    if not (summary or config or environment or read_steps(path, "window")):
        raise UserError(f"{path}: {', '.join(notes) or 'no summary.json, config.json or environment.json'}")
    if summary.get("state") == "running" and (silent_s := _silent_s(path)) > SILENT_S:
        summary = summary | {"state": f"running, silent for {silent_s / 3600:,.1f} h"}
    run = run_of(str(path), summary, config, environment, notes)
    batch = run.batch_per_gpu or micro_batch
    if run.rate or not batch:
        return run
    protocol = section(section(config, "clap"), "bench")
    windows, step = _windows_of_steps(path, batch, whole(protocol.get("steps_per_window")))
    if not windows:
        return run
    notes.append(f"{len(windows)} whole windows read from metrics.jsonl, as the run did not sum up")
    measured = {"samples_per_s_per_gpu": {"windows": list(windows)}, "step_time_s": step}
    return run_of(str(path), summary | measured, config, environment, notes)


def _silent_s(path: Path) -> float:
    """Seconds since anything was written there; 0 where that can't be told."""
    times = [0.0]
    with contextlib.suppress(OSError):
        times += [file.stat().st_mtime for file in path.iterdir()]
    return time.time() - max(times) if max(times) else 0.0


def run_of(
    source: str, summary: Mapping[str, Any], config: Mapping[str, Any], environment: Mapping[str, Any], notes: Sequence[str]
) -> Run:  # fmt: skip
    """The run that these say something of, each as it is in a record, and as damaged as it may be."""
    clap = section(config, "clap")
    micro_batch = whole(summary.get("micro_batch_per_gpu")) or whole(config.get("train_micro_batch_size_per_gpu"))
    accumulated = (values.get("gradient_accumulation_steps") for values in (summary, config))
    accumulation = next(filter(None, map(whole, accumulated)), 1)
    rates, step = section(summary, "samples_per_s_per_gpu"), section(summary, "step_time_s")
    is_old = (whole(summary.get("schema")) or 0) < 3
    rate, measured = _rate_fields(rates, is_old)
    batch, step_s = micro_batch and micro_batch * accumulation, positive(step.get("median"))
    gpus = whole(summary.get("world_size")) or whole(environment.get("world_size")) or 0
    device = _text(summary, "device_name") or _text(environment, "device_name")
    engine, memory = positive(summary.get("deepspeed_samples_per_s")), positive(summary.get("memory_peak_bytes"))
    parts = section(summary, "breakdown_s")
    breakdown: dict[str, Any] = {f"{part}_s": non_negative(parts.get(part)) for part in STEP_PHASES}
    notes = [*notes, *(uneven_steps(rate, batch, step_s) if rate and batch and step_s else ())]
    if not rate:
        notes.append("no complete window was measured")
    overlapped = clap.get("gradient_sync", "overlapped") == "overlapped"
    if is_old and overlapped and parts.get("exposed_communication") is not None:
        breakdown |= {f"{part}_s": None for part in UNTRUE_PARTS}
        notes.append("backward and exposed communication left out: measured wrongly before records of schema 3")
    if engine and summary.get("deepspeed_times_host_alone") is True and unit(device) == "GPUs":
        notes.append(HOST_ALONE)
    return Run(
        source=source, state=_text(summary, "state") or "unknown", error=_text(summary, "error"),
        model=_text(summary, "preset") or _text(section(clap, "model"), "preset"),
        device=device, precision=_text(summary, "precision"),
        text_tokens=whole(summary.get("text_tokens")) or whole(clap.get("text_tokens")),
        nodes=whole(summary.get("num_nodes")) or whole(environment.get("num_nodes")) or 0,
        gpus=gpus, batch_per_gpu=batch, accumulation=accumulation, **measured, samples_per_s_per_gpu=rate,
        engine_samples_per_s_per_gpu=engine / gpus if engine and gpus else None,
        achieved_tflops=positive(summary.get("achieved_tflops")),
        step_time_s=step_s, slowest_rank_step_time_s=positive(step.get("slowest_rank_median")),
        data_wait_percent=non_negative(summary.get("data_wait_percent")),
        memory_peak_gib=memory and memory / 1024**3, **breakdown,
        mfu_model_percent=positive(summary.get("mfu_model_percent")), peak_tflops=positive(summary.get("peak_tflops")),
        time_to_target_s=positive(summary.get("time_to_target_s")), notes="; ".join(notes),
        config=dict(config), environment=_environment(environment), finished=_text(summary, "finished"),
    )  # fmt: skip


def _rate_fields(rates: Mapping[str, Any], is_old: bool) -> tuple[float | None, dict[str, Any]]:
    """The rate, and `Run`'s fields of its interval. Before schema 3 the windows tell them, which had as many samples each."""
    windows, seconds = _positives(rates, "windows"), _positives(rates, "window_s")
    seconds = seconds if len(seconds) == len(windows) else [1 / rate for rate in windows]
    rate, known = rate_over(windows, seconds), interval_fields(windows, seconds)
    mean, low, high = (positive(rates.get(name)) for name in ("mean", "low", "high"))
    if not is_old and mean and low and high and low <= mean <= high:
        label = _text(rates, "label") or interval_label(non_negative(rates.get("coverage")), len(windows))
        return mean, known | {"interval": (low, high), "uncertainty_from": f"{label} of 1 run"}
    rate = rate or positive(rates.get("median")) or mean
    if rate and not windows and low and high and low <= high:
        known |= {"interval": (low, high), "uncertainty_from": "interval of unknown coverage of 1 run"}
    return rate, known


def rate_over(windows: Sequence[float], window_s: Sequence[float]) -> float | None:
    """All samples over all seconds; None without windows."""
    return rate_interval(windows, window_s).rate if windows else None


def interval_fields(windows: Sequence[float], window_s: Sequence[float] = ()) -> dict[str, Any]:
    """`Run`'s fields of the windows and their interval (none for fewer than two), of as many samples each where their seconds
    aren't given."""
    window_s = window_s or [1 / rate for rate in windows]
    fields: dict[str, Any] = {"windows": tuple(windows), "window_s": tuple(window_s)}
    if len(windows) > 1:
        found = rate_interval(windows, window_s)
        fields |= {"interval": (found.low, found.high), "uncertainty_from": f"{found.label()} of 1 run"}
    return fields


def _positives(values: Mapping[str, Any], name: str) -> list[float]:
    found = values.get(name)
    return [number for value in (found if isinstance(found, list) else ()) if (number := positive(value))]


def _windows_of_steps(path: Path, batch: int, wanted: int | None) -> tuple[tuple[float, ...], dict[str, float]]:
    """Samples/s/GPU of each whole window in `metrics.jsonl`, and what `step_time_s` in a summary would hold."""
    times: dict[float, list[float]] = defaultdict(list)
    slowest: list[float] = []
    for line in read_steps(path, "window"):
        time, window = positive(line.get("time_s")), non_negative(line.get("window"))
        if time is not None and window is not None:
            times[window].append(time)
            slowest.append(positive(line.get("slowest_rank_time_s")) or time)
    wanted = wanted or max(map(len, times.values()), default=0)
    whole_windows = [steps for _, steps in sorted(times.items()) if len(steps) == wanted]
    if not whole_windows:
        return (), {}
    rates = tuple(batch * wanted / sum(steps) for steps in whole_windows)
    step_s = median(time for steps in whole_windows for time in steps)
    return rates, {"median": step_s, "slowest_rank_median": median(slowest)}


def read_json(path: Path, name: str, notes: list[str]) -> dict[str, Any]:
    """A JSON object of a run directory (`summary`, …); empty where it is missing or damaged, the latter with a note."""
    file, why = path / f"{name}.json", "not readable JSON"
    try:
        value = _json(file.read_bytes())
        if isinstance(value, dict):
            return value
    except FileNotFoundError:
        return {}
    except OSError as error:
        why = f"not readable ({error.strerror})"
    except (ValueError, RecursionError):
        pass
    notes.append(f"{file.name} is {why}")
    return {}


def _json(text: bytes) -> Any:
    """What JSON says, its texts such as can be printed: half of a surrogate pair is no character."""
    return _printable(json.loads(text), DEEPEST)


def _printable(value: Any, levels: int) -> Any:
    if not levels:
        raise ValueError(f"nested deeper than {DEEPEST}")
    if isinstance(value, dict):
        return {_printable(name, levels): _printable(inner, levels - 1) for name, inner in value.items()}
    if isinstance(value, list):
        return [_printable(inner, levels - 1) for inner in value]
    return value.encode(errors="replace").decode() if isinstance(value, str) else value


def read_steps(path: Path, *phases: str, history: object = None) -> list[dict[str, Any]]:
    """Lines of `metrics.jsonl` of these phases that have a step (`clap_ds.record.schema.StepLine`), with those of their
    fields that are numbers, true or false, or objects of such. A line that was cut or damaged is left out. Where the file
    `history` is there, its lines instead."""
    file, lines, content = path if path.suffix == ".jsonl" else path / "metrics.jsonl", [], b""
    if isinstance(history, str) and "\0" not in history and os.path.isfile(history):
        file = Path(history)
    with contextlib.suppress(OSError):
        content = file.read_bytes()
    for text in content.split(b"\n"):
        with contextlib.suppress(ValueError, RecursionError):
            line = json.loads(text)
            if isinstance(line, dict) and line.get("phase") in phases and non_negative(line.get("step")) is not None:
                lines.append(_numbers(line) | {"phase": line["phase"]})
    return lines


def _numbers(line: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that are numbers, true or false, or an object of such."""
    known = {name: value for name, value in line.items() if _is_number(value) or isinstance(value, bool)}
    inner = {name: _numbers(value) for name, value in line.items() if isinstance(value, dict)}
    return known | {name: numbers for name, numbers in inner.items() if numbers}


_FIELDS = {"versions": dict, "command": list, "hosts": list, "device_names": list, "gpus_per_node": list}
"""Types of the fields of `environment.json` that are neither text nor number."""


def _environment(values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that are of their types."""
    return {name: value for name, value in values.items() if isinstance(value, _FIELDS.get(name, str | int))}


def positive(value: object) -> float | None:
    """`value` as a float if it is a finite number above zero, else None."""
    return non_negative(value) or None


def non_negative(value: object) -> float | None:
    """`value` as a float if it is a number from zero to what can be measured, else None (booleans, text are not numbers)."""
    return float(value) if _is_number(value) and (value == 0 or is_measurable(value)) else None


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= MOST


def whole(value: object) -> int | None:
    """`value` as an int if it is a whole number above zero, else None."""
    number = positive(value)
    return int(number) if number is not None and number == int(number) else None


def section(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A field that holds others; empty where it is missing or holds none."""
    found = values.get(name)
    return found if isinstance(found, dict) else {}


def _text(values: Mapping[str, Any], name: str) -> str:
    value = values.get(name)
    return " ".join(value.split()) if isinstance(value, str) else ""
