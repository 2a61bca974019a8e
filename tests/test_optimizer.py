"""Flat AdamW against torch's, and which runs it steps."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from clap_ds.engine import takes_flat_adamw
from clap_ds.optimizer import FlatAdamW
from clap_ds.settings import load_run

OPTIONS = {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}


def masters() -> list[torch.nn.Parameter]:
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(size)) for size in (100, 7)]


@pytest.mark.parametrize("scale", [1.0, 8.0, torch.tensor(8.0)])
def test_flat_gradients_are_unscaled_and_new_weights_handed_out(scale: float | torch.Tensor) -> None:
    plain, flat = masters(), masters()
    reference = torch.optim.AdamW([{"params": [p]} for p in plain], foreach=False, **OPTIONS)
    optimizer = FlatAdamW([{"params": [p]} for p in flat], **OPTIONS)
    for step in range(5):
        torch.manual_seed(step)
        low = [torch.zeros(len(p), dtype=torch.bfloat16) for p in flat]
        gradients = [torch.randn(len(p)).bfloat16() for p in flat]
        for p, gradient in zip(plain, gradients, strict=True):
            p.grad = gradient.float() / 8 if scale != 1.0 else gradient.float()
        reference.step()
        optimizer.step(grads=[[g] for g in gradients], output_params=[[p] for p in low], scale=scale)
        for p, q, copied in zip(plain, flat, low, strict=True):
            torch.testing.assert_close(q, p)
            assert torch.equal(copied, q.detach().bfloat16())
            assert q.grad is None


def test_without_a_wrapper_it_is_torchs() -> None:
    plain, ours = masters(), masters()
    reference, optimizer = torch.optim.AdamW(plain, **OPTIONS), FlatAdamW(ours, **OPTIONS)
    for _ in range(3):
        for p, q in zip(plain, ours, strict=True):
            p.grad, q.grad = p.detach() * 2, q.detach() * 2
        reference.step()
        optimizer.step()
        optimizer.zero_grad()
        assert all(q.grad is None for q in ours)
    for p, q in zip(plain, ours, strict=True):
        torch.testing.assert_close(q, p)
    # Its state is of the same form, so that either goes on from the other's.
    again = FlatAdamW(copy.deepcopy(ours), **OPTIONS)
    again.load_state_dict(reference.state_dict())
    assert float(again.state[again.param_groups[0]["params"][0]]["step"]) == 3


@pytest.mark.parametrize(
    ("changes", "taken"),
    [
        ({}, True),
        ({"bf16": {"enabled": False}}, True),
        ({"optimizer": {"type": "adam", "params": {"lr": 1e-3, "adam_w_mode": True}}}, True),
        ({"optimizer": {"type": "AdamW"}}, True),
        ({"optimizer": {"type": "AdamW", "params": {"torch_adam": False, "fused": True}}}, True),
        ({"optimizer": {"type": "Adam", "params": {"adam_w_mode": False}}}, False),
        ({"optimizer": {"type": "AdamW", "params": {"torch_adam": True}}}, False),
        ({"optimizer": {"type": "AdamW", "params": {"bias_correction": False}}}, False),
        ({"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}, False),
        ({"clap": {"fused_adam": "deepspeed"}}, False),
    ],
)
def test_runs_it_steps(write_run: Callable[..., Path], changes: dict[str, Any], taken: bool) -> None:
    assert takes_flat_adamw(load_run(write_run(**changes))) is taken
