"""What `auto` of `clap.model.attention` and `clap.model.mlp` is on CUDA: this project's Triton kernels where they compile here
and agree with plain products in fp32, forward and gradients, at every size the model has; else `sdpa`, and `torch` for MLPs.

Tried in this process at every start, on a few clips of noise. All ranks take the same: Triton's where none found a fault.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from clap_ds.config.settings import RunSettings
from clap_ds.model.clap import ClapModel
from clap_ds.model.swin import SwinBlock
from clap_ds.model.window_attention import attend_windows
from clap_ds.model.windows import shifted_window_mask
from clap_ds.ranks.agreement import gather, rank
from clap_ds.ranks.watch import doing
from clap_ds.record.schema import ChosenKernel

TOLERANCE = {torch.float32: 2e-5, torch.float16: 0.004, torch.bfloat16: 0.03}
"""Of the largest value, as in the kernels' tests."""
CLIPS = 16
"""Enough for programs of window attention's backward pass to go through several windows each."""

Operation = Callable[..., Tensor]
Random = Callable[..., Tensor]
"""Sizes → normal noise in the run's dtype."""
Trial = tuple[str, Operation, Operation, dict[str, Tensor]]
"""Of what, Triton's operation, the plain one, and what both are given, by name."""


def choose_kernels(run: RunSettings, model: ClapModel, device: torch.device) -> dict[str, ChosenKernel]:
    """Give the audio tower's blocks the kernels that `auto` stands for, before anything has been traced or run. A collective.

    Returns:
        What was chosen, by field of `clap.model`, for the run's record; empty where the settings name kernels.
    """
    chosen, said = dict[str, ChosenKernel](), list[str]()
    fields: dict[Literal["attention", "mlp"], tuple[str, Callable[[ClapModel, Random], Iterator[Trial]]]]
    fields = {"attention": ("sdpa", _attention_trials), "mlp": ("torch", _mlp_trials)}
    for field, (otherwise, trials) in fields.items():
        if getattr(run.clap.model, field) == "auto":
            with doing("trying kernels"):
                problems = gather(_first_problem(trials, model, _compute_dtype(run), device))
            found = [f"rank {number}: {problem}" for number, problem in enumerate(problems) if problem is not None]
            if found:
                chosen[field] = {"kernel": otherwise, "problem": found[0]}
                said.append(f"{field} {otherwise} (triton can't be taken, {found[0]})")
            else:
                chosen[field] = {"kernel": "triton", "problem": None}
                said.append(f"{field} triton")
                model.audio.use_triton(field)
    if said and rank() == 0:
        print(f"kernels: {'; '.join(said)}", flush=True)
    return chosen


def _compute_dtype(run: RunSettings) -> torch.dtype:
    name = run.precision.removeprefix("torch_autocast_")
    dtype: torch.dtype = getattr(torch, {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}.get(name, name))
    return dtype


def _first_problem(
    trials: Callable[[ClapModel, Random], Iterator[Trial]], model: ClapModel, dtype: torch.dtype, device: torch.device
) -> str | None:
    """What is wrong with Triton's kernels on this rank, in a line; None where they are right."""
    generator = torch.Generator(device).manual_seed(0)  # what the run draws stays as it is

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=dtype, device=device)

    try:
        for trial in trials(model, random):
            if problem := _disagreement(trial, random):
                return problem
    except Exception as error:  # of whatever type a compiler or a driver has
        return (str(error).strip() or type(error).__name__).splitlines()[0]
    return None


def _disagreement(trial: Trial, random: Random) -> str | None:
    what, triton, plain, tensors = trial
    leaves = [tensor.detach().requires_grad_() for tensor in tensors.values()]
    exact = [tensor.detach().float().requires_grad_() for tensor in tensors.values()]
    output, expected = triton(*leaves), plain(*exact)
    probe = random(*expected.shape)
    ours = [output.detach(), *torch.autograd.grad(output, leaves, probe)]
    theirs = [expected.detach(), *torch.autograd.grad(expected, exact, probe.float())]
    names = ["output", *(f"gradient of {name}" for name in tensors)]
    for name, x, y in zip(names, ours, theirs, strict=True):
        error = float((x.float() - y).abs().max() / y.abs().max())
        if not error < TOLERANCE[output.dtype]:  # NaN, too
            return f"{what}: its {name} is off by {error:.2g} of the largest value"
    return None


def _attention_trials(model: ClapModel, random: Random) -> Iterator[Trial]:
    """Each size of window attention in the model, once."""
    sizes = dict.fromkeys(
        (grid, dim, block.attention.relative_position_bias.shape[1], block.attention.window, block.shift)
        for grid, dim, block in _blocks(model)
    )
    for grid, dim, heads, window, shift in sizes:
        tensors = {name: random(CLIPS, grid, grid, dim) for name in "qkv"}
        tensors["bias"] = bias = random(heads, window**2, window**2)
        mask = shifted_window_mask(grid, window, shift).to(bias.device) if shift else None
        attend = partial(_attend, mask_GNN=mask, window=window, shift=shift)
        what = f"{grid}×{grid}×{dim}, {heads} heads, {window}×{window} windows" + (f", shift {shift}" if shift else "")
        yield what, partial(attend, kernel="triton"), partial(attend, kernel="matmul"), tensors


def _attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, **how: Any) -> Tensor:
    return attend_windows(torch.cat([q, k, v], dim=-1), bias, **how)


def _mlp_trials(model: ClapModel, random: Random) -> Iterator[Trial]:
    """Each size of MLP in the model that there is a kernel for, once.

    Raises:
        ValueError: there is none.
    """
    from clap_ds.model.mlp_triton import supports, triton_mlp

    sizes = dict.fromkeys((grid, dim, block.mlp.fc1.out_features) for grid, dim, block in _blocks(model))
    supported = [(grid, dim, hidden) for grid, dim, hidden in sizes if supports(dim, hidden)]
    if not supported:
        raise ValueError("it has no MLP of this model's widths")
    for grid, dim, hidden in supported:
        weights = {"weight 1": random(hidden, dim) * dim**-0.5, "bias 1": random(hidden)}
        weights |= {"weight 2": random(dim, hidden) * hidden**-0.5, "bias 2": random(dim)}
        yield f"{grid}×{grid}×{dim}", triton_mlp, _plain_mlp, {"tokens": random(CLIPS, grid, grid, dim), **weights}


def _plain_mlp(tokens: Tensor, weight1: Tensor, bias1: Tensor, weight2: Tensor, bias2: Tensor) -> Tensor:
    return F.linear(F.gelu(F.linear(tokens, weight1, bias1)), weight2, bias2)


def _blocks(model: ClapModel) -> list[tuple[int, int, SwinBlock]]:
    """Side of the token grid, channels, block."""
    sizes = zip(model.config.audio.stage_grids, model.config.audio.stage_dims, model.audio.stages, strict=True)
    return [(grid, dim, each) for grid, dim, stage in sizes for each in stage.modules() if isinstance(each, SwinBlock)]
