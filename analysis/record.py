"""This project's run directory → a run, whatever state the run ended in.

`summary.json` is believed first; what it lacks comes from `config.json` and `environment.json`, and the rates of a
run that was killed before it could sum up come from `metrics.jsonl`. Fields are those of `clap_ds.record.schema`; one that is
not of its type, or a file that is damaged, costs no more than itself.
"""

from __future__ import annotations

import contextlib
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from clap_ds.analysis.table import Run, is_measurable, unit
from clap_ds.config import files
from clap_ds.config.errors import UserError
from clap_ds.record.plausible import uneven_steps
from clap_ds.record.schema import FORMER_PRESETS, RECORD_FILES, STEP_PHASES
from clap_ds.record.statistics import interval_label, rates

BY_TIMER = "DeepSpeed's timer: leaves out data loading"
HOST_ALONE = "the engine's timer doesn't wait for the GPU: its rate is that of the host, queueing steps"


def is_record(path: Path) -> bool:
    """Whether `path` is a run directory that can be looked into."""
    return any(os.path.isfile(path / name) for name in RECORD_FILES)


def read_record(path: Path) -> Run:
    """The run of a run directory; UserError where no file of one can be read.

    Its rates are None where it ended before one window was complete, and `notes` says what is missing.
    """
    notes: list[str] = []
    summary, config, environment = (read_json(path, name, notes) for name in ("summary", "config", "environment"))
    if not (summary or config or environment):
        raise UserError(f"{path}: {', '.join(notes) or 'no summary.json, config.json or environment.json'}")
    clap, rates, parts = (
        section(config, "clap"),
        section(summary, "samples_per_s_per_gpu"),
        section(summary, "breakdown_s"),
    )

    def known(name: str, *others: Mapping[str, Any]) -> Any:
        """What the first of the files that has the field says."""
        return next(filter(None, (values.get(name) for values in (summary, *others))), None)

    accumulation = whole(known("gradient_accumulation_steps", config)) or 1
    micro_batch = whole(summary.get("micro_batch_per_gpu")) or whole(config.get("train_micro_batch_size_per_gpu"))
    batch, step = micro_batch and micro_batch * accumulation, section(summary, "step_time_s")
    if "median" in rates:
        rates, parts = {}, {}
        notes.append("rates and breakdown of before schema 3 are not read")
    fields = _rate_fields(rates)
    if not fields and batch:
        windows, of_steps = _windows_of_steps(path, batch, whole(section(clap, "bench").get("steps_per_window")))
        step, fields = of_steps or step, rate_fields(windows)
        notes += [f"{len(windows)} whole windows read from metrics.jsonl, as the run did not sum up"] * bool(windows)
    rate, step_s = fields.get("samples_per_s_per_gpu"), positive(step.get("median"))
    notes += uneven_steps(rate, batch, step_s) if rate and batch and step_s else []
    notes += [] if rate else ["no complete window was measured"]
    gpus, device = whole(known("world_size", environment)) or 0, _text(known("device_name", environment))
    engine, memory = positive(summary.get("deepspeed_samples_per_s")), positive(summary.get("memory_peak_bytes"))
    if engine and summary.get("deepspeed_times_host_alone") is True and unit(device) == "GPUs":
        notes.append(HOST_ALONE)
    numbers = ("achieved_tflops", "data_wait_percent", "mfu_model_percent", "peak_tflops")
    fields |= {name: non_negative(summary.get(name)) for name in numbers}
    fields |= {f"{part}_s": non_negative(parts.get(part)) for part in STEP_PHASES}
    return Run(
        source=str(path), state=_text(summary.get("state")) or "unknown", error=_text(summary.get("error")),
        model=_model(summary, known("preset", section(clap, "model"))), device=device,
        precision=_text(summary.get("precision")), text_tokens=whole(known("text_tokens", clap)),
        nodes=whole(known("num_nodes", environment)) or 0, gpus=gpus, batch_per_gpu=batch, accumulation=accumulation, **fields,
        engine_samples_per_s_per_gpu=engine / gpus if engine and gpus else None,
        step_time_s=step_s, slowest_rank_step_time_s=positive(step.get("slowest_rank_median")),
        memory_peak_gib=memory and memory / 1024**3, notes="; ".join(notes),
        config=config, environment=_environment(environment), finished=_text(summary.get("finished")),
    )  # fmt: skip


def _model(summary: Mapping[str, Any], preset: object) -> str:
    """Return the preset under its present name."""
    name = _text(preset)
    is_former = summary and (whole(summary.get("schema")) or 0) < 4
    return FORMER_PRESETS.get(name, name) if is_former else name


def _rate_fields(rates: Mapping[str, Any]) -> dict[str, Any]:
    """`Run`'s fields of the rate and its interval; none without one."""
    mean, low, high = (positive(rates.get(name)) for name in ("mean", "low", "high"))
    if not mean:
        return {}
    windows = rates.get("windows")
    windows = tuple(filter(positive, windows)) if isinstance(windows, list) else ()
    fields: dict[str, Any] = {"samples_per_s_per_gpu": mean, "windows": windows}
    if low and high and low <= mean <= high:
        label = interval_label(non_negative(rates.get("coverage")), len(windows))
        fields |= {"interval": (low, high), "uncertainty_from": f"{label} of 1 run"}
    return fields


def rate_fields(windows: Sequence[float], window_s: Sequence[float] = ()) -> dict[str, Any]:
    """`Run`'s fields of timed windows: all samples over all seconds, of as many samples a window where these aren't given, and
    the interval of two windows or more. None without windows."""
    if not windows:
        return {}
    found = rates(windows, window_s or [1 / rate for rate in windows])
    fields = {"samples_per_s_per_gpu": found["mean"], "windows": tuple(windows)}
    label = interval_label(found.get("coverage"), len(windows))
    of = {"interval": (found["low"], found["high"]), "uncertainty_from": f"{label} of 1 run"}
    return fields | of if len(windows) > 1 else fields


def _windows_of_steps(path: Path, batch: int, wanted: int | None) -> tuple[list[float], dict[str, float]]:
    """Samples/s/GPU of each whole window in `metrics.jsonl`, and what `step_time_s` in a summary would hold."""
    windows: dict[float, list[float]] = defaultdict(list)
    slowest: list[float] = []
    for line in read_steps(path, "window"):
        time, window = positive(line.get("time_s")), non_negative(line.get("window"))
        if time is not None and window is not None:
            windows[window].append(time)
            slowest.append(positive(line.get("slowest_rank_time_s")) or time)
    wanted = wanted or max(map(len, windows.values()), default=0)
    found = [steps for _, steps in sorted(windows.items()) if len(steps) == wanted]
    if not found:
        return [], {}
    of_steps = {"median": median(time for steps in found for time in steps), "slowest_rank_median": median(slowest)}
    return [batch * wanted / sum(steps) for steps in found], of_steps


def read_json(path: Path, name: str, notes: list[str]) -> dict[str, Any]:
    """A JSON object of a run directory (`summary`, …); empty where it is missing or damaged, the latter with a note."""
    try:
        value = files.read_json(path / f"{name}.json")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError):
        value = None
    if not isinstance(value, dict):
        notes.append(f"{name}.json is not readable JSON")
        return {}
    return value


def json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects in a file's lines; what can't be read, and the last line of a host that was killed, is left out."""
    with contextlib.suppress(OSError):
        for text in files.read_lines(path):
            with contextlib.suppress(ValueError):
                line = files.parse_json(text)
                yield from [line] if isinstance(line, dict) else []


def read_steps(path: Path, *phases: str, history: object = None) -> list[dict[str, Any]]:
    """Lines of `metrics.jsonl` of these phases that have a step (`clap_ds.record.schema.StepLine`). Where the file `history`
    is there, its lines instead."""
    file = path / "metrics.jsonl"
    if isinstance(history, str) and "\0" not in history and os.path.isfile(history):
        file = Path(history)
    lines = (line for line in json_lines(file) if line.get("phase") in phases)
    return [line for line in lines if non_negative(line.get("step")) is not None]


def _environment(values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that are of their types."""
    types = {"versions": dict, "command": list, "hosts": list, "device_names": list, "gpus_per_node": list}
    return {name: value for name, value in values.items() if isinstance(value, types.get(name, str | int))}


def positive(value: object) -> float | None:
    """`value` as a float if it is a finite number above zero, else None."""
    return non_negative(value) or None


def non_negative(value: object) -> float | None:
    """`value` as a float if it is a number from zero to what can be measured, else None (booleans, text are not numbers)."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if value == 0 or is_measurable(value) else None


def whole(value: object) -> int | None:
    """`value` as an int if it is a whole number above zero, else None."""
    number = positive(value)
    return int(number) if number is not None and number == int(number) else None


def section(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A field that holds others; empty where it is missing or holds none."""
    found = values.get(name)
    return found if isinstance(found, dict) else {}


def _text(value: object) -> str:
    return " ".join(value.split()) if isinstance(value, str) else ""
