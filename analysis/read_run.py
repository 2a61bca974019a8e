"""Read this project's run directories, also of failed runs.

Fields missing in `summary.json` come from `config.json` and `environment.json`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints, is_typeddict

from clap_ds.analysis.table import ENERGY, MOST, Run, checked
from clap_ds.run_records.run_dir import mark_killed
from clap_ds.run_records.schema import (
    FORMER_PHASES,
    FORMER_PRESETS,
    RECORD_FILES,
    STEP_PHASES,
    Config,
    Environment,
    Summary,
    current,
)
from clap_ds.utils import files
from clap_ds.utils.errors import UserError

BY_TIMER = "by DeepSpeed's timer"
_SCHEMAS = {"summary": Summary, "config": Config, "environment": Environment}
_PYTHON_TYPES: Mapping[Any, tuple[Any, str]] = {
    str: (str, "text"), Literal: (str, "text"), int: (int, "a whole number"), float: ((int, float), "a number"),
    bool: (bool, "true or false"), list: (list, "a list"), dict: (dict, "an object"),
}  # fmt: skip


def is_record(path: Path) -> bool:
    return any((path / name).is_file() for name in RECORD_FILES)


def read_record(path: Path) -> Run:
    """Read a run directory. UserError if a file is damaged or all are missing."""
    summary, config, environment = (
        read_json(path, name) for name in ("summary", "config", "environment")
    )
    if not (summary or config or environment):
        raise UserError(f"{path}: no summary.json, config.json or environment.json")
    try:
        return checked(_run(path, summary, config, environment), str(path))
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise UserError(
            f"{path}: its files don't follow clap_ds/run_records/schema.py ({error})"
        ) from None


def _run(
    path: Path,
    summary: Mapping[str, Any],
    config: Mapping[str, Any],
    environment: Mapping[str, Any],
) -> Run:
    summary = {name: value for name, value in summary.items() if value is not None}
    clap = config.get("clap") or {}
    known = {**config, **clap, **(clap.get("model") or {}), **environment, **summary}
    rates, parts, step = (
        summary.get(name, {}) for name in ("samples_per_s_per_gpu", "breakdown_s", "step_time_s")
    )
    accumulation = known.get("gradient_accumulation_steps") or 1
    micro_batch = summary.get("micro_batch_per_gpu") or config.get("train_micro_batch_size_per_gpu")
    batch = micro_batch and micro_batch * accumulation
    rate = rates.get("mean")
    gpus, by_deepspeed, memory = (
        known.get(name) for name in ("world_size", "deepspeed_samples_per_s", "memory_peak_bytes")
    )
    name = known.get("preset") or ""
    name = FORMER_PRESETS.get(name, name) if summary and summary.get("schema", 0) < 4 else name
    fields: dict[str, Any] = {f"{part}_s": parts.get(part) for part in STEP_PHASES}
    for column in (
        "achieved_tflops",
        "data_wait_percent",
        "mfu_model_percent",
        "peak_tflops",
        *ENERGY,
    ):
        fields[column] = summary.get(column)
    for column in ("error", "precision", "finished"):
        fields[column] = summary.get(column, "")
    return Run(
        source=str(path), state=summary.get("state", "unknown"), model=name,
        device=known.get("device_name", ""), context_length=known.get("context_length"),
        nodes=known.get("num_nodes", 0), gpus=gpus or 0, batch_per_gpu=batch, accumulation=accumulation,
        samples_per_s_per_gpu=rate, windows=tuple(rates.get("windows", ())), **fields,
        deepspeed_samples_per_s_per_gpu=by_deepspeed and by_deepspeed / gpus, step_time_s=step.get("median"),
        slowest_rank_step_time_s=step.get("slowest_rank_median"), memory_peak_gib=memory and memory / 1024**3,
        notes="" if rate else "no complete window was measured", config=config, environment=environment,
    )  # fmt: skip


def read_json(path: Path, name: str) -> dict[str, Any]:
    """Return a JSON object of a run directory (`summary`, …); empty if missing. UserError if
    damaged."""
    file = path / f"{name}.json"
    content = files.read_object(file, allow_nan=True) if file.is_file() else {}
    content = current(content) if name == "summary" else content
    if wrong := _find_wrong_type(content, _SCHEMAS[name], name):
        raise UserError(f"{path}: {wrong} (clap_ds/run_records/schema.py)")
    return mark_killed(path, content) if name == "summary" else content


def _find_wrong_type(value: Any, expected: Any, place: str) -> str:
    """Return which part of a JSON value isn't of its type in a schema; empty if all are. Anything
    may be null."""
    kind = get_origin(expected) or expected
    arguments = get_args(expected)
    if kind is UnionType:  # with None
        return _find_wrong_type(value, arguments[0], place)
    if value is None or kind is Any:
        return ""
    fields = get_type_hints(expected) if is_typeddict(expected) else {}
    python_type, expectation = (dict, "an object") if fields else _PYTHON_TYPES[kind]
    if not isinstance(value, python_type):
        return f"{place} is {value!r}; expected {expectation}"
    parts: dict[Any, Any] = {}
    if isinstance(value, list):
        parts = dict(enumerate(value))
    if isinstance(value, dict):
        parts = value
    for name, part in parts.items():
        part_type = fields.get(name, Any) if fields else arguments[-1]
        if wrong := _find_wrong_type(part, part_type, f"{place}.{name}"):
            return wrong
    return ""


def json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects in a file's lines, without unreadable lines, such as the last one of a
    killed host."""
    with contextlib.suppress(OSError):
        for text in files.read_lines(path):
            with contextlib.suppress(ValueError):
                line = files.parse_json(text, allow_nan=True)
                yield from [line] if isinstance(line, dict) else []


def read_steps(path: Path, *phases: str, history: str | None = None) -> list[dict[str, Any]]:
    """Return lines of these phases (`StepLine`) in a `history.jsonl`, if there is one at this path,
    else in `metrics.jsonl`."""
    file = Path(str(history))
    if (
        file.name != "history.jsonl" or not file.is_file()
    ):  # a summary of others could name any file
        file = path / "metrics.jsonl"
    phases += tuple(old for old, name in FORMER_PHASES.items() if name in phases)
    lines = (_numbers_of(line) for line in json_lines(file) if line.get("phase") in phases)
    return [line for line in lines if "step" in line]


def _numbers_of(line: Mapping[str, Any]) -> dict[str, Any]:
    """Return a line's usable numbers, also those in its `chance` and `phases_s`."""
    numbers: dict[str, Any] = {}
    for name, value in line.items():
        if name in ("chance", "phases_s") and isinstance(value, dict):
            numbers[name] = _numbers_of(value)
        elif isinstance(value, int | float) and abs(value) < MOST:
            numbers[name] = value
    return numbers
