"""Choose the kernels of the audio tower's window attention and MLPs (`clap.model.attention_impl`, `clap.model.mlp_impl`).

On CUDA, `auto` uses this project's Triton kernels if they compile and run; otherwise torch's operations."""

from __future__ import annotations

import os
from functools import partial
from typing import Any, Literal

import torch
from torch.utils._triton import has_triton_package

from clap_ds.config.schema import ModelSettings
from clap_ds.distributed.collectives import rank, reduce_on_rank0
from clap_ds.distributed.watchdog import activity
from clap_ds.engine.compile import first_problem, problem_of
from clap_ds.model.clap import ClapModel
from clap_ds.model.window_attention import default_kernel
from clap_ds.run_records.metrics_schema import ChosenKernel

Field = Literal["attention", "mlp"]
FIELDS: tuple[Field, ...] = ("attention", "mlp")


def build_kernels(settings: ModelSettings, device: torch.device) -> dict[Field, Any]:
    """Return `ClapModel`'s `attention` and `mlp` for a device, with torch's operations for `auto`. Raises ValueError if Triton
    is required but can't run."""
    kernels: dict[Field, Any] = {"attention": default_kernel(device), "mlp": "torch"}
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    for field in FIELDS:
        asked = getattr(settings, f"{field}_impl")
        if asked == "triton" and (not has_triton_package() or (device.type == "cpu" and not interpreted)):
            raise ValueError(f"clap.model.{field}_impl: 'triton' needs a GPU and the triton package; use 'auto'")
        if asked != "auto":
            kernels[field] = asked
    return kernels


def choose_kernels(
    settings: ModelSettings, model: ClapModel, device: torch.device, *, autocast: bool
) -> dict[str, ChosenKernel]:
    """Resolve `auto` before anything is traced or run: use Triton kernels if they run on every rank. A collective. Returns the
    chosen kernels by part."""
    chosen = dict[str, ChosenKernel]()
    for field in FIELDS:
        if getattr(settings, f"{field}_impl") != "auto":
            continue
        before = [getattr(block, field).kernel for block in model.audio.blocks()]
        with activity("trying kernels"):
            model.audio.use_triton(field)
            problem = problem_of(partial(_try, field, model, autocast=autocast))
            problem = reduce_on_rank0(problem, first_problem)
        if problem:
            for block, kernel in zip(model.audio.blocks(), before, strict=True):
                getattr(block, field).kernel = kernel
        kernel = build_kernels(settings, device)[field] if problem else "triton"
        chosen[field] = {"kernel": kernel, "problem": problem}
        if rank() == 0:
            print(f"kernel of clap.model.{field}_impl: {kernel}", flush=True)
            if problem:
                print(f"warning: Triton {field} kernel unavailable ({problem}); using a slower kernel", flush=True)
    return chosen


def _try(field: Field, model: ClapModel, *, autocast: bool) -> None:
    """Run zeros through the first block that has the kernel, preferably with shifted windows."""
    stage: Any = model.audio.stages[0]
    blocks = [*sorted(stage.blocks, key=lambda each: -each.shift), *model.audio.blocks()]
    if not (fitting := [each for each in blocks if getattr(each, field).kernel == "triton"]):
        raise ValueError("no kernel for this model's MLP widths")
    block, grid, weight = fitting[0], model.config.audio.stage_grids[0], fitting[0].mlp.fc1.weight
    tokens = weight.new_zeros((1, grid, grid, weight.shape[1]), requires_grad=True)
    with torch.autocast(weight.device.type, torch.bfloat16, enabled=autocast):
        output = block.attention(tokens, stage.mask, block.shift) if field == "attention" else block.mlp(tokens)
    torch.autograd.grad(output.sum(), tokens)
