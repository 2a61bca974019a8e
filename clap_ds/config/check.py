"""What is wrong with a run's JSON, in words a user can act on; which of DeepSpeed's fields there are.

Names and defaults of `clap` fields are `sections`' and `settings`', batch sizes `batch_sizes`'.
"""

from __future__ import annotations

import importlib.util
import json
from types import UnionType
from typing import Any, Union, get_origin

from pydantic import BaseModel

from clap_ds.config.batch_sizes import NAMES
from clap_ds.config.errors import did_you_mean
from clap_ds.config.sections import DATA_SOURCES, PositiveInt, Section, sections_of

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
"""Type and default of the top-level names of a DeepSpeed configuration that plain data-parallel CLAP training has a use for.

DeepSpeed ignores a name it doesn't know, so that a misspelt one would silently change the run. Batch sizes are checked by
`BatchSizes`, some sections' fields by `engine_problems`, the rest by DeepSpeed.
"""


def engine_problems(content: Object) -> list[str]:
    """What DeepSpeed's sections ask of an engine that isn't to be had, or leave open that matters."""
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


def missing_monitors(deepspeed: Object) -> list[str]:
    """A problem for each of DeepSpeed's monitors that is asked for and whose package isn't installed."""
    return [
        f"{name}.enabled: {package} is not installed; pip install {package}, or set it to false"
        for name, package in (("wandb", "wandb"), ("comet", "comet_ml"))
        if deepspeed.get(name, {}).get("enabled") and importlib.util.find_spec(package) is None
    ]


def explain(details: Any, root: type[BaseModel]) -> str:
    """One of a `root`'s `ValidationError.errors()` in a line: field, what was expected, what was found, the nearest name."""
    field, names = _locate(details["loc"], root)
    kind, found, name = details["type"], details["input"], str(details["loc"][-1])
    if kind == "extra_forbidden":
        if "." in field and name in DEEPSPEED_FIELDS:
            return f"{field}: {name} is a DeepSpeed field: move it out of clap, to the top level"
        in_clap = "." not in field and name in sections_of(root.model_fields["clap"].annotation)[0].model_fields
        hint = f" (it is a field of clap: write clap.{name})" if in_clap else ""
        return f"{field}: no such field{did_you_mean(name, names)}{hint}"
    if kind == "missing":
        return f"{field}: missing"
    if kind.startswith("union_tag"):
        source = found.get("source") if isinstance(found, dict) else found
        return f"{field}.source: expected one of {', '.join(DATA_SOURCES)}, found {json.dumps(source)}"
    if kind == "value_error":
        return f"{field}: {details['msg'].removeprefix('Value error, ')}"
    message = "expected an object" if kind in ("dict_type", "model_type") else details["msg"]
    message = message.replace("Input should be", "expected")
    return f"{field}: {message[0].lower() + message[1:]}, found {json.dumps(found, default=str)}"


def _locate(location: tuple[str | int, ...], root: type[BaseModel]) -> tuple[str, list[str]]:
    """A field's dotted name, without what pydantic adds for the part of a union that it tried, and the names beside it."""
    path, names, section, is_tag = list[str](), list[str](), root, False
    for part in map(str, location):
        if is_tag:
            section, is_tag = DATA_SOURCES.get(part, Section), False
            continue
        path.append(part)
        names = [*section.model_fields]
        annotation = section.model_fields[part].annotation if part in section.model_fields else None
        inner = sections_of(annotation)
        is_tag = len(inner) > 1 or (not inner and get_origin(annotation) in (Union, UnionType))
        section = inner[0] if inner else Section
    return ".".join(path), names
