"""Replace Triton kernels that don't run on this GPU by torch's operations."""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import torch

from clap_ds.config.schema import ModelSettings
from clap_ds.distributed.collectives import rank
from clap_ds.distributed.watchdog import activity
from clap_ds.engine.compile import problem_of
from clap_ds.model.clap import ClapModel
from clap_ds.model.contrastive import ContrastiveModel
from clap_ds.model.kernels import Kernels, torch_kernels
from clap_ds.run_records.metrics_schema import ChosenKernel


def fall_back(settings: ModelSettings, model: ContrastiveModel, *, autocast: bool = False) -> dict[str, ChosenKernel]:
    """Try the Triton kernels that `auto` chose in each stage, before anything is traced, and replace those that fail on any
    rank. A collective. Returns the kernels by part of a block whose setting is `auto`."""
    device, chosen = model.logit_scale.device, dict[str, ChosenKernel]()
    for part in Kernels._fields:
        if getattr(settings, f"{part}_impl") != "auto" or not isinstance(model, ClapModel):
            continue
        problems, stages = dict[int, str](), cast("Any", model.audio.stages)
        for number, stage in enumerate(stages):
            modules = [getattr(block, part) for block in stage.blocks]
            if modules[-1].kernel != "triton":
                continue
            with activity("trying kernels"):
                problem = problem_of(partial(_try, stage, part, autocast=autocast))
            if problem:
                problems[number] = problem
                for module in modules:
                    module.kernel = getattr(torch_kernels(device), part)
        used = {getattr(block, part).kernel for block in model.audio.blocks()}
        kernel, problem = "triton" if "triton" in used else used.pop(), "; ".join({*problems.values()}) or None
        chosen[part] = {"kernel": kernel, "problem": problem}
        if rank() == 0:
            slower = f"; stages {[*problems]} run slower without it: {problem}" if problem else ""
            print(f"kernel of clap.model.{part}_impl: {kernel}{slower}", flush=True)
    return chosen


def _try(stage: Any, part: str, *, autocast: bool) -> None:
    """Run part of a stage's last block, which is shifted if any is, forward and backward on zeros."""
    block, weight = stage.blocks[-1], stage.blocks[-1].mlp.fc1.weight
    tokens = weight.new_zeros((1, stage.grid, stage.grid, weight.shape[1]), requires_grad=True)
    with torch.autocast(weight.device.type, torch.bfloat16, enabled=autocast):
        output = block.attention(tokens, stage.mask, block.shift) if part == "attention" else block.mlp(tokens)
    torch.autograd.grad(output.sum(), tokens)
