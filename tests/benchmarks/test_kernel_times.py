"""Rows of the kernels' table, with a linear layer in place of kernels."""

import itertools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import kernel_times
from benchmarks.kernel_times import Case, attention_cases, measure, mlp_cases
from clap_ds.config.model import load_preset
from clap_ds.model import gelu_linear_triton

SHAPES = [(6, 8, 16), (32, 16)]
LINEAR = Case("linear", "16", F.linear, F.linear, SHAPES, moved=(1.0, 2.0), flops=(1.0, 2.0))


def run_instead_of_timing(function: Callable[[], object]) -> float:
    return float(function() is not None)


def raise_two_lines(*_: Tensor) -> Tensor:
    raise RuntimeError("no kernel image\nfor this device")


def test_wrong_or_failing_kernel_is_a_row(monkeypatch):
    monkeypatch.setattr(kernel_times, "median_ms", run_instead_of_timing)
    forward, backward = measure(LINEAR)
    assert (forward["pass"], backward["flops"]) == ("forward", 2.0)
    assert 0 < forward["error"] == forward["torch_error"] < 0.01
    assert forward["ms"] == backward["torch_ms"] == 1
    wrong, _ = measure(LINEAR._replace(ours=lambda x, w: 1.5 * F.linear(x, w)))
    assert wrong["error"] > 0.3
    failing, _ = measure(LINEAR._replace(ours=raise_two_lines))
    assert failing["note"] == "no kernel image"


def test_command_saves_the_rows_of_every_case(monkeypatch, tmp_path):
    monkeypatch.setattr(torch, "set_default_device", lambda device: None)
    for name, value in (("is_available", True), ("get_device_name", "GPU"), ("empty_cache", None)):
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    monkeypatch.setattr(kernel_times, "peaks", lambda: (1e12, 1e15))
    monkeypatch.setattr(kernel_times, "median_ms", run_instead_of_timing)
    for name in ("attention_cases", "mlp_cases", "text_cases"):
        monkeypatch.setattr(kernel_times, name, lambda *_: [LINEAR])
    kernel_times.main(["--clips", "3", "--output", str(tmp_path / "kernels.md")])
    text = (tmp_path / "kernels.md").read_text()
    assert text.count("linear") == 5 * 2
    # Of the text tower and three stages each of tiny and base.
    assert text.count("product with GELU") == 7 * 2


@pytest.mark.parametrize(("kernel_ms", "faster"), [(1.0, "one kernel"), (3.0, "two kernels")])
def test_product_with_gelu_is_compared_with_separate_kernels(monkeypatch, kernel_ms, faster):
    times_ms = itertools.cycle([2.0, kernel_ms, 4.0])
    monkeypatch.setattr(kernel_times, "median_ms", lambda function: next(times_ms))
    tiles = [gelu_linear_triton.LARGE, gelu_linear_triton.SMALL]
    monkeypatch.setattr(kernel_times, "usable_tiles", lambda *_: tiles)
    for row in kernel_times.measure_product(10, 64, 256):
        assert row["flops"] == 2 * 10 * 64 * 256
        assert (row["ms"], row["torch_ms"]) == (kernel_ms, 2.0)
        assert row["note"] == f"{faster} faster; {{256: {kernel_ms}, 128: 4.0}}"


@pytest.mark.parametrize("cases", [attention_cases, mlp_cases])
def test_flops_are_those_of_torch(cases):
    case = next(cases(load_preset("htsat_tiny_roberta_base").audio, 1))
    inputs = [torch.ones(shape) for shape in case.shapes]
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        case.torchs(*inputs)
    flops = counter.get_total_flops()
    # A kernel's backward pass computes twice the forward pass, and one product of it again.
    assert case.flops == (flops, 2.5 * flops)
