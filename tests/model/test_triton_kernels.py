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


from clap_ds.model.swin import Mlp
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


def test_traced_mlp_is_one_operation_each_way_with_every_product():
    totals = {}
    for kernel in ("torch", "triton"):
        mlp = Mlp(96, 4).bfloat16()
        mlp.kernel = kernel
        with FakeTensorMode(allow_non_fake_inputs=True), FlopCounterMode(display=False) as counter:
            tokens = torch.randn(2, 8, 8, 96, dtype=torch.bfloat16, requires_grad=True)
            mlp(tokens).sum().backward()
        totals[kernel] = counter.get_total_flops()
    operations = {str(name) for name in counter.get_flop_counts()["Global"]}
    assert operations == {"clap_ds.mlp", "clap_ds.mlp_backward", "aten.mm"}
    # Six products, and the first layer's again in the backward pass.
    product = 2 * 128 * 96 * 384
    assert totals == {"torch": 6 * product, "triton": 7 * product}


LARGEST_SHARED = 99 * 2**10
"""Bytes of shared memory that every architecture gives a program: sm_86, sm_89 and sm_120 have the
least."""
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
        has_few_spills = kernel.name == "window_attention" or architecture in (90, 100)
        assert spilled <= (64 if has_few_spills else 450), resources
        limit = kernel.launch.max_registers or 255
        assert registers <= MOST_REGISTERS.get((kernel.name, kernel.way), limit), resources
        assert shared <= LARGEST_SHARED, resources
