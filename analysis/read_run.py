"""This project's run directory → a run, whatever state the run ended in.

What `summary.json` lacks comes from `config.json` and `environment.json`, and the rates of a run that was killed before it
could sum up from `metrics.jsonl`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from clap_ds.analysis.table import Run, checked, unit
from clap_ds.config import files
from clap_ds.config.errors import UserError
from clap_ds.run_records.intervals import rates
from clap_ds.run_records.metrics_schema import FORMER_PHASES, FORMER_PRESETS, RECORD_FILES, STEP_PHASES, current
from clap_ds.run_records.sanity_checks import uneven_steps

BY_TIMER = "DeepSpeed's timer: leaves out data loading and what lies between steps"
HOST_ALONE = "the engine's timer doesn't wait for the GPU: its rate is that of the host, queueing steps"


def is_record(path: Path) -> bool:
    return any((path / name).is_file() for name in RECORD_FILES)


def read_record(path: Path) -> Run:
    """The run of a run directory; UserError where a file of it is damaged, or none is there."""
    summary, config, environment = (read_json(path, name) for name in ("summary", "config", "environment"))
    if not (summary or config or environment):
        raise UserError(f"{path}: no summary.json, config.json or environment.json")
    try:
        return checked(_run(path, summary, config, environment), str(path))
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise UserError(f"{path}: its files don't follow clap_ds/run_records/metrics_schema.py ({error})") from None


def _run(path: Path, summary: Mapping[str, Any], config: Mapping[str, Any], environment: Mapping[str, Any]) -> Run:
    summary = {name: value for name, value in summary.items() if value is not None}
    clap, notes = config.get("clap") or {}, []
    known = {**config, **clap, **(clap.get("model") or {}), **environment, **summary}
    rates, parts, step = (summary.get(name, {}) for name in ("samples_per_s_per_gpu", "breakdown_s", "step_time_s"))
    accumulation = known.get("gradient_accumulation_steps") or 1
    micro_batch = summary.get("micro_batch_per_gpu") or config.get("train_micro_batch_size_per_gpu")
    batch = micro_batch and micro_batch * accumulation
    fields: dict[str, Any] = {}
    if "mean" in rates:
        fields = {"samples_per_s_per_gpu": rates["mean"], **window_fields(rates.get("windows", ()))}
    elif batch:  # it was killed, or is of before schema 3, which also measured the parts otherwise
        found, step = _windows_of_steps(path, batch, (clap.get("bench") or {}).get("steps_per_window"))
        fields, parts = rate_fields(found), {}
        notes += [f"{len(found)} whole windows read from metrics.jsonl"] * bool(found)
    rate, step_s = fields.get("samples_per_s_per_gpu"), step.get("median")
    notes += (
        (uneven_steps(rate, batch, step_s) if batch and step_s else []) if rate else ["no complete window was measured"]
    )
    gpus, device = known.get("world_size", 0), known.get("device_name", "")
    engine, memory = summary.get("deepspeed_samples_per_s"), summary.get("memory_peak_bytes")
    notes += [HOST_ALONE] * bool(
        engine and not summary.get("deepspeed_timer_synchronized", True) and unit(device) == "GPUs"
    )
    name, schema = known.get("preset") or "", summary.get("schema")
    for number in ("achieved_tflops", "data_wait_percent", "mfu_model_percent", "peak_tflops"):
        fields[number] = summary.get(number)
    return Run(
        source=str(path), state=summary.get("state", "unknown"), error=summary.get("error", ""),
        model=FORMER_PRESETS.get(name, name) if summary and (schema or 0) < 4 else name, device=device,
        precision=summary.get("precision", ""), context_length=known.get("context_length"), nodes=known.get("num_nodes", 0),
        gpus=gpus, batch_per_gpu=batch, accumulation=accumulation, **fields,
        **{f"{part}_s": parts.get(part) for part in STEP_PHASES},
        engine_samples_per_s_per_gpu=engine and engine / gpus, step_time_s=step_s,
        slowest_rank_step_time_s=step.get("slowest_rank_median"), memory_peak_gib=memory and memory / 1024**3,
        notes="; ".join(notes), config=config, environment=environment, finished=summary.get("finished", ""),
    )  # fmt: skip


def rate_fields(windows: Sequence[float], window_s: Sequence[float] = ()) -> dict[str, Any]:
    """Return `Run`'s fields of timed windows: all samples over all seconds, and the windows' range. Empty without windows.

    Without `window_s` every window has the same number of samples.
    """
    if not windows:
        return {}
    found = rates(windows, window_s or [1 / rate for rate in windows])
    return {"samples_per_s_per_gpu": found["mean"], **window_fields(windows)}


def window_fields(windows: Sequence[float]) -> dict[str, Any]:
    fields: dict[str, Any] = {"windows": tuple(windows)}
    return fields | {"interval": (min(windows), max(windows))} if len(windows) > 1 else fields


def _windows_of_steps(path: Path, batch: int, wanted: int | None) -> tuple[list[float], dict[str, float]]:
    """Samples/s/GPU of each whole window in `metrics.jsonl`, and what `step_time_s` in a summary would hold."""
    import pandas as pd

    names = ["window", "time_s", "slowest_rank_time_s", "window_s"]
    steps = pd.DataFrame(read_steps(path, "timed"), columns=names)
    slowest = steps["slowest_rank_time_s"].fillna(steps["time_s"])  # which older records lack
    windows = slowest.groupby(steps["window"]).agg(["size", "sum"])
    windows["sum"] = steps.groupby("window")["window_s"].first().fillna(windows["sum"])
    windows = windows[windows["size"] == (wanted or windows["size"].max())]
    if windows.empty:
        return [], {}
    median = float(steps.loc[steps["window"].isin(windows.index), "time_s"].median())
    return (batch * windows["size"] / windows["sum"]).tolist(), {"median": median}


def read_json(path: Path, name: str) -> dict[str, Any]:
    """A JSON object of a run directory (`summary`, …); empty where it isn't there. UserError where it is damaged."""
    file = path / f"{name}.json"
    return current(name, files.read_object(file)) if file.is_file() else {}


def json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects in a file's lines; what can't be read, as the last line of a host that was killed, is left out."""
    with contextlib.suppress(OSError):
        for text in files.read_lines(path):
            with contextlib.suppress(ValueError):
                line = files.parse_json(text)
                yield from [line] if isinstance(line, dict) else []


def read_steps(path: Path, *phases: str, history: str | None = None) -> list[dict[str, Any]]:
    """Lines of `metrics.jsonl` of these phases (`StepLine`); of the file `history` where that is there."""
    file = Path(history) if history and os.path.isfile(history) else path / "metrics.jsonl"
    phases += tuple(old for old, name in FORMER_PHASES.items() if name in phases)
    return [line for line in json_lines(file) if line.get("phase") in phases and "step" in line]
