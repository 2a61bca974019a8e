"""Build a model, DeepSpeed's engine around it, CLAP's optimizer groups, and a schedule of the
learning rate that neither DeepSpeed nor torch has."""

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
from clap_ds.engine import deepspeed_compat
from clap_ds.engine.deepspeed_compat import StepToStepTimer
from clap_ds.engine.loss import LOSSES
from clap_ds.engine.optimizer import OPTIONS, FlatAdamW, scale_rates
from clap_ds.model.clap import ClapModel, new_model
from clap_ds.model.contrastive import ContrastiveModel
from clap_ds.model.kernels import select_kernels
from clap_ds.weights.hub import load_pretrained_text, load_tokenizer

ADAMS = ("adam", "adamw")
TOWERS: tuple[Tower, ...] = ("audio", "text")
# Optimizer groups in order.
GROUP_NAMES = ("decay", "no_decay", "fp32", "logit_scale")
# A 16-bit parameter with a multiple of so many elements ends at a multiple of 16 bytes.
ALIGNED = 8


@activity("asking the hub")
def fetch_from_hub(model: ModelSettings, data: SyntheticData | ShardData, ranks: Ranks) -> None:
    """Fetch tokenizer and text tower weights to every host: first with rank 0, then with one rank
    of each other host. A collective; raises ValueError if they aren't available or don't fit the
    model."""

    def load() -> None:
        text = model.sizes.text
        if isinstance(data, ShardData):
            load_tokenizer(
                data.tokenizer, vocab_size=text.vocab_size, pad_token_id=text.pad_token_id
            )
        if model.pretrained_text and not model.sizes.open_clip:
            load_pretrained_text(text)

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
    options = settings.model_dump(include={"drop_path", "text_dropout", "spec_augment"})
    if settings.sizes.open_clip:
        # open_clip loads the weights itself.
        options["pretrained_text"] = settings.pretrained_text
    model = new_model(
        settings.sizes,
        **options,
        learns_bias=LOSSES[loss.kind].needs_bias,
        **select_kernels(settings, device)._asdict(),
        activation_checkpointing=tuple(settings.activation_checkpointing),
    )
    if settings.pretrained_text and isinstance(model, ClapModel):
        model.text.roberta.load_state_dict(load_pretrained_text(model.config.text).state_dict())
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
    return [tower for tower in TOWERS if _is_trained(model.get_submodule(tower))]


def _is_trained(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


def wrap(
    model: ContrastiveModel, config: dict[str, Any], settings: EngineSettings, train: TrainSettings
) -> deepspeed.DeepSpeedEngine:
    """Build DeepSpeed's engine around a model on its device. A collective; raises ValueError if
    DeepSpeed rejects a section."""
    # Synchronizing twice a step would wait for the copy of the next batch: 8% of a step on an H200.
    # See `StepToStepTimer`.
    config = {"timers": {"throughput": {"synchronized": False}}, **config}
    if "tensorboard" in config:
        # `Scalars` writes it.
        config["tensorboard"] = {**config["tensorboard"], "enabled": False}

    make_optimizer = None
    if takes_flat_adamw(config, settings):
        section = config["optimizer"]
        options = {"cpu_kernels": settings.cpu_kernels == "auto", **section.get("params", {})}
        make_optimizer = partial(FlatAdamW, **options)
        # Makes DeepSpeed keep groups flat.
        config["optimizer"] = {**section, "legacy_fusion": True}
    make_schedule = None
    schedule = config.get("scheduler", {})
    if schedule.get("type") == WarmupStableDecayLR.__name__:
        make_schedule = partial(WarmupStableDecayLR, **schedule.get("params", {}))

    initialize: Any = deepspeed.initialize
    try:
        # It may compile DeepSpeed's optimizer.
        with activity("building DeepSpeed's engine"):
            engine, *_ = initialize(
                model=model,
                model_parameters=parameter_groups(model, train),
                optimizer=make_optimizer,
                lr_scheduler=make_schedule,
                config=config,
            )
    except Exception as error:  # of many types
        if isinstance(error, RuntimeError) and not isinstance(error, NotImplementedError):
            # Memory is exhausted, or another rank is lost.
            raise
        raise ValueError(
            f"DeepSpeed rejects the configuration: {type(error).__name__}: {error}"
        ) from error

    if deepspeed_compat.is_16_bit_wrapper(engine.optimizer):
        deepspeed_compat.undo_first_step(engine.optimizer)
    scale_rates(deepspeed_compat.inner_optimizer(engine.optimizer))
    engine.tput_timer = StepToStepTimer(engine.tput_timer)
    return engine


def takes_flat_adamw(config: dict[str, Any], settings: EngineSettings) -> bool:
    """Return whether `FlatAdamW` steps a run: other options make DeepSpeed build its own."""
    section = config.get("optimizer", {})
    return (
        settings.optimizer_implementation == "torch"
        and section.get("type", "").lower() in ADAMS
        and section.get("params", {}).keys() <= OPTIONS
    )


def parameter_groups(model: ContrastiveModel, train: TrainSettings) -> Iterator[dict[str, Any]]:
    """Yield optimizer groups for `deepspeed.initialize`: weights, vectors without decay, fp32
    vectors, the logit scale.

    DeepSpeed's bf16 mode casts every parameter and then evaluates this iterator, which first
    restores the fp32 values of `model.fp32_parameters()`, so that no group mixes dtypes. As in
    LAION's code, biases, norms, position-bias tables and the logit scale have no weight decay. A
    tower's `lr_scale` is in its groups.

    Within a group, odd sizes come last: DeepSpeed's flat buffer has no gaps, and for a bias that
    doesn't start at a multiple of 16 bytes cuBLAS takes a kernel that needs twice the time.
    Checkpoints keep the model's order (`checkpoint/restore.py`).
    """
    # Now, before DeepSpeed casts them.
    fp32_values = {parameter: parameter.detach().clone() for parameter in model.fp32_parameters()}
    return _parameter_groups(model, {**train.lr_scale}, fp32_values)


def _parameter_groups(
    model: ContrastiveModel,
    lr_scale: dict[Any, float],
    fp32_values: dict[nn.Parameter, torch.Tensor],
) -> Iterator[dict[str, Any]]:
    # By now DeepSpeed has cast the parameters.
    for parameter, value in fp32_values.items():
        parameter.data = value
    groups: dict[tuple[int, float], list[nn.Parameter]] = defaultdict(list)
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if parameter is model.logit_scale:
            group_name = "logit_scale"
        elif parameter in fp32_values:
            group_name = "fp32"
        elif parameter.ndim < 2 or "relative_position_bias" in name:
            group_name = "no_decay"
        else:
            group_name = "decay"
        tower, *_ = name.split(".")
        # In the order of names, the largest scale first.
        groups[GROUP_NAMES.index(group_name), -lr_scale.get(tower, 1.0)].append(parameter)
    for (position, negative_scale), parameters in sorted(groups.items()):
        group: dict[str, Any] = {"name": GROUP_NAMES[position]}
        group["params"] = sorted(parameters, key=lambda p: p.numel() % ALIGNED != 0)
        if group["name"] != "decay":
            group["weight_decay"] = 0.0
        if negative_scale != -1:
            group["lr_scale"] = -negative_scale
        yield group


class WarmupStableDecayLR(LambdaLR):
    """Schedule that warms up over `warmup_num_steps`, holds the rate, and lowers it over the last
    `decay_num_steps` of `total_num_steps` to the fraction `min_ratio` (WSD, arXiv 2404.06395).

    The decay is linear or has the power `decay_power`, as open_clip's `const-cooldown`. With
    `cosine`, and a decay of all steps after the warm-up, it is open_clip's `cosine`.
    """

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
            raise ValueError(
                "scheduler.params: expected warmup_num_steps + decay_num_steps of at most"
                " total_num_steps, and min_ratio of at most 1"
            )

        def ratio(step: int) -> float:
            # 1 until the decay begins, 0 at the last step.
            remaining = min(1.0, max(0, total_num_steps - step) / decay_num_steps)
            if cosine:
                remaining = (1 - math.cos(math.pi * remaining)) / 2
            decayed = min_ratio + (1 - min_ratio) * remaining**decay_power
            if warmup_num_steps == 0:
                return decayed
            return min(decayed, (step + 1) / warmup_num_steps)

        super().__init__(optimizer, ratio)
