"""The dropout check accepts both layers' dropout and detects wrong ones, on CPUs, with Triton's
interpreter."""

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import dropout_check
from clap_ds.model import dropout
from tests.processes import ROOT

BACKEND = "aot_eager_decomp_partition"


def wrong_rows() -> list[str]:
    torch._dynamo.reset()
    return [
        row["name"]
        for row in dropout_check.check_dropout(torch.device("cpu"), BACKEND)
        if row["wrong"]
    ]


def draw_constant_seed(*_: Any, device: torch.device, **__: Any) -> Tensor:
    return torch.full((), 7, dtype=torch.int32, device=device)


def store_other_mask(values: Tensor, p: float) -> Tensor:
    """Scale by one mask forward and by another one backward."""
    seed = torch.randint(-(2**31), 2**31, (), dtype=torch.int32)
    forward = dropout._dropped(values.detach(), seed, p)
    backward = dropout._dropped(values, seed + 1, p)
    return backward + (forward - backward).detach()


def double_share(values: Tensor, p: float) -> Tensor:
    return dropout.hash_dropout(values, 2 * p) * (1 - 2 * p) / (1 - p)


@pytest.fixture
def elements_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without text attention, whose kernel needs Triton's interpreter."""
    monkeypatch.setattr(dropout_check, "LAYERS", {"dropout": dropout_check.LAYERS["dropout"]})


@pytest.mark.usefixtures("elements_alone")
def test_hashed_dropout_is_right() -> None:
    assert wrong_rows() == []


@pytest.mark.usefixtures("elements_alone")
def test_a_constant_seed_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "randint", draw_constant_seed)
    assert [name.split(", ")[1] for name in wrong_rows()] == [
        "layers have different masks", "steps have different masks", "ranks have different masks",
    ]  # fmt: skip


@pytest.mark.usefixtures("elements_alone")
@pytest.mark.parametrize(
    ("wrong_dropout", "property_"),
    [(store_other_mask, "both passes"), (double_share, "zeros: 0.2")],
)
def test_other_masks_backward_and_another_share_are_detected(
    monkeypatch: pytest.MonkeyPatch,
    wrong_dropout: Callable[[Tensor, float], Tensor],
    property_: str,
) -> None:
    monkeypatch.setattr(dropout_check, "hash_dropout", wrong_dropout)
    (name,) = wrong_rows()
    assert property_ in name


TRITON = """
import torch
from tests.benchmarks.test_dropout_check import draw_constant_seed, wrong_rows
print("right:", wrong_rows())
torch.randint = lambda low, high, shape, **options: draw_constant_seed(**options).expand(shape).contiguous()
print("constant:", len(wrong_rows()))
"""


@pytest.mark.end_to_end
def test_text_attention_kernels_dropout_is_right_and_its_constant_seed_is_detected() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    ended = subprocess.run(
        [sys.executable, "-c", TRITON], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert ended.stdout.splitlines() == ["right: []", "constant: 6"], ended.stdout + ended.stderr
