"""Build a model, and DeepSpeed's engine around it with CLAP's optimizer groups.

A schedule of the learning rate that neither DeepSpeed nor torch has.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterator
from functools import partial
from typing import Any

import deepspeed
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from clap_ds.config.schema import (
    EngineSettings,
    LossSettings,
    ModelSettings,
    ShardData,
    SyntheticData,
    Tower,
    TrainSettings,
)
from clap_ds.distributed.collectives import run_on_rank0
from clap_ds.distributed.init import Ranks
from clap_ds.distributed.watchdog import activity
from clap_ds.engine.loss import LOSSES
from clap_ds.engine.optimizer import OPTIONS, FlatAdamW, scale_rates
from clap_ds.metrics.throughput import StepToStepTimer
from clap_ds.model.clap import ClapModel, new_model
from clap_ds.model.contrastive import ContrastiveModel
from clap_ds.model.kernels import select_kernels
from clap_ds.weights.hub import pretrained_text

ADAMS = ("adam", "adamw")
TOWERS: tuple[Tower, ...] = ("audio", "text")
_KINDS = ("decay", "no_decay", "fp32", "logit_scale")  # optimizer groups in order
ALIGNED = 8
"""A 16-bit parameter with a multiple of so many elements ends at a multiple of 16 bytes."""


@activity("asking the hub")
def fetch_from_hub(model: ModelSettings, data: SyntheticData | ShardData, ranks: Ranks) -> None:
    """Fetch tokenizer and text tower weights to every host: first with rank 0, then with one rank
    of each other host. A collective; raises ValueError if they aren't available or don't fit the
    model."""

    def load() -> None:
        text = model.sizes.text
        if isinstance(data, ShardData):
            from clap_ds.weights.hub import load_tokenizer

            load_tokenizer(
                data.tokenizer, vocab_size=text.vocab_size, pad_token_id=text.pad_token_id
            )
        if model.pretrained_text and not model.sizes.open_clip:
            pretrained_text(text)

    run_on_rank0(load)
    if ranks.local_rank == 0 and not ranks.is_main_process:
        load()


def build_model(
    settings: ModelSettings,
    loss: LossSettings,
    device: torch.device,
    frozen: Collection[Tower] = (),
) -> ContrastiveModel:
    """Build a new model for a device, with `frozen` towers. Raises ValueError if the device can't
    run it."""
    theirs = {"pretrained_text": settings.pretrained_text} if settings.sizes.open_clip else {}
    model = new_model(
        settings.sizes,
        **theirs,
        **settings.model_dump(include={"drop_path", "text_dropout", "spec_augment"}),
        learns_bias=LOSSES[loss.kind].needs_bias,
        **select_kernels(settings, device)._asdict(),
        activation_checkpointing=tuple(settings.activation_checkpointing),
    )
    if settings.pretrained_text and isinstance(model, ClapModel):
        model.text.roberta.load_state_dict(pretrained_text(model.config.text).state_dict())
    freeze(model, frozen)
    return model


def freeze(model: ContrastiveModel, towers: Collection[str]) -> None:
    """Stop training towers and their projections. As in LAION's code they stay in training mode,
    with dropout, SpecAugment and batch statistics. A frozen audio tower keeps its running
    statistics."""
    for tower in towers:
        model.get_submodule(tower).requires_grad_(False)
        model.get_submodule(f"{tower}_projection").requires_grad_(False)
    if "audio" in towers:
        for norm in model.batch_norms():
            norm.momentum = 0.0


def trained_towers(model: ContrastiveModel) -> list[str]:
    return [
        each
        for each in TOWERS
        if any(p.requires_grad for p in model.get_submodule(each).parameters())
    ]


def wrap(
    model: ContrastiveModel, config: dict[str, Any], settings: EngineSettings, train: TrainSettings
) -> deepspeed.DeepSpeedEngine:
    """Build DeepSpeed's engine around a model on its device. A collective; raises ValueError if
    DeepSpeed rejects a section."""
    # Synchronizing twice a step would wait for the copy of the next batch: 8% of a step on an H200.
    # See `StepToStepTimer`.
    config = {"timers": {"throughput": {"synchronized": False}}, **config}
    optimizer = None
    if "tensorboard" in config:
        config["tensorboard"] = {**config["tensorboard"], "enabled": False}  # `Scalars` writes it
    if takes_flat_adamw(config, settings):
        section = config["optimizer"]
        config["optimizer"] = {**section, "legacy_fusion": True}
        optimizer = partial(
            FlatAdamW, cpu_kernels=settings.cpu_kernels == "auto", **section.get("params", {})
        )
    schedule = None
    of_schedule = config.get("scheduler", {})
    if of_schedule.get("type") == WarmupStableDecayLR.__name__:
        schedule = partial(WarmupStableDecayLR, **of_schedule.get("params", {}))
    try:
        with activity("building DeepSpeed's engine"):  # may compile its optimizer
            parts: Any = {
                "model_parameters": parameter_groups(model, train),
                "optimizer": optimizer,
            }
            engine, *_ = deepspeed.initialize(
                model=model, lr_scheduler=schedule, config=config, **parts
            )
    except Exception as error:  # of many types
        if isinstance(error, RuntimeError) and not isinstance(error, NotImplementedError):
            raise  # out of memory, or a lost rank
        raise ValueError(
            f"DeepSpeed rejects the configuration: {type(error).__name__}: {error}"
        ) from error
    if (inner := getattr(engine.optimizer, "optimizer", None)) is not None:
        # DeepSpeed's 16-bit optimizers step with zero gradients on construction. Undo the weight
        # decay and the step count.
        inner.state.clear()
        engine.optimizer.refresh_fp32_params()
    scale_rates(inner or engine.optimizer)
    engine.tput_timer = StepToStepTimer(engine.tput_timer)
    return engine


def takes_flat_adamw(config: dict[str, Any], settings: EngineSettings) -> bool:
    """Return whether `FlatAdamW` steps a run: other options make DeepSpeed build its own."""
    section = config.get("optimizer", {})
    is_adam = (
        section.get("type", "").lower() in ADAMS and section.get("params", {}).keys() <= OPTIONS
    )
    return is_adam and settings.optimizer_implementation == "torch"


def parameter_groups(model: ContrastiveModel, train: TrainSettings) -> Iterator[dict[str, Any]]:
    """Yield optimizer groups for `deepspeed.initialize`: weights, vectors without decay, fp32
    vectors, the logit scale.

    DeepSpeed's bf16 mode casts every parameter and then evaluates this iterator, which first
    restores the fp32 values of `model.fp32_parameters()`, so that no group mixes dtypes. As in
    LAION's code, biases, norms, position-bias tables and the logit scale have no weight decay. A
    tower's `lr_scale` is in its groups.

    Within a group, odd sizes come last: DeepSpeed's flat buffer has no gaps, and for a bias that
    doesn't start at a multiple of 16 bytes cuBLAS takes a kernel that needs twice the time.
    Checkpoints keep the model's order (`engine/state.py`).
    """
    kept = {parameter: parameter.detach().clone() for parameter in model.fp32_parameters()}
    scale_of: dict[Any, float] = {**train.lr_scale}

    def group_of(name: str, parameter: nn.Parameter) -> str:
        if parameter is model.logit_scale:
            return "logit_scale"
        if parameter in kept:
            return "fp32"
        return "no_decay" if parameter.ndim < 2 or "relative_position_bias" in name else "decay"

    def groups() -> Iterator[dict[str, Any]]:
        for parameter, value in kept.items():
            parameter.data = value
        named: dict[tuple[str, float], list[nn.Parameter]] = defaultdict(list)
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                named[group_of(name, parameter), scale_of.get(name.split(".")[0], 1.0)].append(
                    parameter
                )
        for kind, scale in sorted(named, key=lambda group: (_KINDS.index(group[0]), -group[1])):
            options = ({} if kind == "decay" else {"weight_decay": 0.0}) | (
                {} if scale == 1 else {"lr_scale": scale}
            )
            parameters = sorted(
                named[kind, scale], key=lambda parameter: parameter.numel() % ALIGNED != 0
            )
            yield {"name": kind, "params": parameters, **options}

    return groups()


class WarmupStableDecayLR(LambdaLR):
    """Warm up over `warmup_num_steps`, hold the rate, and lower it over the last `decay_num_steps`
    of `total_num_steps` to the share `min_ratio`, linearly or by the power `decay_power` (WSD,
    arXiv 2404.06395; open_clip's `const-cooldown`). With `cosine`, and a decay of all steps after
    the warm-up, it is open_clip's `cosine`."""

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int,
        decay_num_steps: int,
        warmup_num_steps: int = 0,
        min_ratio: float = 0.0,
        decay_power: float = 1.0,
        cosine: bool = False,
    ) -> None:
        if warmup_num_steps + decay_num_steps > total_num_steps or min_ratio > 1:
            expected = "expected warmup_num_steps + decay_num_steps of at most total_num_steps, and min_ratio of at most 1"
            raise ValueError(f"scheduler.params: {expected}")

        def ratio(step: int) -> float:
            left = min(1.0, max(0, total_num_steps - step) / decay_num_steps)
            if cosine:
                left = (1 - math.cos(math.pi * left)) / 2
            decayed = min_ratio + (1 - min_ratio) * left**decay_power
            return min(decayed, (step + 1) / warmup_num_steps) if warmup_num_steps else decayed

        super().__init__(optimizer, ratio)
