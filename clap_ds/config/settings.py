"""Load and validate a run's JSON: a DeepSpeed configuration with a `clap` section. Imports no torch."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError, create_model

from clap_ds.config import schema
from clap_ds.config.batch_sizes import NAMES, BatchSizes
from clap_ds.config.errors import UserError, did_you_mean, explain
from clap_ds.config.files import read_object
from clap_ds.config.model import ClapConfig, Section
from clap_ds.config.overrides import locate, with_assignments
from clap_ds.config.paths import find_config
from clap_ds.config.schema import NonNegativeInt, PositiveInt, SyntheticData

_SECTIONS = """activation_checkpointing bf16 checkpoint comet comms_logger compile csv_monitor data_types flops_profiler fp16
optimizer scheduler tensorboard timers torch_autocast wandb zero_optimization"""
_VALUES = """communication_data_type dataloader_drop_last disable_allgather disable_python_gc dump_state gradient_allreduce_op
gradient_clipping gradient_predivide_factor log_level memory_breakdown prescale_gradients seq_parallel_communication_data_type
wall_clock_breakdown zero_allow_untested_optimizer zero_force_ds_cpu_optimizer"""
_ADAM = """adam_w_mode adamw_mode amsgrad betas bias_correction capturable decoupled_weight_decay differentiable eps foreach
fp32_optimizer_states fused lr max_grad_norm maximize set_grad_none torch_adam weight_decay"""
DEEPSPEED_FIELDS: dict[str, Any] = {
    **dict.fromkeys(_SECTIONS.split(), (dict[str, Any], {})),
    **dict.fromkeys((*_VALUES.split(), *NAMES), (Any, None)),
    "steps_per_print": (PositiveInt | None, None),
}
"""Type and default of the top-level DeepSpeed fields that data-parallel CLAP training uses. DeepSpeed silently ignores unknown
names, so a typo would change the run."""
_LAST = "last_batch_iteration"
_WARMUP = f"warmup_num_steps warmup_type {_LAST}"
SCHEDULES = {name: fields.split() for name, fields in {
    "LRRangeTest": f"lr_range_test_min_lr lr_range_test_step_size lr_range_test_step_rate lr_range_test_staircase {_LAST}",
    "OneCycle": f"""cycle_min_lr cycle_max_lr decay_lr_rate cycle_first_step_size cycle_second_step_size cycle_first_stair_count
        cycle_second_stair_count decay_step_size cycle_momentum cycle_min_mom cycle_max_mom decay_mom_rate {_LAST}""",
    "WarmupLR": f"warmup_min_lr warmup_max_lr {_WARMUP}",
    "WarmupDecayLR": f"total_num_steps warmup_min_lr warmup_max_lr {_WARMUP}",
    "WarmupCosineLR": f"total_num_steps warmup_min_ratio cos_min_ratio {_WARMUP}",
    "WarmupStableDecayLR": "total_num_steps decay_num_steps warmup_num_steps min_ratio decay_power",
}.items()}  # fmt: skip
"""Fields of `scheduler.params` by `scheduler.type`. DeepSpeed also takes torch's schedulers."""
_TORCH = """ConstantLR CosineAnnealingLR CosineAnnealingWarmRestarts CyclicLR ExponentialLR LinearLR MultiStepLR OneCycleLR
PolynomialLR ReduceLROnPlateau StepLR"""
TORCH_SCHEDULES = _TORCH.split()
WARMUP_TYPES = ("linear", "log")  # DeepSpeed takes others for log
ADAM_PARAMS = _ADAM.split()
"""Fields of `optimizer.params` for Adam and AdamW: what DeepSpeed reads, and the arguments of its and torch's classes."""


class ClapSettings(schema.EngineSettings):
    """Settings that DeepSpeed doesn't have."""

    model: schema.ModelSettings = schema.ModelSettings()
    context_length: Annotated[int, Field(ge=2)] = 77
    """Caption length in tokens, including start token, end token and padding."""
    text_packing: bool = False
    """Pack captions without padding in the text tower. Packing on CUDA in 16 bits disables attention dropout."""
    data: schema.DataSettings = SyntheticData(source="synthetic")
    loss: schema.LossSettings = schema.LossSettings()
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


RunFile = create_model("RunFile", __base__=Section, **DEEPSPEED_FIELDS, clap=(ClapSettings, ClapSettings()))
"""The whole JSON."""


@dataclass
class RunSettings:
    """A run's typed `clap` section, and everything else as `deepspeed.initialize(config=…)` takes it."""

    path: Path
    clap: ClapSettings
    deepspeed: dict[str, Any]
    assignments: tuple[str, ...] = ()
    """`NAME=VALUE` of `--set`, with which the file's fields were changed."""

    @property
    def run_name(self) -> str:
        return self.clap.output.run_name or self.path.stem

    @property
    def checkpoint_folder(self) -> Path:
        """`clap.checkpoint.folder`, or a folder in `clap.output.dir` named by name and a hash of the training setup."""
        clap = self.clap
        if clap.checkpoint.folder is not None:
            return Path(os.path.abspath(clap.checkpoint.folder))
        data = clap.data.model_dump(mode="json", include={"source", "shards"})
        train = clap.train.model_dump(mode="json", include={"pretrained", "freeze"})
        model = clap.model.model_dump(mode="json")
        identity = [model["preset"], model["pretrained_text"], data, train, clap.loss.kind, clap.seed]
        digest = hashlib.blake2b(json.dumps(identity, sort_keys=True).encode(), digest_size=4).hexdigest()
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
        """`bf16`, `fp16`, `torch_autocast_bfloat16` (fp32 parameters) or `fp32`, from DeepSpeed's sections."""
        return precision_of(self.deepspeed)

    def resolved(self) -> dict[str, Any]:
        """Return the JSON with all defaults of `clap` filled in."""
        return {**self.deepspeed, "clap": self.clap.model_dump(mode="json")}


def precision_of(deepspeed: Mapping[str, Any]) -> str:
    """Return the precision that DeepSpeed's sections set."""
    autocast = deepspeed.get("torch_autocast", {})
    if autocast.get("enabled"):
        return "torch_autocast_" + str(autocast.get("dtype", "bfloat16")).removeprefix("torch.")
    return next((name for name in ("bf16", "fp16") if deepspeed.get(name, {}).get("enabled")), "fp32")


def load_run(path: str | Path, world_size: int | None = None, assignments: Sequence[str] = ()) -> RunSettings:
    """Read and validate a run's JSON, by path or packaged name, and compute batch sizes for `world_size` ranks.
    Raises UserError if it is missing or not JSON, with one line per unknown or invalid field.

    Args:
        assignments: `NAME=VALUE` of fields to change, from `--set`.
    """
    path = find_config(Path(path))
    content = with_assignments(read_object(path), assignments)
    clap, problems = ClapSettings(), list[str]()
    try:
        checked: Any = RunFile.model_validate(content)
        clap = checked.clap
    except ValidationError as error:
        problems += [explain(details, RunFile) for details in error.errors()]
    content.pop("clap", None)
    try:
        sizes = BatchSizes.of(content, world_size)
    except ValueError as error:
        problems += str(error).splitlines()
    problems = problems or _check_deepspeed(content) + _check_together(clap, precision_of(content))
    if problems:
        raise UserError("\n".join(locate(problem, path, assignments) for problem in problems))
    return RunSettings(path, clap, sizes.fill(content) if world_size else content, tuple(assignments))


def _check_deepspeed(content: dict[str, Any]) -> list[str]:
    """Return problems in DeepSpeed's sections: unsupported values, Adam's unknown options, missing required values, and
    monitors' missing packages."""
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
    for name, package in (("wandb", "wandb"), ("comet", "comet_ml")):
        lacks = content.get(name, {}).get("enabled") and importlib.util.find_spec(package) is None
        problems[f"{name}.enabled: {package} is not installed; run `pip install {package}` or set it to false"] = lacks
    return [*_check_params(content), *(problem for problem, is_there in problems.items() if is_there)]


def _check_params(content: dict[str, Any]) -> Iterator[str]:
    """Yield unknown names and values in `optimizer` and `scheduler`, which DeepSpeed finds late or not at all."""
    params = {"adam": ADAM_PARAMS, "adamw": ADAM_PARAMS, **SCHEDULES}
    for section in ("optimizer", "scheduler"):
        found = content.get(section) or {}
        kind, given = str(found.get("type", "")), found.get("params") or {}
        if section == "scheduler" and found and kind not in (*SCHEDULES, *TORCH_SCHEDULES):
            yield f"scheduler.type: no scheduler {kind!r}{did_you_mean(kind, SCHEDULES)}"
        if not isinstance(given, Mapping):
            yield f"{section}.params: expected an object, found {json.dumps(given)}"
            continue
        known = params.get(kind.lower() if section == "optimizer" else kind, given)
        for name in given:
            if name not in known:
                yield f"{section}.params.{name}: no such field{did_you_mean(name, known, len(known))}"
        if (warmup := given.get("warmup_type", "log")) not in WARMUP_TYPES:
            yield f"{section}.params.warmup_type: expected linear or log, found {json.dumps(warmup)}"


def _check_together(clap: ClapSettings, precision: str) -> list[str]:
    """Return problems that involve several fields."""
    preset, train, tokens = clap.preset(), clap.train, clap.context_length
    longest = preset.text.max_tokens
    lengths = clap.data.caption_lengths if isinstance(clap.data, SyntheticData) else None
    numbers = [*lengths] if isinstance(lengths, dict) else [] if lengths is None else [str(lengths)]
    wrong = [number for number in numbers if not (number.isdecimal() and 2 <= int(number) <= tokens)]
    problems = {
        f"context_length: expected at most {longest}, the limit of {preset.name}, found {tokens}": tokens > longest,
        f"data.caption_lengths: expected lengths from 2 to context_length = {tokens}, found {wrong}": bool(wrong),
        "data.num_workers: expected 0 with placement device": getattr(clap.data, "placement", "") == "device"
        and clap.data.num_workers > 0,
        "train: set max_samples or epochs, not both": bool(train.max_samples and train.epochs),
        f"text_packing: {preset.name} takes padded captions": bool(preset.open_clip and clap.text_packing),
        f"model.preset: {preset.name} trains in fp32 or with torch_autocast, not in {precision}": bool(preset.open_clip)
        and precision in ("bf16", "fp16"),
    }
    problems |= {f"train.lr_scale: {tower} is in clap.train.freeze": tower in train.freeze for tower in train.lr_scale}
    return [f"clap.{problem}" for problem, is_there in problems.items() if is_there]
