"""What a run trains: its model, with what that takes from the hub, and DeepSpeed's engine around it, with CLAP's optimiser
groups and, where it can step the run, `FlatAdamW`.

Leaves what a step is to `clap_ds.engine.engine`. What DeepSpeed doesn't do is done here: parameters that must stay fp32
under bf16, and no step before the first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

from clap_ds.config.sections import ShardData
from clap_ds.config.settings import RunSettings
from clap_ds.engine.kernels import build_kernels
from clap_ds.engine.loss import LOSSES
from clap_ds.engine.optimizer import OPTIONS, REQUIRED, FlatAdamW
from clap_ds.engine.scalars import engine_section
from clap_ds.model.clap import ClapModel
from clap_ds.model.text import pretrained
from clap_ds.ranks.agreement import on_first
from clap_ds.ranks.distributed import Ranks
from clap_ds.ranks.watch import doing

ADAMS = ("adam", "adamw")


@doing("asking the hub")
def fetch_from_hub(run: RunSettings, ranks: Ranks) -> None:
    """Have on every host what the run takes from the hub, before any work is done: the tokenizer, the text tower's weights.

    Rank 0 looks first, so that where it can't be had one rank finds out and all stop; then one rank of every other host. All
    others find it in the cache of their host. A collective; ValueError where it can't be had, or doesn't fit the model.
    """

    def load() -> None:
        text, data = run.clap.preset().text, run.clap.data
        if isinstance(data, ShardData):
            from clap_ds.model.tokenizer import load_tokenizer

            load_tokenizer(data.tokenizer, vocab_size=text.vocab_size)
        if run.clap.model.text_from_hub:
            pretrained(text)

    on_first(load)
    if ranks.local_rank == 0 and not ranks.is_first:
        load()


def build_model(run: RunSettings, device: torch.device) -> ClapModel:
    """A fresh model as `clap.model` describes it, to be run on the device, with the towers of `clap.train.freeze` frozen.

    Raises:
        ValueError: its text tower's pretrained weights can't be had, or the device can't do what is asked for.
    """
    options = run.clap.model
    model = ClapModel(
        run.clap.preset(),
        drop_path=options.drop_path,
        text_dropout=options.text_dropout,
        spec_augment=options.spec_augment,
        text_from_hub=options.text_from_hub,
        learns_bias=LOSSES[run.clap.loss.kind].needs_bias,
        **build_kernels(run, device),
        checkpoint_activations=tuple(options.checkpoint_activations),
    )
    freeze(model, run.clap.train.freeze)
    return model


def freeze(model: ClapModel, towers: Sequence[str]) -> None:
    """Take towers and their projections out of training.

    As in LAION's training code they stay in training mode: dropout, SpecAugment and batch norm by the batch's statistics act
    as they would otherwise, so that the other tower doesn't learn from fewer variations. A frozen audio tower keeps its running
    statistics.
    """
    for tower in towers:
        model.get_submodule(tower).requires_grad_(False)
        model.get_submodule(f"{tower}_projection").requires_grad_(False)
    if "audio" in towers:
        for norm in model.audio.batch_norms():
            norm.momentum = 0.0


def wrap(model: ClapModel, run: RunSettings) -> deepspeed.DeepSpeedEngine:
    """DeepSpeed's engine around a model on its device; a collective over all ranks.

    Raises:
        ValueError: DeepSpeed refuses one of its own sections, or its optimiser can't be compiled.
    """
    config, optimizer = dict(run.deepspeed), None
    if "tensorboard" in config:
        config["tensorboard"] = engine_section(config["tensorboard"])
    if takes_flat_adamw(run):
        section = config["optimizer"]
        options = {name: value for name, value in section.get("params", {}).items() if name in OPTIONS}
        config["optimizer"] = {**section, "legacy_fusion": True}

        def optimizer(groups: Iterator[dict[str, Any]]) -> FlatAdamW:
            return FlatAdamW(groups, cpu_kernels=run.clap.cpu_kernels == "auto", **options)

    try:
        with doing("building DeepSpeed's engine"):  # which may compile its optimiser
            engine, *_ = deepspeed.initialize(
                model=model, model_parameters=parameter_groups(model), optimizer=optimizer, config=config
            )
    except (AssertionError, ImportError, TypeError, ValueError) as error:
        raise ValueError(f"{run.path}: DeepSpeed refuses the configuration: {error}") from error
    except RuntimeError as error:
        if run.clap.fused_adam == "torch" or "extension" not in str(error):
            raise
        raise ValueError(
            f"{run.path}: clap.fused_adam: {str(error).splitlines()[0]}; 'torch' needs no compiler"
        ) from None
    if (inner := getattr(engine.optimizer, "optimizer", None)) is not None:
        # DeepSpeed's 16-bit optimisers step on construction, with zero gradients, to allocate their state. That decays every
        # weight once and leaves Adam's step counter at 1, which weakens the bias correction of the first real steps.
        inner.state.clear()
        engine.optimizer.refresh_fp32_params()
    return engine


def takes_flat_adamw(run: RunSettings) -> bool:
    """Whether `FlatAdamW` steps this run: DeepSpeed would take its FusedAdam, of which nothing is asked that only it has."""
    section = run.deepspeed.get("optimizer", {})
    params = section.get("params", {})
    return (
        run.clap.fused_adam == "torch"
        and section.get("type", "").lower() in ADAMS
        and params.keys() <= OPTIONS | REQUIRED.keys()
        and all(params.get(name, value) is value for name, value in REQUIRED.items())
    )


def parameter_groups(model: ClapModel) -> Iterator[dict[str, Any]]:
    """Optimiser groups for `deepspeed.initialize`: weights, vectors without decay, fp32 vectors, the logit scale.

    DeepSpeed's bf16 mode casts every parameter and then asks for the groups. This iterator is evaluated at that moment
    and first gives `model.fp32_parameters()` back their fp32 values, so that a group never mixes dtypes. Biases, norms,
    position-bias tables and the logit scale have no weight decay, as in LAION's training code.
    """
    kept = {parameter: parameter.detach().clone() for parameter in model.fp32_parameters()}

    def group_of(name: str, parameter: nn.Parameter) -> str:
        if parameter is model.logit_scale:
            return "logit_scale"
        if parameter in kept:
            return "fp32"
        return "no_decay" if parameter.ndim < 2 or name.endswith("relative_position_bias") else "decay"

    def groups() -> Iterator[dict[str, Any]]:
        for parameter, value in kept.items():
            value = value.to(parameter.device)
            if dist.is_initialized():
                dist.broadcast(value, src=0)
            parameter.data = value
        named: dict[str, list[nn.Parameter]] = {"decay": [], "no_decay": [], "fp32": [], "logit_scale": []}
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                named[group_of(name, parameter)].append(parameter)
        for name, parameters in named.items():
            if parameters:
                yield {"name": name, "params": parameters} | ({} if name == "decay" else {"weight_decay": 0.0})

    return groups()
