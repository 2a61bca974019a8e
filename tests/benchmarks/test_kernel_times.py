"""Rows of the kernels' table, with a linear layer in place of kernels."""

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import kernel_times
from benchmarks.kernel_times import Case, attention_cases, measure, mlp_cases
from clap_ds.config.model import AudioConfig, load_preset

SHAPES = [(6, 8, 16), (32, 16)]
LINEAR = Case("linear", "16", F.linear, F.linear, SHAPES, moved=(1.0, 2.0), flops=(1.0, 2.0))


def run_instead_of_timing(function: Callable[[], object]) -> float:
    return float(function() is not None)


def raise_two_lines(*_: Tensor) -> Tensor:
    raise RuntimeError("no kernel image\nfor this device")


def test_wrong_or_failing_kernel_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_times, "median_ms", run_instead_of_timing)
    forward, backward = measure(LINEAR)
    assert (forward["pass"], backward["flops"]) == ("forward", 2.0)
    assert 0 < forward["error"] == forward["torch_error"] < 0.01
    assert forward["ms"] == backward["torch_ms"] == 1
    wrong, _ = measure(LINEAR._replace(ours=lambda x, w: 1.5 * F.linear(x, w)))
    assert wrong["error"] > 0.3
    failing, _ = measure(LINEAR._replace(ours=raise_two_lines))
    assert failing["note"] == "no kernel image"


@pytest.mark.parametrize("cases", [attention_cases, mlp_cases])
def test_flops_are_those_of_torch(cases: Callable[[AudioConfig, int], Iterator[Case]]) -> None:
    case = next(cases(load_preset("htsat_tiny_roberta_base").audio, 1))
    inputs = [torch.ones(shape) for shape in case.shapes]
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        case.torchs(*inputs)
    flops = counter.get_total_flops()
    # A kernel's backward pass computes twice the forward pass, and one product of it again.
    assert case.flops == (flops, 2.5 * flops)
