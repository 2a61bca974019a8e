"""Triton kernels compiled ahead of time, as the stages of tiny and base launch them: they compile for every architecture, and
hardly spill registers."""

import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

import pytest
import torch

pytest.importorskip("triton", reason="Triton is installed with torch on Linux")

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from clap_ds.config.model import AudioConfig, load_preset
from clap_ds.model import mlp_triton, window_attention_triton
from clap_ds.model.triton_common import Launch

MOST_SPILLED = 64
"""Bytes of a thread."""


class Case(NamedTuple):
    """A kernel as a stage launches it. `way` is `forward` or `backward`."""

    kernel: str
    way: str
    shape: tuple[int, ...]
    """(grid, heads, head dim, shift) of `attention`, (channels, hidden units) of `mlp`."""
    launch: Launch


def cases_of(audio: AudioConfig) -> Iterator[Case]:
    """A model's kernels as they are launched: the attention of its first and last stage, between which only the
    grid's size and the number of heads differ, and every MLP that there is a kernel for."""
    found: list[tuple[str, tuple[int, ...], tuple[Launch, Launch]]] = []
    attention = (window_attention_triton.FORWARD, window_attention_triton.BACKWARD)
    for stage in (0, audio.num_stages - 1):
        grid, heads, dim = audio.stage_grids[stage], audio.num_heads[stage], audio.stage_dims[stage]
        for shift in (0, audio.attention_window // 2)[: 2 if grid > audio.attention_window else 1]:
            found.append(("attention", (grid, heads, dim // heads, shift), attention))
    sizes = [(dim, audio.mlp_ratio * dim) for dim in audio.stage_dims]
    found += [("mlp", size, mlp_triton.launches(size[0])) for size in sizes if mlp_triton.supports(*size)]
    for kernel, shape, launches in found:
        for way, launch in zip(("forward", "backward"), launches, strict=True):
            yield Case(kernel, way, shape, launch)


def spilled(case: Case, architecture: int) -> int:
    """Compiles a kernel for an architecture (80, 90 as sm_90a, or 100); bytes of a thread that spill to memory."""
    kernel, constants = _kernel_of(case)
    names = [parameter.name for parameter in kernel.params if not parameter.is_constexpr]
    signature = {name: _type_of(name) for name in names} | dict.fromkeys(constants, "constexpr")
    aligned = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in names if name.endswith("_ptr")}
    source, target = ASTSource(kernel, signature, constants, aligned), GPUTarget("cuda", architecture, 32)
    compiled: Any = triton.compile(source, target=target, options=case.launch.options())
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return int(re.search(r"STACK:(\d+)", said)[1])


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


TINY, BASE = (list(cases_of(load_preset(f"htsat_{name}_roberta_base").audio)) for name in ("tiny", "base"))


@pytest.mark.end_to_end
def test_kernels_of_every_stage_and_architecture() -> None:
    """Tiny's and base's on Hopper, base's alone, which are wider, on the others; on sm_80 attention's and tiny's narrow
    MLP's."""
    jobs = [*((case, 90) for case in TINY + BASE), *((case, 100) for case in BASE)]
    jobs += [(case, 80) for case in BASE if case.kernel == "attention"]
    jobs += [(case, 80) for case in TINY if case.kernel == "mlp" and case.shape[0] <= 128]
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        for job, found in zip(jobs, pool.map(spilled, *zip(*jobs, strict=True)), strict=True):
            assert found <= MOST_SPILLED, job
