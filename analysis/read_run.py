"""Read this project's run directories, also of failed runs.

Fields missing in `summary.json` come from `config.json` and `environment.json`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints, is_typeddict

from clap_ds.analysis.table import ENERGY_COLUMNS, MAX_VALUE, Run, check_types
from clap_ds.run_records.run_dir import mark_killed
from clap_ds.run_records.schema import (
    FORMER_PHASES,
    FORMER_PRESETS,
    RECORD_FILES,
    STEP_PHASES,
    Config,
    Environment,
    Summary,
    upgrade_summary,
)
from clap_ds.utils import files
from clap_ds.utils.errors import UserError

_SCHEMAS = {"summary": Summary, "config": Config, "environment": Environment}
# Types of fields in schemas → types of values in files, and what a message calls them.
_PYTHON_TYPES: Mapping[Any, tuple[Any, str]] = {
    str: (str, "text"),
    Literal: (str, "text"),
    int: (int, "a whole number"),
    float: ((int, float), "a number"),
    bool: (bool, "true or false"),
    list: (list, "a list"),
    dict: (dict, "an object"),
}


def is_record(path: Path) -> bool:
    return any((path / name).is_file() for name in RECORD_FILES)


def read_record(path: Path) -> Run:
    """Read a run directory. UserError if a file is damaged or all are missing."""
    summary = read_json(path, "summary")
    config = read_json(path, "config")
    environment = read_json(path, "environment")
    # A killed run may have written only some of them.
    if not (summary or config or environment):
        raise UserError(f"{path}: no summary.json, config.json or environment.json")
    try:
        return check_types(_make_run(path, summary, config, environment), str(path))
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        problem = f"its files don't follow clap_ds/run_records/schema.py ({error})"
        raise UserError(f"{path}: {problem}") from None


def _make_run(
    path: Path,
    summary: Mapping[str, Any],
    config: Mapping[str, Any],
    environment: Mapping[str, Any],
) -> Run:
    summary = {name: value for name, value in summary.items() if value is not None}
    clap = config.get("clap") or {}
    model = clap.get("model") or {}
    # A failed run's summary may lack what its configuration or environment states.
    fields = {**config, **clap, **model, **environment, **summary}
    preset = fields.get("preset") or ""
    # Presets were renamed in schema 4.
    if summary and summary.get("schema", 0) < 4:
        preset = FORMER_PRESETS.get(preset, preset)
    accumulation = fields.get("gradient_accumulation_steps") or 1
    micro_batch = summary.get("micro_batch_per_gpu") or config.get("train_micro_batch_size_per_gpu")
    # Objects of numbers; a failed run lacks them.
    rates = summary.get("samples_per_s_per_gpu", {})
    step_time_s = summary.get("step_time_s", {})
    breakdown_s = summary.get("breakdown_s", {})
    columns: dict[str, Any] = {f"{part}_s": breakdown_s.get(part) for part in STEP_PHASES}
    numbers = ("achieved_tflops", "data_wait_percent", "mfu_model_percent", "peak_tflops")
    for name in (*numbers, *ENERGY_COLUMNS):
        columns[name] = summary.get(name)
    for name in ("error", "precision", "finished"):
        columns[name] = summary.get(name, "")
    gpus = fields.get("world_size") or 0
    # DeepSpeed's is of all GPUs.
    if deepspeed_samples_per_s := fields.get("deepspeed_samples_per_s"):
        columns["deepspeed_samples_per_s_per_gpu"] = deepspeed_samples_per_s / gpus
    if memory_bytes := fields.get("memory_peak_bytes"):
        columns["memory_peak_gib"] = memory_bytes / 1024**3
    if micro_batch:
        columns["batch_per_gpu"] = micro_batch * accumulation
    if not rates.get("mean"):
        columns["notes"] = "no complete window was measured"
    return Run(
        **columns,
        source=str(path),
        state=summary.get("state", "unknown"),
        model=preset,
        device=fields.get("device_name", ""),
        context_length=fields.get("context_length"),
        nodes=fields.get("num_nodes", 0),
        gpus=gpus,
        accumulation=accumulation,
        samples_per_s_per_gpu=rates.get("mean"),
        windows=tuple(rates.get("windows", ())),
        step_time_s=step_time_s.get("median"),
        slowest_rank_step_time_s=step_time_s.get("slowest_rank_median"),
        config=config,
        environment=environment,
    )


def read_json(path: Path, name: str) -> dict[str, Any]:
    """Return a JSON object of a run directory (`summary`, …); empty if missing. UserError if
    damaged."""
    file = path / f"{name}.json"
    # NaN stands for a loss that diverged.
    content = files.read_object(file, allow_nan=True) if file.is_file() else {}
    if name == "summary":
        content = upgrade_summary(content)
    if problem := _find_wrong_type(content, _SCHEMAS[name], name):
        raise UserError(f"{path}: {problem} (clap_ds/run_records/schema.py)")
    # A run whose process is gone was killed.
    return mark_killed(path, content) if name == "summary" else content


def _find_wrong_type(value: Any, expected: Any, field: str) -> str:
    """Return which part of a JSON value isn't of its type in a schema; empty if all are. Anything
    may be null."""
    arguments = get_args(expected)
    expected_type = get_origin(expected) or expected
    # `float | None`, for example.
    if expected_type is UnionType:
        return _find_wrong_type(value, arguments[0], field)
    if value is None or expected_type is Any:
        return ""
    members: dict[str, Any] = {}
    if is_typeddict(expected):
        members = get_type_hints(expected)
        expected_type = dict
    python_type, expectation = _PYTHON_TYPES[expected_type]
    if not isinstance(value, python_type):
        return f"{field} is {value!r}; expected {expectation}"
    if isinstance(value, list):
        value = dict(enumerate(value))
    if not isinstance(value, dict):
        return ""
    # A list's elements and a mapping's values have the last argument's type.
    default = Any if members else arguments[-1]
    for name, member in value.items():
        member_type = members.get(name, default)
        if problem := _find_wrong_type(member, member_type, f"{field}.{name}"):
            return problem
    return ""


def json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects in a file's lines, without unreadable lines, such as the last one of a
    killed host."""
    with contextlib.suppress(OSError):
        for text in files.read_lines(path):
            with contextlib.suppress(ValueError):
                line = files.parse_json(text, allow_nan=True)
                if isinstance(line, dict):
                    yield line


def read_steps(path: Path, phase: str, history: str | None = None) -> list[dict[str, Any]]:
    """Return lines of a phase (`StepLine`) in a `history.jsonl`, if there is one at this path, else
    in `metrics.jsonl`."""
    file = Path(str(history))
    # A summary of others could name any file.
    if file.name != "history.jsonl" or not file.is_file():
        file = path / "metrics.jsonl"
    phases = {phase, *(former for former, name in FORMER_PHASES.items() if name == phase)}
    lines = [_select_numbers(line) for line in json_lines(file) if line.get("phase") in phases]
    return [line for line in lines if "step" in line]


def _select_numbers(line: Mapping[str, Any]) -> dict[str, Any]:
    """Return a line's usable numbers, also those in its `chance` and `phases_s`."""
    numbers: dict[str, Any] = {}
    for name, value in line.items():
        if name in ("chance", "phases_s") and isinstance(value, dict):
            numbers[name] = _select_numbers(value)
        # NaN and infinity fail this comparison.
        elif isinstance(value, int | float) and abs(value) < MAX_VALUE:
            numbers[name] = value
    return numbers
