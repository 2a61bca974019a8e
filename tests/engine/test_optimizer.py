"""Flat AdamW agrees with torch's, for both kernels, and its step with DeepSpeed's."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer

from clap_ds.config.settings import load_run
from clap_ds.engine.factory import takes_flat_adamw
from clap_ds.engine.optimizer import FlatAdamW, FlatStep, norm_of
from tests.kernels import needs_kernels

OPTIONS: dict[str, Any] = {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}
NATIVELY = pytest.mark.parametrize("natively", [False, pytest.param(True, marks=needs_kernels)])


def _group_per_size(sizes: Sequence[int]) -> list[dict[str, Any]]:
    """Return groups of one parameter that differ in rate and weight decay."""
    torch.manual_seed(0)
    return [
        {"params": [torch.nn.Parameter(torch.randn(size))], "lr": rate, "weight_decay": 10 * rate}
        for size, rate in zip(sizes, (0.01, 0.005, 0.0025), strict=True)
    ]


@NATIVELY
@pytest.mark.parametrize("scale", [1.0, torch.tensor(8.0)])
def test_steps_of_flat_groups_are_torchs(natively: bool, scale: float | torch.Tensor) -> None:
    """Gradients are unscaled, and new weights copied to the outputs."""
    sizes = (1, 33, 40_003)
    optimizer = FlatAdamW(_group_per_size(sizes), cpu_kernels=natively, **OPTIONS)
    reference = torch.optim.AdamW(_group_per_size(sizes), foreach=False, **OPTIONS)
    for _ in range(6):
        outputs = [torch.zeros(size, dtype=torch.bfloat16) for size in sizes]
        gradients = [torch.randn(size).bfloat16() for size in sizes]
        optimizer.step(
            grads=[[gradient] for gradient in gradients],
            output_params=[[output] for output in outputs],
            scale=scale,
        )
        for group, gradient in zip(reference.param_groups, gradients, strict=True):
            group["params"][0].grad = gradient.float() / scale
        reference.step()
        for group, output in zip(optimizer.param_groups, outputs, strict=True):
            assert torch.equal(output, group["params"][0].detach().bfloat16())
    for group, plain in zip(optimizer.param_groups, reference.param_groups, strict=True):
        torch.testing.assert_close(group["params"], plain["params"], rtol=2e-6, atol=2e-7)
    state = optimizer.state_dict()["state"]
    torch.testing.assert_close(state, reference.state_dict()["state"], rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("changes", "is_taken"),
    [
        ({}, True),
        ({"optimizer": {"type": "AdamW", "params": {"bias_correction": False}}}, False),
        ({"clap": {"optimizer_implementation": "deepspeed"}}, False),
    ],
)
def test_flat_adamw_is_taken_for_its_options(
    write_run: Callable[..., Path], changes: dict[str, Any], is_taken: bool
) -> None:
    run = load_run(write_run(**changes))
    assert takes_flat_adamw(run.deepspeed, run.clap) is is_taken


def wrapped(clip: float, *, cpu_kernels: bool) -> FP16_Optimizer:
    """Return DeepSpeed's bf16 wrapper of two groups, for one rank."""
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(size).bfloat16()) for size in (5000, 7, 300)]
    groups = [{"params": parameters[:2]}, {"params": parameters[2:], "weight_decay": 0.0}]
    inner = FlatAdamW(groups, cpu_kernels=cpu_kernels, **OPTIONS)
    wrapper = FP16_Optimizer(
        inner, low_precision_dtype=torch.bfloat16, clip_grad=clip, fused_adam_legacy=True
    )
    # There is no process group.
    check = wrapper.overflow_checker
    check.check_using_norm = partial(check.check_using_norm, reduce_overflow=False)
    return wrapper


def step(wrapper: FP16_Optimizer, seed: int, poison: float | None = None) -> None:
    """Step with random gradients, at odd seeds without one for the vector of 7 elements."""
    torch.manual_seed(seed)
    for group in wrapper.fp16_groups:
        for parameter in group:
            parameter.grad = torch.randn_like(parameter)
            if len(parameter) == 7 and seed % 2 == 1:
                parameter.grad = None
    if poison is not None:
        wrapper.fp16_groups[1][0].grad[5] = poison
    wrapper.step()
    wrapper.zero_grad()


@pytest.mark.parametrize("cpu_kernels", [True, False])
@pytest.mark.parametrize("clip", [0.0, 20.0])
def test_flat_step_is_deepspeeds_and_skips_gradients_that_arent_finite(
    clip: float, cpu_kernels: bool
) -> None:
    wrapper = wrapped(clip, cpu_kernels=cpu_kernels)
    reference = wrapped(clip, cpu_kernels=cpu_kernels)
    flat_step = FlatStep(wrapper, clip)
    for seed in range(5):
        step(wrapper, seed)
        step(reference, seed)
        assert not flat_step.skipped
        norm = float(wrapper._global_grad_norm)
        assert norm == pytest.approx(reference._global_grad_norm, rel=1e-6)
        step(wrapper, seed, poison=float("-inf"))
        assert flat_step.skipped
    # The clipping factor is rounded once more, which Adam's update amplifies in five steps.
    torch.testing.assert_close(wrapper.state_dict(), reference.state_dict(), rtol=2e-6, atol=2e-7)
    for low, master in zip(wrapper.fp16_groups_flat, wrapper.fp32_groups_flat, strict=True):
        assert torch.equal(low, master.detach().bfloat16())


@NATIVELY
def test_norm_is_exact_over_many_numbers(natively: bool) -> None:
    torch.manual_seed(0)
    tensors = [torch.rand(size).bfloat16() for size in (2**24 + 5, 0, 16_385)]
    tensors.append(torch.rand(3))
    norm = torch.cat([tensor.double() for tensor in tensors]).norm()
    torch.testing.assert_close(norm_of(tensors, natively=natively), norm, rtol=1e-6, atol=0)
    tensors[2][16_384] = float("nan")
    assert norm_of(tensors, natively=natively).isnan()
