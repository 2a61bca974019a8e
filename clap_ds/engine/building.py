"""What a run trains: its model, with what that takes from the hub, and DeepSpeed's engine around it, with CLAP's optimiser
groups and, where it can step the run, `FlatAdamW`.

Leaves what a step is to `clap_ds.engine.engine`. What DeepSpeed doesn't do is done here: parameters that must stay fp32
under bf16, and no step before the first.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.ops.op_builder import FusedAdamBuilder
from torch import nn

from clap_ds.config.sections import ShardData
from clap_ds.config.settings import RunSettings
from clap_ds.engine.kernels import build_kernels
from clap_ds.engine.loss import LOSSES
from clap_ds.engine.optimizer import OPTIONS, REQUIRED, FlatAdamW
from clap_ds.engine.scalars import engine_section
from clap_ds.model.clap import ClapModel
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
    text, data = run.clap.preset().text, run.clap.data

    def load() -> None:
        if isinstance(data, ShardData):
            from clap_ds.model.tokenizer import load_tokenizer

            load_tokenizer(data.tokenizer, vocab_size=text.vocab_size)
        if run.clap.model.text_from_hub:
            from clap_ds.model.text import pretrained

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
    if run.clap.compile != "off" and device.type == "cpu" and " " in torch.__file__:
        cant = "on CPUs PyTorch can't compile in an environment whose path has a space"
        raise ValueError(f"{run.path}: clap.compile: {cant}: {sys.prefix}")
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
        model.audio.batch_norm.momentum = 0.0


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

    elif run.clap.fused_adam == "deepspeed":
        _compile_fused_adam(run)
    try:
        engine, *_ = deepspeed.initialize(
            model=model, model_parameters=parameter_groups(model), optimizer=optimizer, config=config
        )
    except (AssertionError, TypeError, ValueError) as error:
        raise ValueError(f"{run.path}: DeepSpeed refuses the configuration: {error}") from error
    _undo_initial_step(engine.optimizer)
    return engine


@doing("compiling DeepSpeed's AdamW")
def _compile_fused_adam(run: RunSettings) -> None:
    """Have DeepSpeed compile its FusedAdam for this kind of device where that is used; ValueError where it can't be done."""
    section = run.deepspeed.get("optimizer", {})
    if section.get("type", "").lower() not in ADAMS or section.get("params", {}).get("torch_adam"):
        return
    beside_python = str(Path(sys.executable).parent)  # where ninja is, whether the environment is active or not
    if beside_python not in os.environ["PATH"].split(os.pathsep):
        os.environ["PATH"] += os.pathsep + beside_python
    try:
        FusedAdamBuilder().load(verbose=False)
    except Exception as error:  # a compiler says what is wrong in many ways
        reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise ValueError(f"{run.path}: clap.fused_adam: {reason}; 'torch' needs no compiler") from None


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


def _undo_initial_step(optimizer: Any) -> None:
    """Take back the step that DeepSpeed's 16-bit optimisers make on construction, with zero gradients, to allocate
    their state.

    It decays every weight once and leaves Adam's step counter at 1, which weakens the bias correction of the first real
    steps.
    """
    inner = getattr(optimizer, "optimizer", None)
    if inner is not None:
        inner.state.clear()
        optimizer.refresh_fp32_params()


def parameter_groups(model: ClapModel) -> Iterator[dict[str, Any]]:
    """Optimiser groups for `deepspeed.initialize`: weights, vectors without decay, fp32 vectors, the logit scale.

    DeepSpeed's bf16 mode casts every parameter and then asks for the groups. This iterator is evaluated at that moment
    and first gives `model.fp32_parameters()` back their fp32 values, so that a group never mixes dtypes. Biases, norms,
    position-bias tables and the logit scale have no weight decay, as in LAION's training code.
    """
    kept = [(parameter, parameter.detach().clone()) for parameter in model.fp32_parameters()]

    def groups() -> Iterator[dict[str, Any]]:
        for parameter, value in kept:
            value = value.to(parameter.device)
            if dist.is_initialized():
                dist.broadcast(value, src=0)
            parameter.data = value
        named: dict[str, list[nn.Parameter]] = {"decay": [], "no_decay": [], "fp32": [], "logit_scale": []}
        fp32 = {id(parameter) for parameter, _ in kept}
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            if parameter is model.logit_scale:
                named["logit_scale"].append(parameter)
            elif id(parameter) in fp32:
                named["fp32"].append(parameter)
            elif parameter.ndim < 2 or name.endswith("relative_position_bias"):
                named["no_decay"].append(parameter)
            else:
                named["decay"].append(parameter)
        for name, parameters in named.items():
            if parameters:
                yield {"name": name, "params": parameters} | ({} if name == "decay" else {"weight_decay": 0.0})

    return groups()
