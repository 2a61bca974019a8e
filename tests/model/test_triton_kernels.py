"""Triton's kernels: right under its interpreter and on a GPU, compiled ahead of time for every architecture as the stages of
tiny and base launch them, with no more registers than let enough programs be resident, and seen whole by traces."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

pytest.importorskip("triton", reason="Triton is installed with torch on Linux")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from clap_ds.config.model import AudioConfig, load_preset
from clap_ds.model import mlp_triton, window_attention_triton
from clap_ds.model.clap import ClapModel
from clap_ds.model.mlp_triton import supports, triton_mlp
from clap_ds.model.swin import Mlp
from clap_ds.model.triton_common import Launch
from clap_ds.native.convert import NativeSwinBlock
from tests.model import kernel_cases
from tests.model.kernel_cases import CASES, MLP_CASES, TOLERANCE, draw_mlp, eager_mlp, largest_error


@pytest.mark.end_to_end
def test_the_kernels_agree_with_the_eager_forms_under_the_interpreter() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, kernel_cases.__file__]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["ok"] * (len(CASES) + 2 + len(MLP_CASES) + 2)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*MLP_CASES, (40960, 96), (10240, 192)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_mlp_agrees_with_the_eager_form_on_a_gpu(dtype: torch.dtype, case: tuple[int, int]) -> None:
    assert largest_error(triton_mlp, eager_mlp, draw_mlp(*case), dtype, "cuda") < TOLERANCE[dtype]


@pytest.mark.parametrize(
    ("dim", "hidden", "expected"),
    [(96, 384, True), (256, 1024, True), (384, 1536, False), (112, 448, False), (96, 400, False), (16, 64, False)],
)
def test_which_widths_have_kernels(dim: int, hidden: int, expected: bool) -> None:
    """Two powers of two from 16 on make 96, not 112; below 32 there aren't two."""
    assert supports(dim, hidden) == expected


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
    # Six products, and the first linear's once more for the backward pass.
    product = 2 * 128 * 96 * 384
    assert totals == {"torch": 6 * product, "triton": 7 * product}


@pytest.mark.parametrize("mlp", ["torch", "triton"])
def test_the_model_takes_it_where_asked_and_fitting(mlp: Any) -> None:
    with torch.device("meta"):
        model = ClapModel(load_preset("htsat_tiny_roberta_base"), attention="matmul", mlp=mlp)
    narrow = mlp == "triton"
    assert [block.mlp.kernel == "triton" for block in model.audio.blocks()] == [narrow] * 4 + [False] * 8
    # CPU kernels, where they run, leave such a block alone.
    assert NativeSwinBlock.fits(model.audio.blocks()[0]) == (not narrow)


class Case(NamedTuple):
    """A kernel as a stage launches it. `way` is `forward` or `backward`."""

    kernel: str
    way: str
    shape: tuple[int, ...]
    """(grid, heads, head dim, shift) of `attention`, (channels, hidden units) of `mlp`."""
    launch: Launch


def cases_of(audio: AudioConfig) -> Iterator[Case]:
    """A model's kernels as they are launched: the attention of its first and last stage, between which only the grid's size and
    the number of heads differ, and every MLP that there is a kernel for."""
    found: list[tuple[str, tuple[int, ...], tuple[Launch, Launch]]] = []
    attention = (window_attention_triton.FORWARD, window_attention_triton.BACKWARD)
    for stage, shift in ((0, 0), (0, 4), (-1, 0)):
        heads, dim = audio.num_heads[stage], audio.stage_dims[stage]
        found.append(("attention", (audio.stage_grids[stage], heads, dim // heads, shift), attention))
    sizes = [(dim, audio.mlp_ratio * dim) for dim in audio.stage_dims]
    found += [("mlp", size, mlp_triton.launches(size[0])) for size in sizes if supports(*size)]
    for kernel, shape, launches in found:
        for way, launch in zip(("forward", "backward"), launches, strict=True):
            yield Case(kernel, way, shape, launch)


def compile_for(case: Case, architecture: int) -> tuple[int, int]:
    """Compiles a kernel for an architecture: 80, 90 (as sm_90a) or 100. Registers of a thread, its bytes that spill."""
    kernel, constants = _kernel_of(case)
    names = [parameter.name for parameter in kernel.params if not parameter.is_constexpr]
    signature = {name: _type_of(name) for name in names} | dict.fromkeys(constants, "constexpr")
    aligned = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in names if name.endswith("_ptr")}
    source, target = ASTSource(kernel, signature, constants, aligned), GPUTarget("cuda", architecture, 32)
    compiled: Any = triton.compile(source, target=target, options=case.launch.options())
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = dict(each.split(":") for each in said.split() if each.startswith(("REG:", "STACK:")))
    return int(found["REG"]), int(found["STACK"])


def _kernel_of(case: Case) -> tuple[Any, dict[str, Any]]:
    """The kernel and its compile-time arguments, as its module makes them of tensors of the shape."""
    module: Any = window_attention_triton if case.kernel == "attention" else mlp_triton
    if case.kernel == "attention":
        grid, heads, dim, shift = case.shape
        shapes, numbers = ((1, grid, grid, 3 * heads * dim), (heads, 64, 64)), (8, shift)
    else:
        channels, hidden = case.shape
        block = module.FORWARD_BLOCK if case.way == "forward" else module.BACKWARD_BLOCK
        shapes, numbers = ((1, channels), (hidden, channels)), (block,)
    tensors = (torch.empty(shape, device="meta") for shape in shapes)
    return getattr(module, f"_{case.way}_kernel"), module._constants(*tensors, *numbers)


def _type_of(name: str) -> str:
    if name.endswith("_ptr"):
        return "*fp32" if name in ("d_bias_ptr", "d_biases_ptr") else "*bf16"
    return "fp32" if name == "scale" else "i32"


@pytest.mark.end_to_end
def test_kernels_of_every_stage_and_architecture() -> None:
    """Tiny's and base's on Hopper, base's alone, which are wider, on the others; on sm_80 attention's and tiny's narrow MLP's.
    Nothing spills, and registers, 65,536 of a multiprocessor, leave room for 28 warps of attention forward and 12 backward."""
    tiny, base = (list(cases_of(load_preset(f"htsat_{name}_roberta_base").audio)) for name in ("tiny", "base"))
    jobs = [*((case, 90) for case in tiny + base), *((case, 100) for case in base)]
    jobs += [(case, 80) for case in base if case.kernel == "attention"]
    jobs += [(case, 80) for case in tiny if case.kernel == "mlp" and case.shape[0] <= 128]
    most = {("attention", "forward"): 80, ("attention", "backward"): 168}
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        for (case, architecture), found in zip(jobs, pool.map(compile_for, *zip(*jobs, strict=True)), strict=True):
            registers, spilled = found
            assert spilled <= 64, (case, architecture, found)
            assert registers <= most.get((case.kernel, case.way), case.launch.max_registers or 255), (
                case,
                architecture,
            )
