"""Explain errors in a run's JSON, and list the allowed DeepSpeed fields."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from clap_ds.config.batch_sizes import NAMES
from clap_ds.config.errors import did_you_mean
from clap_ds.config.schema import DATA_SOURCES, PositiveInt, sections_of

Object = dict[str, Any]
EMPTY: Object = {}
_SECTIONS = """activation_checkpointing bf16 checkpoint comet comms_logger compile csv_monitor data_types flops_profiler fp16
optimizer scheduler tensorboard timers torch_autocast wandb zero_optimization"""
_VALUES = """communication_data_type dataloader_drop_last disable_allgather disable_python_gc dump_state gradient_allreduce_op
gradient_clipping gradient_predivide_factor log_level memory_breakdown prescale_gradients seq_parallel_communication_data_type
wall_clock_breakdown zero_allow_untested_optimizer zero_force_ds_cpu_optimizer"""
DEEPSPEED_FIELDS: dict[str, Any] = {
    **dict.fromkeys(_SECTIONS.split(), (Object, EMPTY)),
    **dict.fromkeys(_VALUES.split(), (Any, None)),
    "steps_per_print": (PositiveInt | None, None),
    **dict.fromkeys(NAMES, (Any, None)),
}
"""Type and default of the top-level DeepSpeed fields that data-parallel CLAP training uses. DeepSpeed silently ignores unknown
names, so a typo would change the run."""


def engine_problems(content: Object) -> list[str]:
    """Return problems in DeepSpeed's sections: unsupported values, and required ones that are missing."""
    stage, autocast = content.get("zero_optimization", {}).get("stage", 0), content.get("torch_autocast", {})
    dtype = autocast.get("dtype", "bfloat16") if autocast.get("enabled") else "bfloat16"
    problems = {
        f"zero_optimization.stage: expected 0 (plain data parallel), found {json.dumps(stage)}": stage != 0,
        f'torch_autocast.dtype: expected "bfloat16", found {json.dumps(dtype)}: DeepSpeed doesn\'t checkpoint the loss scale'
        " that float16 needs here; use fp16.enabled": str(dtype).removeprefix("torch.") != "bfloat16",
        "optimizer.type: missing; expected a DeepSpeed optimizer, such as AdamW": "type"
        not in content.get("optimizer", {}),
        "gradient_clipping: missing; DeepSpeed's default is 1.0 in bf16 and none in fp32, so set it (0.0 for none, as in the"
        " published runs)": "gradient_clipping" not in content,
    }
    return [problem for problem, is_there in problems.items() if is_there]


def missing_monitors(deepspeed: Object) -> list[str]:
    """Return a problem for each enabled DeepSpeed monitor whose package isn't installed."""
    return [
        f"{name}.enabled: {package} is not installed; run `pip install {package}` or set it to false"
        for name, package in (("wandb", "wandb"), ("comet", "comet_ml"))
        if deepspeed.get(name, {}).get("enabled") and importlib.util.find_spec(package) is None
    ]


def explain(details: Any, root: type[BaseModel]) -> str:
    """Format one of `ValidationError.errors()` in a line: field, expected, found, nearest valid name."""
    place = details["loc"]
    parts = [str(part) for before, part in zip((None, *place), place, strict=False) if (before, part) not in _KINDS]
    field, kind, section = ".".join(parts), details["type"], ".".join(parts[:-1])
    if kind == "extra_forbidden":
        names = [*_fields(root)]
        elsewhere = [name for name in names if name.split(".")[-1] == parts[-1]]
        siblings = [name.split(".")[-1] for name in names if name.rpartition(".")[0] == section]
        return f"{field}: no such field" + did_you_mean(*((field, elsewhere) if elsewhere else (parts[-1], siblings)))
    message = details["msg"].removeprefix("Value error, ").replace("Input should be", "expected")
    says_found = kind in ("missing", "value_error") or kind.startswith("union_tag")
    found = "" if says_found else f", found {json.dumps(details['input'], default=str)}"
    return f"{field}: {message[0].lower()}{message[1:]}{found}"


_KINDS = {("data", kind) for kind in DATA_SOURCES}
"""Parts that pydantic inserts in an error's location."""


def _fields(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield the dotted names of all fields."""
    for name, field in section.model_fields.items():
        yield prefix + name
        for inner in sections_of(field.annotation):
            yield from _fields(inner, f"{prefix}{name}.")
