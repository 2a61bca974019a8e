"""Load and validate a run's JSON: a DeepSpeed configuration with a `clap` section.

Login nodes run this module, so it imports no torch.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError, create_model

from clap_ds.config import schema
from clap_ds.config.arguments import find_config, find_field, locate, with_assignments
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
from clap_ds.config.urls import find_url_problems
from clap_ds.utils.errors import UserError, did_you_mean, explain
from clap_ds.utils.files import flatten, read_object

# fields of which DeepSpeed takes one value at stage 0
WITHOUT_ZERO: dict[str, Any] = {
    "zero_optimization.stage": 0,
    "zero_optimization.compute_grad_norm": True,
    "zero_optimization.offload_optimizer.device": "none",
    "data_types.grad_accum_dtype": None,
    "bf16.bf16_master_weights_and_grads": False,
    "bf16.bf16_optimizer_states": False,
    "fp16.fp16_master_weights_and_grads": False,
}


def _to_loss(value: Any) -> Any:
    """Take a text for the kind of loss, so that the message about it lists the kinds."""
    return {"kind": value} if isinstance(value, str) else value


class ClapSettings(schema.EngineSettings):
    """Settings that DeepSpeed doesn't have."""

    model: schema.ModelSettings = schema.ModelSettings()
    context_length: Annotated[int, Field(ge=2)] = 77
    """Caption length in tokens, including start token, end token and padding."""
    text_packing: bool | Literal["auto"] = "auto"
    """Pack captions without padding in the text tower. `auto`: captions of shards, unless
    open_clip's model takes padded ones."""
    data: schema.DataSettings = SyntheticData(source="synthetic")
    loss: Annotated[schema.LossSettings, BeforeValidator(_to_loss)] = schema.LossSettings()
    bench: schema.BenchSettings = schema.BenchSettings()
    train: schema.TrainSettings = schema.TrainSettings()
    checkpoint: schema.CheckpointSettings = schema.CheckpointSettings()
    evaluation: schema.EvaluationSettings = schema.EvaluationSettings()
    profile: schema.ProfileSettings | None = None
    hardware: schema.HardwareSettings = schema.HardwareSettings()
    output: schema.OutputSettings = schema.OutputSettings()
    debug: schema.DebugSettings = schema.DebugSettings()
    seed: NonNegativeInt = 0
    """Random seed of weights, dropout, augmentation and data order."""

    @property
    def packs_captions(self) -> bool:
        """`text_packing`, with `auto` resolved. The published workload's synthetic captions stay
        padded."""
        if self.text_packing != "auto":
            return self.text_packing
        return isinstance(self.data, schema.ShardData) and not self.preset().open_clip

    def preset(self) -> ClapConfig:
        """Return the model's sizes."""
        return self.model.sizes


@functools.cache
def make_run_model(optimizer: str | None, scheduler: str | None) -> type[Section]:
    """Return a model of the whole JSON, for these types of optimizer and scheduler."""
    base = make_deepspeed_model(optimizer, scheduler)
    # `BatchSizes` checks these.
    batch_sizes: Any = dict.fromkeys(NAMES, (Any, None))
    return create_model(
        "RunFile", __base__=base, clap=(ClapSettings, ClapSettings()), **batch_sizes
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
        """`clap.checkpoint.folder`, or a folder in `clap.output.dir`.

        The folder is named after the run and a hash of its training setup. If the data has moved,
        training uses the folder that the run already has.
        """
        clap = self.clap
        if clap.checkpoint.folder is not None:
            return Path(os.path.abspath(clap.checkpoint.folder))
        setup_fields: Any = {
            "model": {"preset", "pretrained_text"},
            "data": {"source", "shards"},
            "train": {"pretrained", "freeze"},
        }
        # Defaults of fields that earlier versions lacked would rename existing folders.
        added_fields = {"pad_token_id"}
        if not clap.preset().text.caption_prefix:
            added_fields.add("caption_prefix")
        excluded: Any = {"model": {"preset": {"text": added_fields}}}
        setup = clap.model_dump(mode="json", include=setup_fields, exclude=excluded)
        # The order of this list is part of the names of existing folders.
        models = setup["model"].values()
        identity = [*models, setup["data"], setup["train"], clap.loss.kind, clap.seed]
        content = json.dumps(identity, sort_keys=True).encode()
        digest = hashlib.blake2b(content, digest_size=4).hexdigest()
        return Path(os.path.abspath(clap.output.dir), f"{self.run_name}-{digest}-checkpoints")

    @property
    def micro_batch(self) -> int:
        return self.batch_sizes().micro_batch

    @property
    def gradient_accumulation_steps(self) -> int:
        return self.batch_sizes().gradient_accumulation_steps

    def batch_sizes(self, world_size: int | None = None) -> BatchSizes:
        return BatchSizes.from_config(self.deepspeed, world_size)

    @property
    def precision(self) -> str:
        """`bf16`, `fp16`, `torch_autocast_bfloat16` (fp32 parameters) or `fp32`, from DeepSpeed's
        sections."""
        return find_precision(self.deepspeed)

    def resolved(self) -> dict[str, Any]:
        """Return the JSON with all defaults of `clap` filled in."""
        return {**self.deepspeed, "clap": self.clap.model_dump(mode="json")}


def find_precision(deepspeed: Mapping[str, Any]) -> str:
    """Return the precision that DeepSpeed's sections set."""
    if find_field(deepspeed, "torch_autocast.enabled"):
        return "torch_autocast_bfloat16"
    for precision in ("bf16", "fp16"):
        if find_field(deepspeed, f"{precision}.enabled"):
            return precision
    return "fp32"


def load_run(
    path: str | Path, world_size: int | None = None, assignments: Sequence[str] = ()
) -> RunSettings:
    """Read and validate a run's JSON, by path or packaged name.

    Batch sizes are those for `world_size` ranks. Raises UserError if the file is missing or not
    JSON, and with one line per unknown or invalid field.

    Args:
        assignments: `NAME=VALUE` of fields to change, from `--set`.
    """
    path = find_config(Path(path))
    content = with_assignments(read_object(path, allow_nan=True), assignments)
    problems = [
        f"{name}: expected at most {MOST:,}, found {value}"
        for name, value in flatten(content).items()
        if isinstance(value, int) and abs(value) > MOST
    ]
    model = make_run_model(find_kind(content.get("optimizer")), find_kind(content.get("scheduler")))
    clap = ClapSettings()
    try:
        checked: Any = model.model_validate(content)
        clap = checked.clap
    except ValidationError as error:
        problems += [_explain_field(details, model) for details in error.errors()]
    deepspeed = {name: value for name, value in content.items() if name != "clap"}
    try:
        sizes = BatchSizes.from_config(deepspeed, world_size)
    except ValueError as error:
        problems += str(error).splitlines()
    # Rules between fields are checked only if each field is valid.
    if not problems:
        problems += _check_deepspeed(deepspeed)
        problems += _check_together(clap, find_precision(deepspeed), world_size)
    if problems:
        raise UserError("\n".join(locate(problem, path, assignments) for problem in problems))
    if world_size:
        deepspeed = sizes.fill(deepspeed)
    return RunSettings(path, clap, deepspeed, tuple(assignments))


def _explain_field(details: Any, model: type[Section]) -> str:
    field = ".".join(map(str, details["loc"]))
    if field in REFUSED and details["type"] == "extra_forbidden":
        return f"{field}: not supported: {REFUSED[field]}"
    return explain(details, model)


def _check_deepspeed(config: dict[str, Any]) -> Iterator[str]:
    """Yield problems in DeepSpeed's sections that types don't exclude."""
    yield from _check_zero(config)
    yield from _check_precision(config)
    if find_field(config, "optimizer.type") is None:
        yield "optimizer.type: missing; expected a DeepSpeed optimizer, such as AdamW"
    has_params = find_field(config, "scheduler.params") is not None
    if has_params and find_field(config, "scheduler.type") is None:
        yield "scheduler.type: missing; expected a scheduler, such as WarmupCosineLR"
    for section, kinds in PARAMS.items():
        kind = find_field(config, f"{section}.type")
        if kind is not None and find_params(section, kind) is None:
            yield f"{section}.type: no supported {section} {kind!r}{did_you_mean(kind, kinds)}"
    if "gradient_clipping" not in config:
        default = "DeepSpeed's default is 1.0 in bf16 and none in fp32"
        advice = "set it (0.0 for none, as in the published runs)"
        yield f"gradient_clipping: missing; {default}, so {advice}"
    for section, package in (("wandb", "wandb"), ("comet", "comet_ml")):
        if find_field(config, f"{section}.enabled") and importlib.util.find_spec(package) is None:
            advice = f"run `pip install {package}` or set it to false"
            yield f"{section}.enabled: {package} is not installed; {advice}"


def _check_zero(config: dict[str, Any]) -> Iterator[str]:
    for name, only_value in WITHOUT_ZERO.items():
        value = find_field(config, name)
        if value not in (None, only_value):
            expected = f"{json.dumps(only_value)} (plain data parallel)"
            yield f"{name}: expected {expected}, found {json.dumps(value)}, which needs ZeRO"
    section = config.get("zero_optimization", {})
    for name, field in FIELDS["zero_optimization"]["properties"].items():
        alias = field.get("alias")
        if name in section and alias in section:
            yield f"zero_optimization.{name}: expected only one of it and {alias}, its other name"


def _check_precision(config: dict[str, Any]) -> Iterator[str]:
    sections = ("bf16", "fp16", "torch_autocast")
    enabled = [section for section in sections if find_field(config, f"{section}.enabled")]
    for section in enabled[1:]:
        yield f"{section}.enabled: expected false, as {enabled[0]}.enabled is true"
    dtype = find_field(config, "torch_autocast.dtype") or "bfloat16"
    if "torch_autocast" in enabled and dtype.removeprefix("torch.") != "bfloat16":
        expected = f'torch_autocast.dtype: expected "bfloat16", found {json.dumps(dtype)}'
        reason = "float16 needs a loss scale, which DeepSpeed doesn't checkpoint here"
        yield f"{expected} ({reason}; use fp16.enabled)"


def _check_together(
    clap: ClapSettings, precision: str, world_size: int | None = None
) -> Iterator[str]:
    """Yield problems that involve several fields of `clap`."""
    preset = clap.preset()
    train = clap.train
    length = clap.context_length
    longest = preset.text.max_tokens
    if length > longest:
        limit = f"{longest}, the limit of {preset.name}"
        yield f"clap.context_length: expected at most {limit}, found {length}"
    if isinstance(clap.data, SyntheticData):
        yield from _check_synthetic(clap.data, length)
    yield from find_url_problems(clap.model_dump())
    if len({*train.freeze}) > 1:
        reason = "without both only the logit scale is trained"
        yield f"clap.train.freeze: expected at most one tower; {reason}"
    for tower in train.lr_scale:
        if tower in train.freeze:
            yield f"clap.train.lr_scale: {tower} is in clap.train.freeze"
    if train.max_samples and train.epochs:
        yield "clap.train: set max_samples or epochs, not both"
    if clap.profile and world_size and max(clap.profile.ranks) >= world_size:
        expected = f"ranks below {world_size}, the number of ranks"
        yield f"clap.profile.ranks: expected {expected}, found {clap.profile.ranks}"
    if preset.open_clip and clap.packs_captions:
        yield f"clap.text_packing: {preset.name} takes padded captions"
    if preset.open_clip and precision in ("bf16", "fp16"):
        precisions = f"fp32 or with torch_autocast, not in {precision}"
        yield f"clap.model.preset: {preset.name} trains in {precisions}"


def _check_synthetic(data: SyntheticData, context_length: int) -> Iterator[str]:
    lengths = data.caption_lengths
    if isinstance(lengths, int):
        lengths = {str(lengths): 1.0}
    invalid = [
        length
        for length in lengths or ()
        # The tokens that start and end a caption count.
        if not (length.isdecimal() and 2 <= int(length) <= context_length)
    ]
    if invalid:
        expected = f"lengths from 2 to context_length = {context_length}"
        yield f"clap.data.caption_lengths: expected {expected}, found {invalid}"
    if data.placement == "device" and data.num_workers > 0:
        yield "clap.data.num_workers: expected 0 with placement device"
