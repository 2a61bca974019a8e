"""A run's JSON: a DeepSpeed configuration with a `clap` section, typed and checked before any rank starts work. No torch."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, create_model

from clap_ds.config import schema
from clap_ds.config.batch_sizes import BatchSizes
from clap_ds.config.check import DEEPSPEED_FIELDS, engine_problems, explain
from clap_ds.config.errors import UserError
from clap_ds.config.files import read_object
from clap_ds.config.model import ClapConfig, load_preset
from clap_ds.config.paths import find_config
from clap_ds.config.schema import NonNegativeInt, PositiveFloat, Section, SyntheticData


class ClapSettings(Section):
    """What DeepSpeed has no word for."""

    model: schema.ModelSettings = schema.ModelSettings()
    context_length: Annotated[int, Field(ge=2)] = 77
    """Caption length, start and end token and padding included."""
    text_packing: bool = False
    """Whether captions go through the text tower packed without padding, or padded to `context_length`, as in the published
    runs. Packed on CUDA in 16 bits, there is no dropout of attention weights."""
    compile: Literal["auto", "off", "towers", "towers-max-autotune"] = "auto"
    """What torch.compile is given: nothing, or the mel front end and each tower with its backward pass (max-autotune:
    Inductor's mode `max-autotune-no-cudagraphs`). `auto`: `towers` on CUDA, or `off`."""
    cpu_kernels: Literal["auto", "off"] = "auto"
    """This project's kernels for bf16 on CPUs, in both towers, the mel filters and AdamW; `auto`: where the processor has
    AMX or AVX-512, `off`: torch's operations."""
    optimizer_implementation: Literal["torch", "deepspeed"] = "torch"
    """Whose kernel steps AdamW: torch's, or DeepSpeed's own, which is compiled at first use."""
    data: schema.DataSettings = SyntheticData(source="synthetic")
    loss: schema.LossSettings = schema.LossSettings()
    gradient_sync: Literal["overlap", "deepspeed"] = "overlap"
    """Who averages gradients over ranks: torch's reducer under the backward pass, or DeepSpeed after it."""
    bucket_cap_mb: PositiveFloat = 12.0
    """Most gradient bytes sent at a time when overlapped, in MB; torch's default is 25."""
    bench: schema.BenchSettings = schema.BenchSettings()
    train: schema.TrainSettings = schema.TrainSettings()
    checkpoint: schema.CheckpointSettings = schema.CheckpointSettings()
    evaluation: schema.EvaluationSettings = schema.EvaluationSettings()
    hardware: schema.HardwareSettings = schema.HardwareSettings()
    output: schema.OutputSettings = schema.OutputSettings()
    debug: schema.DebugSettings = schema.DebugSettings()
    seed: NonNegativeInt = 0
    """Of weights, dropout, augmentation and the order of the data."""
    max_logit_scale: PositiveFloat = 100.0
    """Upper bound of the learned logit scale, as in LAION's training code."""

    def preset(self) -> ClapConfig:
        """Sizes of the model."""
        preset = self.model.preset
        return load_preset(preset) if isinstance(preset, str) else preset


RunFile = create_model("RunFile", __base__=Section, **DEEPSPEED_FIELDS, clap=(ClapSettings, ClapSettings()))
"""The whole JSON."""


@dataclass
class RunSettings:
    """One run, by its JSON file: the `clap` section, typed, and all else as `deepspeed.initialize(config=…)` takes it."""

    path: Path
    clap: ClapSettings
    deepspeed: dict[str, Any]

    @property
    def run_name(self) -> str:
        return self.clap.output.run_name or self.path.stem

    @property
    def checkpoint_folder(self) -> Path:
        """`clap.checkpoint.folder`, or one in `clap.output.dir` by name and a hash of what is trained on what."""
        clap = self.clap
        if clap.checkpoint.folder is not None:
            return Path(os.path.abspath(clap.checkpoint.folder))
        data = clap.data.model_dump(mode="json", include={"source", "shards"})
        train = clap.train.model_dump(mode="json", include={"pretrained", "freeze"})
        model = clap.model.model_dump(mode="json", include={"preset"})["preset"]
        identity = [model, clap.model.pretrained_text, data, train, clap.loss.kind, clap.seed]
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
        """`bf16`, `fp16`, `torch_autocast_bfloat16` (fp32 parameters) or `fp32`, as DeepSpeed's sections say."""
        autocast = self.deepspeed.get("torch_autocast", {})
        if autocast.get("enabled"):
            return "torch_autocast_" + str(autocast.get("dtype", "bfloat16")).removeprefix("torch.")
        for name in ("bf16", "fp16"):
            if self.deepspeed.get(name, {}).get("enabled"):
                return name
        return "fp32"

    def without(self, *sections: str) -> RunSettings:
        """The same run with some of DeepSpeed's sections left out."""
        return replace(self, deepspeed={name: value for name, value in self.deepspeed.items() if name not in sections})

    def resolved(self) -> dict[str, Any]:
        """The JSON with every default of `clap` filled in."""
        return {**self.deepspeed, "clap": self.clap.model_dump(mode="json")}


def load_run(path: str | Path, world_size: int | None = None) -> RunSettings:
    """Read and check a run's JSON, by its path or by the name of a packaged one, and work out batch sizes for `world_size`
    ranks. UserError where it is missing or isn't JSON, and for each field that is unknown or of an impossible value."""
    path = find_config(Path(path))
    content = read_object(path)
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
    problems = problems or engine_problems(content) + _check_together(clap)
    if problems:
        raise UserError("\n".join(f"{path}: {problem}" for problem in problems))
    return RunSettings(path, clap, sizes.fill(content) if world_size else content)


def _check_together(clap: ClapSettings) -> list[str]:
    """Problems that only show when several fields are seen together."""
    preset, train, tokens = clap.preset(), clap.train, clap.context_length
    longest = preset.text.max_tokens
    lengths = clap.data.caption_lengths if isinstance(clap.data, SyntheticData) else None
    numbers = [*lengths] if isinstance(lengths, dict) else [] if lengths is None else [str(lengths)]
    wrong = [number for number in numbers if not (number.isdecimal() and 2 <= int(number) <= tokens)]
    problems = {
        f"context_length: {preset.name} has positions for {longest}, found {tokens}": tokens > longest,
        f"data.caption_lengths: expected lengths from 2 to context_length = {tokens}, found {wrong}": bool(wrong),
        "train: give max_samples or epochs, not both": bool(train.max_samples and train.epochs),
    }
    for field in ("lr_scale", "layer_decay"):
        problems |= {f"train.{field}: {t} is in clap.train.freeze": t in train.freeze for t in getattr(train, field)}
    return [f"clap.{problem}" for problem, is_there in problems.items() if is_there]
