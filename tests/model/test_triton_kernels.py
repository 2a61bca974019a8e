"""Test Triton kernels with its interpreter, on a GPU and in traces, and compile them for every architecture.

Compiled as the stages of tiny and base launch them, they must use few enough registers."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

pytest.importorskip("triton", reason="Triton is installed with torch on Linux")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from clap_ds.config.model import AudioConfig, load_preset
from clap_ds.model import gelu_triton, mlp_triton, text_attention_triton, window_attention_triton
from clap_ds.model.mlp_triton import supports, triton_mlp
from clap_ds.model.swin import Mlp
from clap_ds.model.triton_common import Launch
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
def test_the_mlp_agrees_with_the_eager_form_on_a_gpu(dtype: torch.dtype, case: tuple[int, int]) -> None:
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
            assert all(each.grad is not None and each.grad.shape == each.shape for each in mlp.parameters())
        mlp.zero_grad(set_to_none=True)
        totals[kernel] = counter.get_total_flops()
    assert {str(name) for name in counter.get_flop_counts()["Global"]} == {
        "clap_ds.mlp", "clap_ds.mlp_backward", "aten.mm",
    }  # fmt: skip
    # Six products, and the first layer's again in the backward pass.
    product = 2 * 128 * 96 * 384
    assert totals == {"torch": 6 * product, "triton": 7 * product}


def kernels_of(audio: AudioConfig) -> Iterator[tuple[Any, str, Any, Launch]]:
    """Yield a model's kernels as module, way, constants and launch: attention of its first and last stage, between which only
    grid and number of heads differ, attention of captions of 77 tokens, every MLP that has a kernel, and GELU."""
    constants = {"BLOCK": gelu_triton.BLOCK, "CHUNK": gelu_triton.CHUNK, "WIDEN": False}
    yield gelu_triton, "backward", constants, gelu_triton.BACKWARD
    for way, launch in (("forward", window_attention_triton.FORWARD), ("backward", window_attention_triton.BACKWARD)):
        for stage, shift in ((0, 0), (0, 4), (-1, 0)):
            grid, heads, dim = audio.stage_grids[stage], audio.num_heads[stage], audio.stage_dims[stage]
            tensors = (torch.empty(1, grid, grid, 3 * dim, device="meta"), torch.empty(heads, 64, 64, device="meta"))
            yield window_attention_triton, way, window_attention_triton._constants(*tensors, 8, shift), launch
        constants = text_attention_triton._arguments(torch.empty(1, 3 * 768, device="meta"), 12, 77, 0.1)[1]
        launch = getattr(text_attention_triton, way.upper())
        yield text_attention_triton, way, constants, launch
    for dim in filter(lambda dim: supports(dim, audio.mlp_ratio * dim), audio.stage_dims):
        tensors = (torch.empty(1, dim, device="meta"), torch.empty(audio.mlp_ratio * dim, dim, device="meta"))
        blocks = mlp_triton.FORWARD_BLOCK, mlp_triton.BACKWARD_BLOCK
        for way, block, launch in zip(
            ("forward", "backward"), blocks, (mlp_triton.FORWARD, mlp_triton.BACKWARD), strict=True
        ):
            yield mlp_triton, way, mlp_triton._constants(*tensors, block), launch


def compile_for(
    module: str, way: str, constants: dict[str, Any], launch: Launch, architecture: int
) -> tuple[int, int, int]:
    """Compile a kernel for an architecture, 90 as sm_90a. Return a thread's registers and spilled bytes, and a program's bytes
    of shared memory."""
    kernel = getattr(sys.modules[module], f"_{way}_kernel")
    names = [parameter.name for parameter in kernel.params if not parameter.is_constexpr]
    types = {"scale": "fp32", "inverse_keep": "fp32", "d_bias_ptr": "*fp32", "d_biases_ptr": "*fp32"}
    types |= {"bounds_ptr": "*i32", "lengths_ptr": "*i32", "seeds_ptr": "*u32", "sums_ptr": "*fp32"}
    signature = {name: types.get(name, "*bf16" if name.endswith("_ptr") else "i32") for name in names}
    multiples = [name for name in names if name.endswith("_ptr") or name == "num_units"]
    aligned = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in multiples}
    source = ASTSource(kernel, signature | dict.fromkeys(constants, "constexpr"), constants, aligned)
    compiled: Any = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=launch.options())
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = dict(each.split(":") for each in said.split() if each.startswith(("REG:", "STACK:")))
    return int(found["REG"]), int(found["STACK"]), compiled.metadata.shared


LARGEST_SHARED = 99 * 2**10
"""Bytes of shared memory that every architecture gives a program: sm_86, sm_89 and sm_120 have the least."""


@pytest.mark.end_to_end
def test_kernels_of_every_stage_and_architecture() -> None:
    """Compile tiny's and base's for Hopper, base's wider ones for the others. They don't spill much, a multiprocessor's 65,536
    registers suffice for 28 warps of attention forward, 12 backward and 24 of GELU, and shared memory suffices everywhere."""
    tiny, base = (list(kernels_of(load_preset(f"htsat_{name}_roberta_base").audio)) for name in ("tiny", "base"))
    jobs = [
        *((*each, 90) for each in tiny),
        *((*each, number) for number in (80, 86, 89, 90, 100, 120) for each in base),
    ]
    most = {
        (window_attention_triton, "forward"): 80,
        (window_attention_triton, "backward"): 168,
        (gelu_triton, "backward"): 80,
    }
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        found = pool.map(compile_for, *zip(*((module.__name__, *rest) for module, *rest in jobs), strict=True))
        for job, (registers, spilled, shared) in zip(jobs, found, strict=True):
            module, way, _, launch, architecture = job
            assert spilled <= (64 if module is window_attention_triton or architecture in (90, 100) else 450), job
            assert registers <= most.get((module, way), launch.max_registers or 255), job
            assert shared <= LARGEST_SHARED, job
