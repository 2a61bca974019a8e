"""Replace Triton kernels that don't run on this GPU by torch's operations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from clap_ds.config.schema import ModelSettings
from clap_ds.distributed.collectives import rank
from clap_ds.distributed.watchdog import activity
from clap_ds.engine.compile import problem_of
from clap_ds.model.clap import ClapModel
from clap_ds.model.contrastive import ContrastiveModel
from clap_ds.model.kernels import MAX_CAPTION_TOKENS, Kernels, torch_kernels
from clap_ds.run_records.schema import ChosenKernel


def fall_back(
    settings: ModelSettings, model: ContrastiveModel, *, autocast: bool = False
) -> dict[str, ChosenKernel]:
    """Try the Triton kernels that `auto` chose at each size, before anything is traced, and replace
    those that fail on any rank. A collective. Returns the kernels by part of a block whose setting
    is `auto`."""
    device = model.logit_scale.device
    chosen = dict[str, ChosenKernel]()
    for part in Kernels._fields:
        if getattr(settings, f"{part}_impl") != "auto" or not isinstance(model, ClapModel):
            continue
        problems = dict[str, str]()
        used = set[str]()
        for name, modules, run, tokens in groups_of(model, part):
            if modules[-1].kernel == "triton":
                with activity("trying kernels"):
                    problem = problem_of(partial(_try, run, tokens, autocast=autocast))
                if problem:
                    problems[name] = problem
                    for module in modules:
                        module.kernel = getattr(torch_kernels(device), part)
            used |= {module.kernel for module in modules}
        kernel = "triton" if "triton" in used else used.pop()
        problem = "; ".join({*problems.values()}) or None
        chosen[part] = {"kernel": kernel, "problem": problem}
        if rank() == 0:
            slower = f"; {', '.join(problems)} run slower without it: {problem}" if problem else ""
            print(f"kernel of clap.model.{part}_impl: {kernel}{slower}", flush=True)
    return chosen


def groups_of(
    model: ClapModel, part: str
) -> Iterator[tuple[str, list[Any], Callable[[Tensor], Tensor], Tensor]]:
    """Yield the modules that have a kernel for a part of a block, by size: their name, the modules,
    the last one's function and its input, zeros. The last window attention of a stage is shifted,
    if any is."""
    if part in ("attention", "mlp"):
        for number, stage in enumerate(cast("Any", model.audio.stages)):
            block, modules = stage.blocks[-1], [getattr(block, part) for block in stage.blocks]
            run = (
                partial(block.attention, mask_GNN=stage.mask, shift=block.shift)
                if part == "attention"
                else block.mlp
            )
            weight = block.mlp.fc1.weight
            yield (
                f"stage {number}",
                modules,
                run,
                weight.new_zeros(1, stage.grid, stage.grid, weight.shape[1]),
            )
    if part in ("mlp", "text_attention"):
        layers = model.text.blocks()
        weight = layers[-1].intermediate.dense.weight
        tokens = weight.new_zeros(1, MAX_CAPTION_TOKENS, weight.shape[1])
        if part == "mlp":
            yield (
                "text layers",
                [layer.intermediate for layer in layers],
                layers[-1].intermediate,
                tokens,
            )
        else:
            yield (
                "text layers",
                [layer.attention.self for layer in layers],
                layers[-1].attend,
                tokens,
            )


def _try(function: Callable[[Tensor], Tensor], tokens: Tensor, *, autocast: bool) -> None:
    """Run a function forward and backward."""
    with torch.autocast(tokens.device.type, torch.bfloat16, enabled=autocast):
        output = function(tokens.requires_grad_())
    torch.autograd.grad(output.sum(), tokens)
