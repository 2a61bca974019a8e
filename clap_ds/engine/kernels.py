"""What computes the audio tower's window attention and MLPs: the owner of `clap.model.attention` and `clap.model.mlp`.

A model is built with what `build_kernels` says. On CUDA `choose_kernels` then gives it this project's Triton kernels for
`auto`, if they compile here and agree with plain products in fp32, forward and gradients, on one small input each. That is
tried in this process at every start, and each rank goes by what it found, as GPUs of several kinds may step together.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._triton import has_triton_package

from clap_ds.config.settings import RunSettings
from clap_ds.model.clap import ClapModel
from clap_ds.model.window_attention import attend_windows, default_kernel
from clap_ds.ranks.accelerator import triton_lacks
from clap_ds.ranks.agreement import gather, rank
from clap_ds.ranks.watch import doing
from clap_ds.record.hardware import device_name
from clap_ds.record.schema import ChosenKernel

Field = Literal["attention", "mlp"]
FIELDS: tuple[Field, ...] = ("attention", "mlp")
DTYPES = {"bf16": torch.bfloat16, "torch_autocast_bfloat16": torch.bfloat16}
DTYPES |= {"fp16": torch.float16, "torch_autocast_float16": torch.float16}
"""Of activations, by the run's precision, where it isn't fp32."""
TOLERANCE = {torch.float32: 2e-5, torch.float16: 0.004, torch.bfloat16: 0.03}
"""Of the largest value, as in the kernels' tests."""
CLIPS = 16
"""Enough for programs of window attention's backward pass to go through several windows each."""

Operation = Callable[..., Tensor]


def build_kernels(run: RunSettings, device: torch.device) -> dict[Field, Any]:
    """`ClapModel`'s `attention` and `mlp` for a device, where `auto` is torch's operations.

    Raises:
        ValueError: Triton is asked for where it can't run.
    """
    kernels: dict[Field, Any] = {"attention": default_kernel(device), "mlp": "torch"}
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    for field in FIELDS:
        asked = getattr(run.clap.model, field)
        if asked == "triton" and (not has_triton_package() or (device.type == "cpu" and not interpreted)):
            raise ValueError(
                f"{run.path}: clap.model.{field}: 'triton' needs a GPU and the triton package: take 'auto'"
            )
        if asked != "auto":
            kernels[field] = asked
    return kernels


def choose_kernels(run: RunSettings, model: ClapModel, device: torch.device) -> dict[str, ChosenKernel]:
    """Give the audio tower's blocks the kernels that `auto` stands for, before anything has been traced or run. A collective.

    Returns:
        On rank 0 what was chosen on all ranks, by field of `clap.model`, for its record; empty where the settings name kernels.
    """
    chosen = dict[str, ChosenKernel]()
    for field in FIELDS:
        if getattr(run.clap.model, field) != "auto":
            continue
        with doing("trying kernels"):
            problem = _problem(field, model, DTYPES.get(run.precision, torch.float32), device)
            tried = gather((device_name(device), problem))
        if problem is None:
            model.audio.use_triton(field)
        kernels = sorted({build_kernels(run, device)[field] if found else "triton" for _, found in tried})
        told = {each: tried.index(each) for each in tried if each[1]}
        faults = [f"{tried.count(each)} × {each[0]}, first rank {at}: {each[1]}" for each, at in told.items()]
        chosen[field] = {"kernel": " and ".join(kernels), "problem": "; ".join(faults) or None}
    if chosen and rank() == 0:
        print("kernels:", "; ".join(f"{field} {its['kernel']}" for field, its in chosen.items()), flush=True)
        for name, problem in ((name, its["problem"]) for name, its in chosen.items() if its["problem"]):
            print(f"warning: {name} by a slower kernel than Triton's on {problem}", flush=True)
    return chosen


def _problem(field: Field, model: ClapModel, dtype: torch.dtype, device: torch.device) -> str | None:
    """What is wrong with Triton's kernels on this rank, in a line; None where they are right."""
    generator = torch.Generator(device).manual_seed(0)  # what the run draws stays as it is
    normal = partial(torch.randn, generator=generator, dtype=dtype, device=device)
    try:
        triton, plain, inputs = (_attention_trial if field == "attention" else _mlp_trial)(model, normal)
        found, expected = _results(triton, inputs, dtype), _results(plain, inputs, torch.float32)
    except Exception as error:  # of whatever type a compiler or a driver has
        return triton_lacks() or (str(error).strip() or type(error).__name__).splitlines()[0]
    for name, right in expected.items():
        share = float((found[name].float() - right).abs().max() / right.abs().max())
        if not share < TOLERANCE[dtype]:  # NaN, too
            return f"its {name} is off by {share:.2g} of the largest value"
    return None


def _results(operation: Operation, inputs: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """The output of all inputs but the last, which is the output's gradient, and their gradients, by name."""
    *leaves, probe = (tensor.detach().to(dtype).requires_grad_() for tensor in inputs.values())
    output = operation(*leaves)
    gradients = torch.autograd.grad(output, leaves, probe.detach())
    return {"output": output.detach()} | {f"gradient of {n}": g for n, g in zip(inputs, gradients, strict=False)}


def _attention_trial(model: ClapModel, normal: Operation) -> tuple[Operation, Operation, dict[str, Tensor]]:
    """Triton's operation, the plain one and their inputs, of the first stage's size and, where it has such, shifted windows."""
    stage: Any = model.audio.stages[0]
    grid, block = model.config.audio.stage_grids[0], max(stage.blocks, key=lambda each: each.shift)
    window, dim = block.attention.window, block.attention.proj.in_features
    attend = partial(attend_windows, mask_GNN=stage.mask, window=window, shift=block.shift)
    inputs = {"qkv": normal(CLIPS, grid, grid, 3 * dim)}
    inputs["bias"] = normal(block.attention.relative_position_bias.shape[1], window**2, window**2)
    inputs["output"] = normal(CLIPS, grid, grid, dim)
    return partial(attend, kernel="triton"), partial(attend, kernel="matmul"), inputs


def _mlp_trial(model: ClapModel, normal: Operation) -> tuple[Operation, Operation, dict[str, Tensor]]:
    """As `_attention_trial`, at the size of the first MLP that there is a kernel for; a ValueError where there is none."""
    from clap_ds.model.mlp_triton import supports, triton_mlp

    sizes = [(block.mlp.fc1.in_features, block.mlp.fc1.out_features) for block in model.audio.blocks()]
    dim, hidden = next((size for size in sizes if supports(*size)), (0, 0))
    if not dim:
        raise ValueError("it has no MLP of this model's widths")
    inputs = {"tokens": normal(CLIPS, 8, 8, dim), "weight 1": normal(hidden, dim) * dim**-0.5, "bias 1": normal(hidden)}
    inputs |= {"weight 2": normal(dim, hidden) * hidden**-0.5, "bias 2": normal(dim)}
    return triton_mlp, _plain_mlp, inputs | {"output": normal(CLIPS, 8, 8, dim)}


def _plain_mlp(tokens: Tensor, weight1: Tensor, bias1: Tensor, weight2: Tensor, bias2: Tensor) -> Tensor:
    return F.linear(F.gelu(F.linear(tokens, weight1, bias1)), weight2, bias2)
