"""Replace Triton kernels that don't run on this GPU by torch's operations."""

from __future__ import annotations

from collections.abc import Iterator
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
from clap_ds.model.text import TextLayer
from clap_ds.run_records.metrics_schema import ChosenKernel


def fall_back(settings: ModelSettings, model: ContrastiveModel, *, autocast: bool = False) -> dict[str, ChosenKernel]:
    """Try the Triton kernels that `auto` chose in each stage and the text tower, before anything is traced, and replace those
    that fail on any rank. A collective. Returns the kernels by part of a block whose setting is `auto`."""
    device, chosen = model.logit_scale.device, dict[str, ChosenKernel]()
    for part in Kernels._fields:
        if getattr(settings, f"{part}_impl") != "auto" or not isinstance(model, ClapModel):
            continue
        problems, places = dict[str, str](), [*_places(model, part)]
        for name, place, modules in places:
            if modules[-1].kernel != "triton":
                continue
            with activity("trying kernels"):
                problem = problem_of(partial(_try, place, part, autocast=autocast))
            if problem:
                problems[name] = problem
                for module in modules:
                    module.kernel = getattr(torch_kernels(device), part)
        used = {module.kernel for _, _, modules in places for module in modules}
        kernel, problem = "triton" if "triton" in used else used.pop(), "; ".join({*problems.values()}) or None
        chosen[part] = {"kernel": kernel, "problem": problem}
        if rank() == 0:
            slower = f"; {', '.join(problems)} run slower without it: {problem}" if problem else ""
            print(f"kernel of clap.model.{part}_impl: {kernel}{slower}", flush=True)
    return chosen


def _places(model: ClapModel, part: str) -> Iterator[tuple[str, Any, list[Any]]]:
    """Yield the places that run the same kernels of a part: name, stage or text layer, and modules."""
    for number, stage in enumerate(cast("Any", model.audio.stages)):
        yield f"stage {number}", stage, [getattr(block, part) for block in stage.blocks]
    if part == "mlp":
        layers = model.text.blocks()
        yield "text", layers[-1], [layer.intermediate for layer in layers]


def _try(place: Any, part: str, *, autocast: bool) -> None:
    """Run a text layer's kernel, or part of a stage's last block, which is shifted if any is, forward and backward on zeros."""
    if isinstance(place, TextLayer):
        module, weight, sizes = place.intermediate, place.intermediate.dense.weight, [1]
    else:
        block = place.blocks[-1]
        module, weight, sizes = getattr(block, part), block.mlp.fc1.weight, [1, place.grid, place.grid]
    tokens = weight.new_zeros((*sizes, weight.shape[1]), requires_grad=True)
    with torch.autocast(weight.device.type, torch.bfloat16, enabled=autocast):
        output = module(tokens, place.mask, block.shift) if part == "attention" else module(tokens)
    torch.autograd.grad(output.sum(), tokens)
