"""The dropout check accepts both layers' dropout and detects wrong ones, on CPUs, with Triton's
interpreter."""

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import dropout_check
from clap_ds.model import dropout
from tests.processes import ROOT

BACKEND = "aot_eager_decomp_partition"


def list_wrong_rows() -> list[str]:
    torch._dynamo.reset()
    rows = dropout_check.check_dropout(torch.device("cpu"), BACKEND)
    return [row["name"] for row in rows if row["wrong"]]


def draw_constant_seed(*_: Any, device: torch.device, **__: Any) -> Tensor:
    return torch.full((), 7, dtype=torch.int32, device=device)


@pytest.fixture
def elements_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without text attention, whose kernel needs Triton's interpreter."""
    monkeypatch.setattr(dropout_check, "LAYERS", {"dropout": dropout_check.LAYERS["dropout"]})


@pytest.mark.usefixtures("elements_alone")
def test_hashed_dropout_has_no_wrong_property():
    assert list_wrong_rows() == []


@pytest.mark.usefixtures("elements_alone")
def test_constant_seed_is_detected(monkeypatch):
    monkeypatch.setattr(torch, "randint", draw_constant_seed)
    properties = [name.split(", ")[1] for name in list_wrong_rows()]
    assert properties == [f"{name} have different masks" for name in ("layers", "steps", "ranks")]


@pytest.mark.usefixtures("elements_alone")
def test_other_probability_is_detected(monkeypatch):
    scale = (1 - 2 * dropout_check.P) / (1 - dropout_check.P)
    wrong_dropout = lambda values, p: scale * dropout.hash_dropout(values, 2 * p)  # noqa: E731
    monkeypatch.setattr(dropout_check, "hash_dropout", wrong_dropout)
    assert any("zeros" in name for name in list_wrong_rows())


TRITON = """
import torch
from tests.benchmarks.test_dropout_check import draw_constant_seed, list_wrong_rows
print("right:", list_wrong_rows())
torch.randint = lambda low, high, shape, **options: draw_constant_seed(**options).expand(shape).contiguous()
print("constant:", len(list_wrong_rows()))
"""


@pytest.mark.end_to_end
def test_dropout_of_the_text_attention_kernel_is_right_and_a_constant_seed_detected():
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-c", TRITON]
    process = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    output = process.stdout + process.stderr
    assert process.stdout.splitlines() == ["right: []", "constant: 6"], output
