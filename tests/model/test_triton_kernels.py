"""Test Triton kernels with its interpreter, on a GPU and in traces, and compile them for every
architecture.

Compiled as the stages of tiny and base launch them, they must use few enough registers."""

import os
import subprocess
import sys
from functools import partial

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

pytest.importorskip("triton", reason="Triton is installed with torch on Linux")


from clap_ds.model.mlp_triton import triton_mlp
from clap_ds.model.swin import Mlp
from tests.model import kernel_cases
from tests.model.kernel_cases import (
    CAPTION_CASES,
    CASES,
    MLP_CASES,
    TOLERANCE,
    captions_by_triton,
    draw_captions,
    draw_mlp,
    eager_captions,
    eager_mlp,
    largest_error,
)
from tests.model.kernel_resources import compile_all


@pytest.mark.end_to_end
def test_the_kernels_agree_with_the_eager_forms_under_the_interpreter() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, kernel_cases.__file__]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) > len(CASES) + len(MLP_CASES) + len(CAPTION_CASES)
    assert [line for line in lines if not line.startswith("ok")] == []


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*MLP_CASES, (40960, 96)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_mlp_agrees_with_the_eager_form_on_a_gpu(
    dtype: torch.dtype, case: tuple[int, int]
) -> None:
    assert largest_error(triton_mlp, eager_mlp, draw_mlp(*case), dtype, "cuda") < TOLERANCE[dtype]


@pytest.mark.gpu
@pytest.mark.parametrize("case", CAPTION_CASES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_attention_of_captions_agrees_with_the_eager_form_on_a_gpu(
    dtype: torch.dtype, case: tuple[tuple[int, ...], int]
) -> None:
    ours, theirs = (partial(each, lengths=case[0]) for each in (captions_by_triton, eager_captions))
    assert largest_error(ours, theirs, draw_captions(*case), dtype, "cuda") < TOLERANCE[dtype]


def test_a_trace_sees_one_operation_each_way_and_every_product() -> None:
    mlp = Mlp(96, 4).bfloat16()
    totals = {}
    for kernel in ("torch", "triton"):
        mlp.kernel = kernel
        with FakeTensorMode(allow_non_fake_inputs=True), FlopCounterMode(display=False) as counter:
            tokens = torch.randn(2, 8, 8, 96, dtype=torch.bfloat16, requires_grad=True)
            output = mlp(tokens)
            output.sum().backward()
            assert output.shape == tokens.shape
            assert all(
                each.grad is not None and each.grad.shape == each.shape for each in mlp.parameters()
            )
        mlp.zero_grad(set_to_none=True)
        totals[kernel] = counter.get_total_flops()
    assert {str(name) for name in counter.get_flop_counts()["Global"]} == {
        "clap_ds.mlp", "clap_ds.mlp_backward", "aten.mm",
    }  # fmt: skip
    # Six products, and the first layer's again in the backward pass.
    product = 2 * 128 * 96 * 384
    assert totals == {"torch": 6 * product, "triton": 7 * product}


LARGEST_SHARED = 99 * 2**10
"""Bytes of shared memory that every architecture gives a program: sm_86, sm_89 and sm_120 have the
least."""


@pytest.mark.end_to_end
def test_kernels_of_every_stage_and_architecture() -> None:
    """They don't spill much, a multiprocessor's 65,536 registers suffice for 28 warps of window
    attention forward, 12 backward and 24 of GELU, and shared memory suffices everywhere."""
    most = {
        ("window_attention", "forward"): 80,
        ("window_attention", "backward"): 168,
        ("gelu", "backward"): 80,
    }
    for each in compile_all():
        name = each.module.rpartition(".")[2].removesuffix("_triton")
        assert each.spilled <= (
            64 if name == "window_attention" or each.architecture in (90, 100) else 450
        ), each
        assert each.registers <= most.get((name, each.way), each.launch.max_registers or 255), each
        assert each.shared <= LARGEST_SHARED, each
