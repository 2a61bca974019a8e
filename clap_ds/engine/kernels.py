"""What computes the audio tower's window attention and MLPs: the owner of `clap.model.attention` and `clap.model.mlp`.

A model is built with what `build_kernels` says. On CUDA `choose_kernels` then gives it this project's Triton kernels for
`auto`, if they compile here and agree with plain products in fp32, forward and gradients, on one small input each. That is
tried in this process at every start; all ranks take the same, Triton's where none found a fault.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._triton import has_triton_package

from clap_ds.config.settings import RunSettings
from clap_ds.model.clap import ClapModel
from clap_ds.model.window_attention import attend_windows, default_kernel
from clap_ds.ranks.agreement import gather, rank
from clap_ds.ranks.watch import doing
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


class Trial(NamedTuple):
    """Triton's operation, the plain one, what both are given, by name, and the output's gradient."""

    triton: Operation
    plain: Operation
    inputs: dict[str, Tensor]
    probe: Tensor


def build_kernels(run: RunSettings, device: torch.device) -> dict[Field, Any]:
    """`ClapModel`'s `attention` and `mlp` for a device, where `auto` is torch's operations.

    Raises:
        ValueError: Triton is asked for where it can't run.
    """
    kernels: dict[Field, Any] = {"attention": default_kernel(device), "mlp": "torch"}
    for field in FIELDS:
        asked = getattr(run.clap.model, field)
        if asked == "triton" and device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
            raise ValueError(f"{run.path}: clap.model.{field}: 'triton' runs on GPUs, found a CPU: take 'auto'")
        if asked == "triton" and not has_triton_package():
            raise ValueError(f"{run.path}: clap.model.{field}: 'triton' needs the triton package, which is missing")
        if asked != "auto":
            kernels[field] = asked
    return kernels


def choose_kernels(run: RunSettings, model: ClapModel, device: torch.device) -> dict[str, ChosenKernel]:
    """Give the audio tower's blocks the kernels that `auto` stands for, before anything has been traced or run. A collective.

    Returns:
        What was chosen, by field of `clap.model`, for the run's record; empty where the settings name kernels.
    """
    chosen, said = dict[str, ChosenKernel](), list[str]()
    for field in FIELDS:
        if getattr(run.clap.model, field) != "auto":
            continue
        with doing("trying kernels"):
            problems = gather(_problem(field, model, DTYPES.get(run.precision, torch.float32), device))
        problem = next((f"rank {number}: {found}" for number, found in enumerate(problems) if found), None)
        if problem is None:
            model.audio.use_triton(field)
        kernel = "triton" if problem is None else build_kernels(run, device)[field]
        chosen[field] = {"kernel": kernel, "problem": problem}
        said.append(f"{field} {kernel}" + (f" (triton can't be taken, {problem})" if problem else ""))
    if said and rank() == 0:
        print(f"kernels: {'; '.join(said)}", flush=True)
    return chosen


def _problem(field: Field, model: ClapModel, dtype: torch.dtype, device: torch.device) -> str | None:
    """What is wrong with Triton's kernels on this rank, in a line; None where they are right."""
    generator = torch.Generator(device).manual_seed(0)  # what the run draws stays as it is
    normal = partial(torch.randn, generator=generator, dtype=dtype, device=device)
    try:
        trial = (_attention_trial if field == "attention" else _mlp_trial)(model, normal)
        found = _results(trial.triton, trial, dtype)
        expected = _results(trial.plain, trial, torch.float32)
    except Exception as error:  # of whatever type a compiler or a driver has
        return (str(error).strip() or type(error).__name__).splitlines()[0]
    for name, right in expected.items():
        share = float((found[name].float() - right).abs().max() / right.abs().max())
        if not share < TOLERANCE[dtype]:  # NaN, too
            return f"its {name} is off by {share:.2g} of the largest value"
    return None


def _results(operation: Operation, trial: Trial, dtype: torch.dtype) -> dict[str, Tensor]:
    """Output and gradients of the trial's inputs, by name."""
    leaves = [tensor.detach().to(dtype).requires_grad_() for tensor in trial.inputs.values()]
    output = operation(*leaves)
    gradients = torch.autograd.grad(output, leaves, trial.probe.to(dtype))
    return {"output": output.detach()} | {f"gradient of {n}": g for n, g in zip(trial.inputs, gradients, strict=True)}


def _attention_trial(model: ClapModel, normal: Operation) -> Trial:
    """At the size of the first stage, with shifted windows where it has them."""
    stage: Any = model.audio.stages[0]
    grid, block = model.config.audio.stage_grids[0], max(stage.blocks, key=lambda each: each.shift)
    window, dim = block.attention.window, block.attention.proj.in_features
    attend = partial(attend_windows, mask_GNN=stage.mask, window=window, shift=block.shift)
    bias = normal(block.attention.relative_position_bias.shape[1], window**2, window**2)
    inputs = {"qkv": normal(CLIPS, grid, grid, 3 * dim), "bias": bias}
    return Trial(
        partial(attend, kernel="triton"), partial(attend, kernel="matmul"), inputs, normal(CLIPS, grid, grid, dim)
    )


def _mlp_trial(model: ClapModel, normal: Operation) -> Trial:
    """At the size of the first MLP that there is a kernel for; a ValueError where there is none."""
    from clap_ds.model.mlp_triton import supports, triton_mlp

    sizes = [(block.mlp.fc1.in_features, block.mlp.fc1.out_features) for block in model.audio.blocks()]
    supported = [size for size in sizes if supports(*size)]
    if not supported:
        raise ValueError("it has no MLP of this model's widths")
    dim, hidden = supported[0]
    inputs = {"tokens": normal(CLIPS, 8, 8, dim), "weight 1": normal(hidden, dim) * dim**-0.5, "bias 1": normal(hidden)}
    inputs |= {"weight 2": normal(dim, hidden) * hidden**-0.5, "bias 2": normal(dim)}
    return Trial(triton_mlp, _plain_mlp, inputs, normal(CLIPS, 8, 8, dim))


def _plain_mlp(tokens: Tensor, weight1: Tensor, bias1: Tensor, weight2: Tensor, bias2: Tensor) -> Tensor:
    return F.linear(F.gelu(F.linear(tokens, weight1, bias1)), weight2, bias2)
