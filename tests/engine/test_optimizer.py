"""Compare flat AdamW with torch's, for both kernels, and its step with DeepSpeed's; check which
runs use it."""

import copy
from collections.abc import Callable
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
SIZES = (1, 15, 16, 33, 100, 40_003)


@pytest.mark.parametrize("natively", [False, pytest.param(True, marks=needs_kernels)])
@pytest.mark.parametrize("scale", [1.0, 3.0, torch.tensor(8.0)])
def test_steps_of_flat_groups_are_torchs(natively: bool, scale: float | torch.Tensor) -> None:
    """Check that gradients are unscaled and new weights copied to the outputs."""
    torch.manual_seed(0)
    flat = [torch.nn.Parameter(torch.randn(size)) for size in SIZES]
    plain = [torch.nn.Parameter(each.detach().clone()) for each in flat]
    changes: list[Any] = [
        {"weight_decay": 0.1 * (i % 2), "lr": 1e-2 / (i + 1)} for i in range(len(SIZES))
    ]
    ours = FlatAdamW(
        [{"params": [p], **of} for p, of in zip(flat, changes, strict=True)],
        cpu_kernels=natively,
        **OPTIONS,
    )
    groups = [{"params": [p], **of} for p, of in zip(plain, changes, strict=True)]
    reference = torch.optim.AdamW(groups, foreach=False, **OPTIONS)
    for _ in range(6):
        low = [torch.zeros(size, dtype=torch.bfloat16) for size in SIZES]
        gradients = [torch.randn(size).bfloat16() for size in SIZES]
        for p, gradient in zip(plain, gradients, strict=True):
            p.grad = gradient.float() / scale
        reference.step()
        ours.step(
            grads=[[each] for each in gradients],
            output_params=[[each] for each in low],
            scale=scale,
        )
        for p, q, copied in zip(plain, flat, low, strict=True):
            torch.testing.assert_close(q, p, rtol=2e-6, atol=2e-7)
            assert torch.equal(copied, q.detach().bfloat16())
            assert q.grad is None
    states = [each.state_dict()["state"] for each in (ours, reference)]
    torch.testing.assert_close(*states, rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("changes", "taken"),
    [
        ({}, True),
        ({"optimizer": {"type": "adam", "params": {"lr": 1e-3}}}, True),
        ({"optimizer": {"type": "AdamW", "params": {"bias_correction": False}}}, False),
        ({"clap": {"optimizer_implementation": "deepspeed"}}, False),
    ],
)
def test_runs_it_steps(
    write_run: Callable[..., Path], changes: dict[str, Any], taken: bool
) -> None:
    run = load_run(write_run(**changes))
    assert takes_flat_adamw(run.deepspeed, run.clap) is taken


def wrapped(clip: float, *, cpu_kernels: bool, low: torch.dtype = torch.bfloat16) -> FP16_Optimizer:
    """Return DeepSpeed's wrapper of two groups, for one rank."""
    torch.manual_seed(0)
    first, second, third = (
        torch.nn.Parameter(torch.randn(size).to(low)) for size in (5000, 7, 300)
    )
    groups = [{"params": [first, second]}, {"params": [third], "weight_decay": 0.0}]
    inner = FlatAdamW(groups, cpu_kernels=cpu_kernels, **OPTIONS)
    wrapper = FP16_Optimizer(inner, low_precision_dtype=low, clip_grad=clip, fused_adam_legacy=True)
    check = wrapper.overflow_checker
    check.check_using_norm = partial(check.check_using_norm, reduce_overflow=False)
    return wrapper


def step(wrapper: FP16_Optimizer, seed: int, poison: float | None = None) -> None:
    torch.manual_seed(seed)
    for parameter in (each for group in wrapper.fp16_groups for each in group):
        parameter.grad = torch.randn_like(parameter)
        if len(parameter) == 7 and seed % 2:
            parameter.grad = None
    if poison is not None:
        wrapper.fp16_groups[1][0].grad[5] = poison
    wrapper.step()
    wrapper.zero_grad()


def everything(wrapper: FP16_Optimizer) -> dict[str, Any]:
    return copy.deepcopy({"state": wrapper.state_dict(), "low": wrapper.fp16_groups})


@pytest.mark.parametrize("cpu_kernels", [True, False])
@pytest.mark.parametrize("clip", [0.0, 20.0, 1e9])
def test_the_step_on_the_device_is_deepspeeds(clip: float, cpu_kernels: bool) -> None:
    ours, reference = (wrapped(clip, cpu_kernels=cpu_kernels) for _ in range(2))
    assert FlatStep.is_applicable(ours)
    FlatStep(ours, clip)
    for seed in range(5):
        step(ours, seed)
        step(reference, seed)
        assert float(ours._global_grad_norm) == pytest.approx(reference._global_grad_norm, rel=1e-6)
    # The clipping factor is rounded once more, which Adam's update amplifies in five steps.
    torch.testing.assert_close(
        everything(ours)["state"], everything(reference)["state"], rtol=2e-6, atol=2e-7
    )
    for low, master in zip(ours.fp16_groups_flat, ours.fp32_groups_flat, strict=True):
        assert torch.equal(low, master.detach().bfloat16())


@pytest.mark.parametrize("cpu_kernels", [True, False])
@pytest.mark.parametrize("poison", [float("nan"), float("-inf")])
def test_a_gradient_that_is_not_finite_changes_nothing(poison: float, cpu_kernels: bool) -> None:
    wrapper = wrapped(1.0, cpu_kernels=cpu_kernels)
    flat_step = FlatStep(wrapper, 1.0)
    for seed in (0, 1, 2):
        step(wrapper, seed)
        before = everything(wrapper)
        was_skipped = bool(flat_step.skipped)
        step(wrapper, seed, poison)
        torch.testing.assert_close(everything(wrapper), before, rtol=0, atol=0)
        assert (was_skipped, bool(flat_step.skipped)) == (False, True)
    assert [float(each["step"]) for each in wrapper.optimizer.state.values()] == [
        4,
        4,
    ]  # incl. DeepSpeed's first


@pytest.mark.parametrize("natively", [False, pytest.param(True, marks=needs_kernels)])
def test_norm_is_exact_over_many_numbers(natively: bool) -> None:
    torch.manual_seed(0)
    sizes = (
        (2**24 + 5, torch.bfloat16),
        (3, torch.float32),
        (0, torch.bfloat16),
        (16_385, torch.bfloat16),
    )
    tensors = [torch.rand(size).to(dtype) for size, dtype in sizes]
    expected = torch.cat([each.double() for each in tensors]).square().sum().sqrt()
    torch.testing.assert_close(norm_of(tensors, natively=natively), expected, rtol=1e-6, atol=0)
    tensors[3][16_384] = float("nan")
    assert norm_of(tensors, natively=natively).isnan()
