"""Reading a run's JSON and saying what is wrong with it, in words a user can act on.

Leaves the names and defaults of `clap` fields to `clap_ds.config.settings`; knows of DeepSpeed's fields only which there are.
"""

from __future__ import annotations

import importlib.util
import json
from typing import Any, get_args

from pydantic import BaseModel

from clap_ds.config.batch_sizes import NAMES, BatchSizes
from clap_ds.config.errors import did_you_mean
from clap_ds.config.files import kind_of

SECTION_FIELDS = (
    "activation_checkpointing",
    "bf16",
    "checkpoint",
    "comet",
    "comms_logger",
    "compile",
    "csv_monitor",
    "data_types",
    "flops_profiler",
    "fp16",
    "optimizer",
    "scheduler",
    "tensorboard",
    "timers",
    "torch_autocast",
    "wandb",
    "zero_optimization",
)
"""Top-level DeepSpeed sections that are objects and that plain data-parallel CLAP training has a use for."""

DEEPSPEED_FIELDS = (
    *SECTION_FIELDS,
    *NAMES,
    "communication_data_type",
    "dataloader_drop_last",
    "disable_allgather",
    "disable_python_gc",
    "dump_state",
    "gradient_allreduce_op",
    "gradient_clipping",
    "gradient_predivide_factor",
    "log_level",
    "memory_breakdown",
    "prescale_gradients",
    "seq_parallel_communication_data_type",
    "steps_per_print",
    "wall_clock_breakdown",
    "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer",
)
"""Top-level names of a DeepSpeed configuration accepted here."""


def check_deepspeed(content: dict[str, Any], clap_fields: list[str], world_size: int | None) -> list[str]:
    """Problems with the DeepSpeed fields this project relies on; DeepSpeed itself checks the rest later.

    DeepSpeed ignores a top-level name it doesn't know, so a misspelt one would silently change the run: those are
    refused here.
    """
    problems = [
        f"{name}: no such DeepSpeed field{did_you_mean(name, DEEPSPEED_FIELDS)}"
        + (f" (it is a field of clap: write clap.{name})" if name in clap_fields else "")
        for name in content
        if name not in DEEPSPEED_FIELDS
    ]
    try:
        BatchSizes.of(content, world_size)
    except ValueError as error:
        problems += str(error).splitlines()
    interval = content.get("steps_per_print")
    if interval is not None and (not isinstance(interval, int) or isinstance(interval, bool) or interval < 1):
        problems.append(f"steps_per_print: expected a whole number, at least 1, found {json.dumps(interval)}")
    for name in SECTION_FIELDS:
        if not isinstance(content.get(name, {}), dict):
            problems.append(f"{name}: expected an object, found {kind_of(content[name])}")
    if not problems:
        problems += _check_engine_choices(content)
    return problems


def _check_engine_choices(content: dict[str, Any]) -> list[str]:
    problems = []
    stage = content.get("zero_optimization", {}).get("stage", 0)
    if stage != 0:
        problems.append(f"zero_optimization.stage: expected 0 (plain data parallel), found {json.dumps(stage)}")
    autocast = content.get("torch_autocast", {})
    if autocast.get("enabled") and str(autocast.get("dtype", "bfloat16")).removeprefix("torch.") != "bfloat16":
        problems.append(
            f'torch_autocast.dtype: expected "bfloat16", found {json.dumps(autocast["dtype"])}: DeepSpeed keeps the loss scale'
            " that float16 needs in no checkpoint; fp16.enabled does"
        )
    if "type" not in content.get("optimizer", {}):
        problems.append('optimizer.type: missing; expected an optimizer DeepSpeed knows, such as "AdamW"')
    if "gradient_clipping" not in content:
        problems.append(
            "gradient_clipping: missing; DeepSpeed would clip to 1.0 in bf16 but not in fp32, so say which is meant"
            " (0.0 for none, as the published runs had)"
        )
    return problems


def missing_monitors(deepspeed: dict[str, Any]) -> list[str]:
    """A problem for each of DeepSpeed's monitors that is asked for and whose package isn't installed."""
    return [
        f"{name}.enabled: {package} is not installed; pip install {package}, or set it to false"
        for name, package in (("wandb", "wandb"), ("comet", "comet_ml"))
        if deepspeed.get(name, {}).get("enabled") and importlib.util.find_spec(package) is None
    ]


def explain(details: Any, root: type[BaseModel], tagged: dict[str, type[BaseModel]]) -> str:
    """One pydantic error in this project's words: field, what was expected, what was found, the nearest name.

    Args:
        details: an item of `ValidationError.errors()`.
        root: the model that was validated, for the names of its fields.
        tagged: section by the tag that pydantic puts into the location of a field inside a discriminated union.
    """
    location = list(details["loc"])
    section, field = root, "clap"
    for part in location[:-1]:
        if part in tagged:
            section = tagged[part]
            continue
        field += f".{part}"
        annotation = section.model_fields[part].annotation if part in section.model_fields else None
        for kind in (annotation, *get_args(annotation)):  # a section that may be null, too
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                section = kind
    name = str(location[-1])
    field += f".{name}" if not (name in tagged and location[:-1] == ["data"]) else ""
    if details["type"] == "extra_forbidden":
        if name in DEEPSPEED_FIELDS:
            return f"{field}: {name} is a DeepSpeed field: move it out of clap, to the top level"
        return f"{field}: no such field{did_you_mean(name, section.model_fields)}"
    if details["type"] == "missing":
        return f"{field}: missing"
    if details["type"].startswith("union_tag"):
        found = details["input"].get("source") if isinstance(details["input"], dict) else details["input"]
        return f"{field}.source: expected one of {', '.join(tagged)}, found {json.dumps(found)}"
    message = details["msg"].removeprefix("Value error, ").replace("Input should be", "expected")
    if details["type"] == "value_error":
        return f"{field}: {message}"
    return f"{field}: {message[0].lower() + message[1:]}, found {json.dumps(details['input'], default=str)}"
