"""Flat AdamW agrees with torch's, for both kernels; `test_engine.py` tests the whole step."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from clap_ds.config.settings import load_run
from clap_ds.engine.factory import takes_flat_adamw
from clap_ds.engine.optimizer import FlatAdamW, norm_of
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
def test_steps_of_flat_groups_are_torchs(natively, scale):
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
def test_flat_adamw_is_taken_for_its_options(write_run, changes, is_taken):
    run = load_run(write_run(**changes))
    assert takes_flat_adamw(run.deepspeed, run.clap) is is_taken


@NATIVELY
def test_norm_is_exact_over_many_numbers(natively):
    torch.manual_seed(0)
    tensors = [torch.rand(size).bfloat16() for size in (2**24 + 5, 0, 16_385)]
    tensors.append(torch.rand(3))
    norm = torch.cat([tensor.double() for tensor in tensors]).norm()
    torch.testing.assert_close(norm_of(tensors, natively=natively), norm, rtol=1e-6, atol=0)
    tensors[2][16_384] = float("nan")
    assert norm_of(tensors, natively=natively).isnan()
