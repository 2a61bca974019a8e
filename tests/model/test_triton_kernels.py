"""Test Triton kernels with its interpreter, on a GPU and in traces, and compile them for every
architecture.

Compiled as the stages of tiny and base launch them, they must use few enough registers."""

import os
import subprocess
import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

pytest.importorskip("triton", reason="Triton is installed with torch on Linux")


from clap_ds.config.model import load_preset
from clap_ds.model.swin import Mlp
from clap_ds.model.text import TextLayer
from tests.model import kernel_cases
from tests.model.kernel_cases import (
    TOLERANCE,
    Case,
    compare_mlp,
    compare_windows,
    kernel_comparisons,
    largest_error,
)
from tests.model.kernel_resources import compile_all

TEXT = load_preset("demo").text.model_copy(
    update={"hidden_size": 192, "intermediate_size": 768},
)
LARGE = [compare_mlp(40960, 96), compare_windows(Case(64, 4, 24, 4))]


@pytest.mark.end_to_end
def test_kernels_under_interpreter_equal_eager_forms():
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, kernel_cases.__file__]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("comparison", [*kernel_comparisons(), *LARGE], ids=lambda it: it.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_kernels_on_gpu_equal_eager_forms(dtype, comparison):
    _, compute, exact, inputs = comparison
    assert largest_error(compute, exact, inputs, dtype, "cuda") < TOLERANCE[dtype]


def trace(compute, module, kernel, *tokens):
    """Return the FLOPs of a module's forward and backward pass by operation."""
    module.bfloat16().kernel = kernel
    with FakeTensorMode(allow_non_fake_inputs=True), FlopCounterMode(display=False) as counter:
        compute(torch.randn(*tokens, dtype=torch.bfloat16, requires_grad=True)).sum().backward()
    return {str(name): flops for name, flops in counter.get_flop_counts()["Global"].items()}


def test_traced_mlp_is_one_operation_each_way_with_every_product():
    mlp = Mlp(96, 4)
    product = 2 * 128 * 96 * 384
    assert sum(trace(mlp, mlp, "torch", 2, 8, 8, 96).values()) == 6 * product
    flops = trace(mlp, mlp, "triton", 2, 8, 8, 96)
    # Six products, and the first layer's again in the backward pass.
    expected = {"clap_ds.mlp": 2, "clap_ds.mlp_backward": 3, "aten.mm": 2}
    assert flops == {name: number * product for name, number in expected.items()}


def test_traced_wide_mlp_has_products_with_gelu_of_as_many_flops():
    mlp = Mlp(192, 4)
    layer = TextLayer(TEXT, 0.0, first_only=False)
    product = 2 * 128 * 192 * 768
    expected = {
        "clap_ds.linear_gelu": 1,
        "clap_ds.gelu_linear_backward": 1,
        "aten.addmm": 1,
        "aten.mm": 3,
    }
    for compute, module in ((mlp, mlp), (layer.mlp, layer)):
        flops = trace(compute, module, "triton", 2, 8, 8, 192)
        assert flops == {name: number * product for name, number in expected.items()}
        assert sum(trace(compute, module, "triton_gelu", 2, 8, 8, 192).values()) == 6 * product


LARGEST_SHARED = 99 * 2**10
"""Bytes of shared memory that every architecture gives a program: sm_86, sm_89 and sm_120 have the
least."""
HOPPERS_SHARED = 227 * 2**10
"""And what sm_90 and sm_100 give."""
MOST_REGISTERS = {
    ("window_attention", "forward"): 80,
    ("window_attention", "backward"): 168,
    ("gelu", "forward"): 40,
    ("gelu", "backward"): 80,
}
"""For 28 warps of window attention forward, 12 backward, 48 of GELU and 24 backward, of 65,536
registers."""


@pytest.mark.end_to_end
def test_kernels_of_every_stage_and_architecture_fit_registers_and_shared_memory():
    # sm_86 and sm_89 have sm_80's instructions.
    for resources in compile_all((80, 90, 100, 120)):
        kernel, architecture, registers, spilled, shared = resources
        is_large = architecture in (90, 100)
        has_few_spills = is_large or kernel.name in ("window_attention", "gelu_linear")
        assert spilled <= (72 if has_few_spills else 450), resources
        limit = kernel.launch.max_registers or 255
        assert registers <= MOST_REGISTERS.get((kernel.name, kernel.way), limit), resources
        assert shared <= (HOPPERS_SHARED if is_large else LARGEST_SHARED), resources
