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
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, TypeGuard

from clap_ds.analysis.table import MOST, Run, is_measurable
from clap_ds.config.errors import UserError
from clap_ds.record.schema import RECORD_FILES, STEP_PHASES
from clap_ds.record.statistics import window_interval

DEEPEST = 30
"""Levels of a file's fields within fields; no record has ten."""


SILENT_S = 1800.0
"""A run that is said to be running and has written nothing for so long was killed, most likely."""


def is_record(path: Path) -> bool:
    """Whether `path` is a run directory that can be looked into."""
    return any(os.path.isfile(path / name) for name in RECORD_FILES)


def read_record(path: Path) -> Run:
    """The run of a run directory; UserError where neither summary, configuration nor environment can be read.

    Its rates are None where it ended before one window was complete, and `notes` says what is missing. A file that is empty or
    damaged, and a field that is not of its type, cost no more than themselves.
    """
    notes: list[str] = []
    summary, config, environment = (read_json(path, name, notes) for name in ("summary", "config", "environment"))
    if not (summary or config or environment):
        raise UserError(f"{path}: {', '.join(notes) or 'no summary.json, config.json or environment.json'}")
    if summary.get("state") == "running" and (silent_s := _silent_s(path)) > SILENT_S:
        summary = summary | {"state": f"running, silent for {silent_s / 3600:,.1f} h"}
    run = run_of(str(path), summary, config, environment, notes)
    if run.rate or not run.batch_per_gpu:
        return run
    protocol = _section(_section(config, "clap"), "bench")
    windows, step = _windows_of_steps(path, run.batch_per_gpu, whole(protocol.get("steps_per_window")))
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
    clap = _section(config, "clap")
    micro_batch = whole(summary.get("micro_batch_per_gpu")) or whole(config.get("train_micro_batch_size_per_gpu"))
    accumulated = (values.get("gradient_accumulation_steps") for values in (summary, config))
    accumulation = next(filter(None, map(whole, accumulated)), 1)
    rates, step = _section(summary, "samples_per_s_per_gpu"), _section(summary, "step_time_s")
    stated = rates.get("windows")
    windows = tuple(rate for value in (stated if isinstance(stated, list) else ()) if (rate := positive(value)))
    rate = positive(rates.get("median"))
    if not windows and not rate:
        notes = [*notes, "no complete window was measured"]
    memory = positive(summary.get("memory_peak_bytes"))
    parts = _section(summary, "breakdown_s")
    breakdown: dict[str, Any] = {f"{part}_s": non_negative(parts.get(part)) for part in STEP_PHASES}
    return Run(
        source=source, state=_text(summary, "state") or "unknown", error=_text(summary, "error"),
        model=_text(summary, "preset") or _text(_section(clap, "model"), "preset"),
        device=_text(summary, "device_name") or _text(environment, "device_name"), precision=_text(summary, "precision"),
        text_tokens=whole(summary.get("text_tokens")) or whole(clap.get("text_tokens")),
        nodes=whole(summary.get("num_nodes")) or whole(environment.get("num_nodes")) or 0,
        gpus=whole(summary.get("world_size")) or whole(environment.get("world_size")) or 0,
        batch_per_gpu=micro_batch and micro_batch * accumulation, accumulation=accumulation,
        **_rate_fields(rates, rate, windows),
        step_time_s=positive(step.get("median")), slowest_rank_step_time_s=positive(step.get("slowest_rank_median")),
        data_wait_percent=non_negative(summary.get("data_wait_percent")),
        memory_peak_gib=memory and memory / 1024**3, **breakdown,
        mfu_model_percent=positive(summary.get("mfu_model_percent")), peak_tflops=positive(summary.get("peak_tflops")),
        time_to_target_s=positive(summary.get("time_to_target_s")), notes="; ".join(notes),
        config=_settings(config), environment=_environment(environment), finished=_text(summary, "finished"),
    )  # fmt: skip


def _rate_fields(rates: Mapping[str, Any], rate: float | None, windows: tuple[float, ...]) -> dict[str, Any]:
    """The median rate and its interval: from the windows, whatever an older version made of them, else as summed up."""
    known = interval_fields(windows)
    low, high = positive(rates.get("low")), positive(rates.get("high"))
    if rate and not windows and low and high:
        known |= {"interval": (low, high), "uncertainty_from": "interval of unknown coverage of 1 run"}
    return {"samples_per_s_per_gpu": rate or (median(windows) if windows else None), **known}


def interval_fields(windows: tuple[float, ...]) -> dict[str, Any]:
    """`Run`'s fields of the interval that order statistics of the windows give; none for fewer than two windows."""
    if len(windows) < 2:
        return {"windows": windows}
    found = window_interval(windows)
    described = f"{found.label()} of 1 run"
    return {"windows": windows, "interval": (found.low, found.high), "uncertainty_from": described}


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
    """What JSON says, its texts such as can be printed: half of a surrogate pair is no character. ValueError where it is nested
    deeper than `DEEPEST`."""
    value = json.loads(text)
    inside = [value]
    for _ in range(DEEPEST):
        inside = [inner for each in inside if isinstance(each, dict | list) for inner in _members(each)]
    if inside:
        raise ValueError(f"nested deeper than {DEEPEST}")
    return json.loads(json.dumps(value, ensure_ascii=False).encode(errors="replace"))


def _members(value: dict[str, Any] | list[Any]) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value


def read_steps(path: Path, *phases: str, history: object = None) -> list[dict[str, Any]]:
    """Lines of `metrics.jsonl` of these phases that have a step (`clap_ds.record.schema.StepLine`), with those of their
    fields that are numbers, true or false, or objects of such. A line that was cut or damaged is left out. Where the file
    `history` is there, its lines instead."""
    file, lines, content = path / "metrics.jsonl", [], b""
    if isinstance(history, str) and "\0" not in history and os.path.isfile(history):
        file = Path(history)
    with contextlib.suppress(OSError):
        content = file.read_bytes()
    for text in content.split(b"\n"):
        with contextlib.suppress(ValueError, RecursionError):
            line = json.loads(text)
            if isinstance(line, dict) and line.get("phase") in phases and _is_number(line.get("step")):
                lines.append(_numbers(line) | {"phase": line["phase"]})
    return lines


def _numbers(line: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that are numbers, true or false, or an object of such."""
    known = {name: value for name, value in line.items() if _is_number(value) or isinstance(value, bool)}
    inner = {name: _numbers(value) for name, value in line.items() if isinstance(value, dict)}
    return known | {name: numbers for name, numbers in inner.items() if numbers}


_FIELDS = {"versions": dict, "command": list, "hosts": list, "device_names": list, "gpus_per_node": list}
"""Types of the fields of `environment.json` that are neither text nor number."""


_SECTIONS = (
    "clap",
    "bf16",
    "fp16",
    "torch_autocast",
    "loss",
    "bench",
    "model",
    "data",
    "hardware",
    "zero_optimization",
)
"""Fields of `config.json` that hold others."""


def _settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields, at any depth, without what should be a section or a number and isn't."""
    wrong = {name for name in _SECTIONS if not isinstance(values.get(name, {}), dict)}
    wrong |= {name for name in ("gradient_bucket_mb",) if name in values and not positive(values[name])}
    known = {name: value for name, value in values.items() if name not in wrong}
    return {name: _settings(value) if isinstance(value, dict) else value for name, value in known.items()}


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


def _section(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    section = values.get(name)
    return section if isinstance(section, dict) else {}


def _text(values: Mapping[str, Any], name: str) -> str:
    value = values.get(name)
    return " ".join(value.split()) if isinstance(value, str) else ""
