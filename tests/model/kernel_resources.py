"""Compile every Triton kernel ahead of time, without a GPU, as HTSAT-tiny and -base launch it. As a
command, print a table.

python -m tests.model.kernel_resources --output results/triton/resources.md
"""

import argparse
import itertools
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from benchmarks.common import show, table
from clap_ds.config.model import AudioConfig, load_preset
from clap_ds.model import (
    gelu_linear_triton,
    gelu_triton,
    mlp_triton,
    text_attention_triton,
    window_attention_triton,
)
from clap_ds.model.triton_common import Launch

ARCHITECTURES = (80, 86, 89, 90, 100, 120)
COLUMNS = (
    "kernel {kernel} | heads or channels {size} | sm {architecture} | warps {warps} | registers {registers}"
    " | spilled, bytes {spilled} | shared, KB {shared_kb:.1f} | warps by registers {resident}"
)
SIZES = ("GRID", "HEADS", "DIM", "FIRST", "SECOND", "HIDDEN", "SHIFT", "COLUMNS", "UNITS")
OTHER_TYPES = {
    **dict.fromkeys(("scale", "inverse_keep"), "fp32"),
    **dict.fromkeys(("d_bias_ptr", "d_biases_ptr", "sums_ptr"), "*fp32"),
    **dict.fromkeys(("cu_seqlens_ptr", "num_keys_ptr"), "*i32"),
    "seeds_ptr": "*u32",
}
"""Types of arguments that aren't pointers to bf16 or int32 numbers."""


class Kernel(NamedTuple):
    """A kernel of a module, `_forward_kernel` or `_backward_kernel`, as a model launches it."""

    module: str
    way: str
    constants: dict[str, Any]
    launch: Launch

    @property
    def name(self) -> str:
        return self.module.rpartition(".")[2].removesuffix("_triton")


def kernels_of(audio: AudioConfig) -> Iterator[Kernel]:
    """Yield a model's kernels: attention of its first and last stage, between which only grid and
    number of heads differ, attention of captions of 77 tokens, every MLP that has a kernel, GELU,
    and GELU with a linear layer."""
    constants = {"ELEMENTS": gelu_triton.ELEMENTS}
    yield Kernel(gelu_triton.__name__, "forward", constants, gelu_triton.FORWARD)
    constants = {"BLOCK": gelu_triton.BLOCK, "CHUNK": gelu_triton.CHUNK}
    yield Kernel(gelu_triton.__name__, "backward", constants, gelu_triton.BACKWARD)
    small = gelu_linear_triton.SMALL
    large = gelu_linear_triton.LARGE
    for way, tile in (("forward", small), ("backward", small), ("backward", large)):
        yield Kernel(gelu_linear_triton.__name__, way, tile.constants(), tile.launch)

    for way in ("forward", "backward"):
        module: Any = window_attention_triton
        launch = getattr(module, way.upper())
        for stage, shift in ((0, 0), (0, 4), (-1, 0)):
            grid = audio.stage_grids[stage]
            qkv = torch.empty(1, grid, grid, 3 * audio.stage_dims[stage], device="meta")
            bias = torch.empty(audio.num_heads[stage], 64, 64, device="meta")
            yield Kernel(module.__name__, way, module._constants(qkv, bias, 8, shift), launch)

        module = text_attention_triton
        qkv = torch.empty(1, 3 * 768, device="meta")
        _, constants = module._arguments(qkv, 12, 77, 0.1)
        yield Kernel(module.__name__, way, constants, getattr(module, way.upper()))

        module = mlp_triton
        block = getattr(module, f"{way.upper()}_BLOCK")
        for dim in audio.stage_dims:
            hidden = audio.mlp_ratio * dim
            if mlp_triton.supports(dim, hidden):
                constants = module._constants(torch.empty(hidden, dim, device="meta"), block)
                yield Kernel(module.__name__, way, constants, getattr(module, way.upper()))


class Resources(NamedTuple):
    """The resources of a kernel on one architecture: a thread's registers and spilled bytes, and a
    program's bytes of shared memory."""

    kernel: Kernel
    architecture: int
    registers: int
    spilled: int
    shared: int

    def row(self) -> dict[str, Any]:
        """Return a row of the table. A multiprocessor has 65,536 registers, given out by 8 per
        thread."""
        warps = self.kernel.launch.num_warps
        programs = 65536 // (-(-self.registers // 8) * 8 * 32 * warps)
        constants = self.kernel.constants.items()
        sizes = [f"{name.lower()} {value}" for name, value in constants if name in SIZES]
        return {
            "kernel": f"{self.kernel.name.replace('_', ' ')}, {self.kernel.way}",
            "size": ", ".join(sizes),
            "architecture": self.architecture,
            "warps": warps,
            "registers": self.registers,
            "spilled": self.spilled,
            "shared_kb": self.shared / 1024,
            "resident": programs * warps,
        }


def compile_for(kernel: Kernel, architecture: int) -> Resources:
    """Compile a kernel for an architecture, 90 as sm_90a."""
    function = getattr(sys.modules[kernel.module], f"_{kernel.way}_kernel")
    signature = dict.fromkeys(kernel.constants, "constexpr")
    aligned = {}
    for parameter in function.params:
        name = parameter.name
        if parameter.is_constexpr:
            continue
        is_pointer = name.endswith("_ptr")
        signature[name] = OTHER_TYPES.get(name, "*bf16" if is_pointer else "i32")
        if is_pointer or name in ("num_channels", "num_units", "num_elements"):
            aligned[(function.arg_names.index(name),)] = [["tt.divisibility", 16]]
    compiled: Any = triton.compile(
        ASTSource(function, signature, kernel.constants, aligned),
        target=GPUTarget("cuda", architecture, 32),
        options=kernel.launch.options(),
    )
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    usage = dict(word.split(":") for word in output.split() if word.startswith(("REG:", "STACK:")))
    registers, spilled = int(usage["REG"]), int(usage["STACK"])
    return Resources(kernel, architecture, registers, spilled, compiled.metadata.shared)


def _is_launched(kernel: Kernel, architecture: int) -> bool:
    """Return whether an architecture launches a kernel: large tiles need much shared memory."""
    large = gelu_linear_triton.LARGE.constants()
    majors = gelu_linear_triton.LARGE_CAPABILITIES
    return kernel.constants != large or architecture // 10 in majors


def compile_all(architectures: Sequence[int] = ARCHITECTURES) -> list[Resources]:
    """Compile tiny's kernels for Hopper, and base's wider ones for every architecture."""
    tiny, base = (
        list(kernels_of(load_preset(f"htsat_{name}_roberta_base").audio))
        for name in ("tiny", "base")
    )
    jobs = [(kernel, 90) for kernel in tiny if kernel not in base]
    jobs += [job for job in itertools.product(base, architectures) if _is_launched(*job)]
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(compile_for, *zip(*jobs, strict=True)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Compile every Triton kernel ahead of time")
    parser.add_argument("--output", type=Path)
    rows = [resources.row() for resources in compile_all()]
    text = f"Triton {triton.__version__}, bf16.\n\n{table(COLUMNS, rows)}"
    show(parser.parse_args().output, text, rows)
