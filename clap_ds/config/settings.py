"""Load and validate a run's JSON: a DeepSpeed configuration with a `clap` section. Imports no
torch."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, ValidationError, create_model

from clap_ds.config import schema
from clap_ds.config.arguments import find_field, locate, with_assignments
from clap_ds.config.batch_sizes import NAMES, BatchSizes
from clap_ds.config.deepspeed_fields import (
    FIELDS,
    PARAMS,
    REFUSED,
    find_kind,
    find_params,
    make_deepspeed_model,
)
from clap_ds.config.model import MOST, ClapConfig, Section
from clap_ds.config.schema import NonNegativeInt, SyntheticData
from clap_ds.utils.errors import UserError, did_you_mean, explain
from clap_ds.utils.files import flatten, read_object
from clap_ds.utils.paths import find_config

WITHOUT_ZERO: dict[str, Any] = {
    "zero_optimization.stage": 0,
    "zero_optimization.compute_grad_norm": True,
    "zero_optimization.offload_optimizer.device": "none",
    "data_types.grad_accum_dtype": None,
    "bf16.bf16_master_weights_and_grads": False,
    "bf16.bf16_optimizer_states": False,
    "fp16.fp16_master_weights_and_grads": False,
}
"""Fields of which DeepSpeed takes one value at stage 0."""


class ClapSettings(schema.EngineSettings):
    """Settings that DeepSpeed doesn't have."""

    model: schema.ModelSettings = schema.ModelSettings()
    context_length: Annotated[int, Field(ge=2)] = 77
    """Caption length in tokens, including start token, end token and padding."""
    text_packing: bool = False
    """Pack captions without padding in the text tower. Packing on CUDA in 16 bits disables
    attention dropout."""
    data: schema.DataSettings = SyntheticData(source="synthetic")
    # A text is taken for the kind, so that a wrong one is explained.
    loss: Annotated[
        schema.LossSettings,
        BeforeValidator(lambda loss: {"kind": loss} if isinstance(loss, str) else loss),
    ] = schema.LossSettings()
    bench: schema.BenchSettings = schema.BenchSettings()
    train: schema.TrainSettings = schema.TrainSettings()
    checkpoint: schema.CheckpointSettings = schema.CheckpointSettings()
    evaluation: schema.EvaluationSettings = schema.EvaluationSettings()
    hardware: schema.HardwareSettings = schema.HardwareSettings()
    output: schema.OutputSettings = schema.OutputSettings()
    debug: schema.DebugSettings = schema.DebugSettings()
    seed: NonNegativeInt = 0
    """Random seed of weights, dropout, augmentation and data order."""

    def preset(self) -> ClapConfig:
        """Return the model's sizes."""
        return self.model.sizes


@functools.cache
def make_run_model(optimizer: str | None, scheduler: str | None) -> type[Section]:
    """Return a model of the whole JSON, for these types of optimizer and scheduler."""
    model = make_deepspeed_model(optimizer, scheduler)
    batch_sizes: Any = dict.fromkeys(NAMES, (Any, None))  # `BatchSizes` checks these
    return create_model(
        "RunFile", __base__=model, clap=(ClapSettings, ClapSettings()), **batch_sizes
    )


@dataclass
class RunSettings:
    """A run's typed `clap` section, and everything else as `deepspeed.initialize(config=…)` takes
    it."""

    path: Path
    clap: ClapSettings
    deepspeed: dict[str, Any]
    assignments: tuple[str, ...] = ()
    """`NAME=VALUE` of `--set`, with which the file's fields were changed."""

    @property
    def run_name(self) -> str:
        return self.clap.output.run_name or self.path.stem

    @functools.cached_property
    def checkpoint_folder(self) -> Path:
        """`clap.checkpoint.folder`, or a folder in `clap.output.dir` named by name and a hash of
          the training setup. Training
        replaces it by the folder that a run whose data has moved already has."""
        clap = self.clap
        if clap.checkpoint.folder is not None:
            return Path(os.path.abspath(clap.checkpoint.folder))
        named: Any = {
            "model": {"preset", "pretrained_text"},
            "data": {"source", "shards"},
            "train": {"pretrained", "freeze"},
        }
        setup = clap.model_dump(mode="json", include=named)
        identity = [
            *setup["model"].values(),
            setup["data"],
            setup["train"],
            clap.loss.kind,
            clap.seed,
        ]
        digest = hashlib.blake2b(
            json.dumps(identity, sort_keys=True).encode(), digest_size=4
        ).hexdigest()
        return Path(os.path.abspath(clap.output.dir), f"{self.run_name}-{digest}-checkpoints")

    @property
    def micro_batch(self) -> int:
        return self.batch_sizes().micro_batch

    @property
    def gradient_accumulation_steps(self) -> int:
        return self.batch_sizes().accumulation_steps

    def batch_sizes(self, world_size: int | None = None) -> BatchSizes:
        return BatchSizes.of(self.deepspeed, world_size)

    @property
    def precision(self) -> str:
        """`bf16`, `fp16`, `torch_autocast_bfloat16` (fp32 parameters) or `fp32`, from DeepSpeed's
        sections."""
        return precision_of(self.deepspeed)

    def resolved(self) -> dict[str, Any]:
        """Return the JSON with all defaults of `clap` filled in."""
        return {**self.deepspeed, "clap": self.clap.model_dump(mode="json")}


def precision_of(deepspeed: Mapping[str, Any]) -> str:
    """Return the precision that DeepSpeed's sections set."""
    if find_field(deepspeed, "torch_autocast.enabled"):
        return "torch_autocast_bfloat16"
    return next(
        (name for name in ("bf16", "fp16") if find_field(deepspeed, f"{name}.enabled")), "fp32"
    )


def load_run(
    path: str | Path, world_size: int | None = None, assignments: Sequence[str] = ()
) -> RunSettings:
    """Read and validate a run's JSON, by path or packaged name, and compute batch sizes for
    `world_size` ranks. Raises UserError if it is missing or not JSON, with one line per unknown or
    invalid field.

    Args:
        assignments: `NAME=VALUE` of fields to change, from `--set`.
    """
    path = find_config(Path(path))
    content = with_assignments(read_object(path, allow_nan=True), assignments)
    clap = ClapSettings()
    problems = [
        f"{name}: expected at most {MOST:,}, found {value}"
        for name, value in flatten(content).items()
        if isinstance(value, int) and abs(value) > MOST
    ]
    model = make_run_model(find_kind(content.get("optimizer")), find_kind(content.get("scheduler")))
    try:
        checked: Any = model.model_validate(content)
        clap = checked.clap
    except ValidationError as error:
        problems += [_explain_field(details, model) for details in error.errors()]
    content.pop("clap", None)
    try:
        sizes = BatchSizes.of(content, world_size)
    except ValueError as error:
        problems += str(error).splitlines()
    problems = problems or [
        *_check_deepspeed(content),
        *_check_together(clap, precision_of(content)),
    ]
    if problems:
        raise UserError("\n".join(locate(problem, path, assignments) for problem in problems))
    return RunSettings(
        path, clap, sizes.fill(content) if world_size else content, tuple(assignments)
    )


def _explain_field(details: Any, model: type[Section]) -> str:
    field = ".".join(map(str, details["loc"]))
    if field in REFUSED and details["type"] == "extra_forbidden":
        return f"{field}: not supported: {REFUSED[field]}"
    return explain(details, model)


def _check_deepspeed(content: dict[str, Any]) -> Iterator[str]:
    """Yield problems in DeepSpeed's sections that types don't exclude: unsupported values, missing
    required values, and monitors' missing packages."""

    for name, only_value in WITHOUT_ZERO.items():
        value = find_field(content, name)
        if value not in (None, only_value):
            expected = json.dumps(only_value)
            yield f"{name}: expected {expected} (plain data parallel), found {json.dumps(value)}, which needs ZeRO"
    for name, field in FIELDS["zero_optimization"]["properties"].items():
        if {name, field.get("alias")} <= content.get("zero_optimization", {}).keys():
            yield f"zero_optimization.{name}: expected only one of it and {field['alias']}, its other name"
    precisions = [
        section
        for section in ("bf16", "fp16", "torch_autocast")
        if find_field(content, f"{section}.enabled")
    ]
    for section in precisions[1:]:
        yield f"{section}.enabled: expected false, as {precisions[0]}.enabled is true"
    dtype = find_field(content, "torch_autocast.dtype") or "bfloat16"
    if "torch_autocast" in precisions and dtype.removeprefix("torch.") != "bfloat16":
        yield (
            f'torch_autocast.dtype: expected "bfloat16", found {json.dumps(dtype)} (float16 needs a loss scale, which'
            " DeepSpeed doesn't checkpoint here; use fp16.enabled)"
        )
    if find_field(content, "optimizer.type") is None:
        yield "optimizer.type: missing; expected a DeepSpeed optimizer, such as AdamW"
    if (
        find_field(content, "scheduler.type") is None
        and find_field(content, "scheduler.params") is not None
    ):
        yield "scheduler.type: missing; expected a scheduler, such as WarmupCosineLR"
    if "gradient_clipping" not in content:
        yield (
            "gradient_clipping: missing; DeepSpeed's default is 1.0 in bf16 and none in fp32, so set it (0.0 for none, as in"
            " the published runs)"
        )
    for section, package in (("wandb", "wandb"), ("comet", "comet_ml")):
        if find_field(content, f"{section}.enabled") and importlib.util.find_spec(package) is None:
            yield f"{section}.enabled: {package} is not installed; run `pip install {package}` or set it to false"
    for section, kinds in PARAMS.items():
        kind = find_field(content, f"{section}.type")
        if kind is not None and find_params(section, kind) is None:
            yield f"{section}.type: no supported {section} {kind!r}{did_you_mean(kind, kinds)}"


def _check_together(clap: ClapSettings, precision: str) -> list[str]:
    """Return problems that involve several fields."""
    preset = clap.preset()
    train = clap.train
    tokens = clap.context_length
    longest = preset.text.max_tokens
    lengths = getattr(clap.data, "caption_lengths", None) or tokens
    numbers = lengths if isinstance(lengths, dict) else [str(lengths)]
    wrong = [
        number for number in numbers if not (number.isdecimal() and 2 <= int(number) <= tokens)
    ]
    problems = {
        f"context_length: expected at most {longest}, the limit of {preset.name}, found {tokens}": tokens
        > longest,
        f"data.caption_lengths: expected lengths from 2 to context_length = {tokens}, found {wrong}": bool(
            wrong
        ),
        "data.num_workers: expected 0 with placement device": getattr(clap.data, "placement", "")
        == "device"
        and clap.data.num_workers > 0,
        "train.freeze: expected at most one tower; without both only the logit scale is trained": len(
            {*train.freeze}
        )
        > 1,
        "train: set max_samples or epochs, not both": bool(train.max_samples and train.epochs),
        f"text_packing: {preset.name} takes padded captions": bool(
            preset.open_clip and clap.text_packing
        ),
        f"model.preset: {preset.name} trains in fp32 or with torch_autocast, not in {precision}": bool(
            preset.open_clip
        )
        and precision in ("bf16", "fp16"),
    }
    problems |= {
        f"train.lr_scale: {tower} is in clap.train.freeze": tower in train.freeze
        for tower in train.lr_scale
    }
    return [f"clap.{problem}" for problem, is_there in problems.items() if is_there]
