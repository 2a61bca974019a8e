"""Compile every Triton kernel ahead of time, without a GPU, as HTSAT-tiny and -base launch it. As a
command, print a table.

python -m tests.model.kernel_resources --output results/triton/resources.md
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from benchmarks.common import show, table
from clap_ds.config.model import AudioConfig, load_preset
from clap_ds.model import gelu_triton, mlp_triton, text_attention_triton, window_attention_triton
from clap_ds.model.mlp_triton import supports
from clap_ds.model.triton_common import Launch

ARCHITECTURES = (80, 86, 89, 90, 100, 120)
COLUMNS = (
    "kernel {kernel} | heads or channels {size} | sm {architecture} | warps {warps} | registers {registers}"
    " | spilled, bytes {spilled} | shared, KB {shared_kb:.1f} | warps by registers {resident}"
)


def kernels_of(audio: AudioConfig) -> Iterator[tuple[Any, str, Any, Launch]]:
    """Yield a model's kernels as module, way, constants and launch: attention of its first and last
    stage, between which only grid and number of heads differ, attention of captions of 77 tokens,
    every MLP that has a kernel, and GELU."""
    constants = {"BLOCK": gelu_triton.BLOCK, "CHUNK": gelu_triton.CHUNK, "WIDEN": False}
    yield gelu_triton, "backward", constants, gelu_triton.BACKWARD
    for way, launch in (
        ("forward", window_attention_triton.FORWARD),
        ("backward", window_attention_triton.BACKWARD),
    ):
        for stage, shift in ((0, 0), (0, 4), (-1, 0)):
            grid = audio.stage_grids[stage]
            heads = audio.num_heads[stage]
            dim = audio.stage_dims[stage]
            tensors = (
                torch.empty(1, grid, grid, 3 * dim, device="meta"),
                torch.empty(heads, 64, 64, device="meta"),
            )
            yield (
                window_attention_triton,
                way,
                window_attention_triton._constants(*tensors, 8, shift),
                launch,
            )
        constants = text_attention_triton._arguments(
            torch.empty(1, 3 * 768, device="meta"), 12, 77, 0.1
        )[1]
        launch = getattr(text_attention_triton, way.upper())
        yield text_attention_triton, way, constants, launch
    for dim in filter(lambda dim: supports(dim, audio.mlp_ratio * dim), audio.stage_dims):
        tensors = (
            torch.empty(1, dim, device="meta"),
            torch.empty(audio.mlp_ratio * dim, dim, device="meta"),
        )
        blocks = mlp_triton.FORWARD_BLOCK, mlp_triton.BACKWARD_BLOCK
        for way, block, launch in zip(
            ("forward", "backward"), blocks, (mlp_triton.FORWARD, mlp_triton.BACKWARD), strict=True
        ):
            yield mlp_triton, way, mlp_triton._constants(*tensors, block), launch


def compile_for(
    module: str, way: str, constants: dict[str, Any], launch: Launch, architecture: int
) -> tuple[int, int, int]:
    """Compile a kernel for an architecture, 90 as sm_90a. Return a thread's registers and spilled
    bytes, and a program's bytes of shared memory."""
    kernel = getattr(sys.modules[module], f"_{way}_kernel")
    names = [parameter.name for parameter in kernel.params if not parameter.is_constexpr]
    types = {
        "scale": "fp32",
        "inverse_keep": "fp32",
        "d_bias_ptr": "*fp32",
        "d_biases_ptr": "*fp32",
    }
    types |= {"bounds_ptr": "*i32", "lengths_ptr": "*i32", "seeds_ptr": "*u32", "sums_ptr": "*fp32"}
    signature = {
        name: types.get(name, "*bf16" if name.endswith("_ptr") else "i32") for name in names
    }
    multiples = [name for name in names if name.endswith("_ptr") or name == "num_units"]
    aligned = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in multiples}
    source = ASTSource(
        kernel, signature | dict.fromkeys(constants, "constexpr"), constants, aligned
    )
    compiled: Any = triton.compile(
        source, target=GPUTarget("cuda", architecture, 32), options=launch.options()
    )
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = dict(each.split(":") for each in said.split() if each.startswith(("REG:", "STACK:")))
    return int(found["REG"]), int(found["STACK"]), compiled.metadata.shared


class Resources(NamedTuple):
    """What a kernel takes on one architecture."""

    module: str
    way: str
    constants: dict[str, Any]
    launch: Launch
    architecture: int
    registers: int
    spilled: int
    shared: int

    def row(self) -> dict[str, Any]:
        """Return a row of the table. A multiprocessor has 65,536 registers, given out by 8 per
        thread."""
        programs = 65536 // (-(-self.registers // 8) * 8 * 32 * self.launch.num_warps)
        sizes = {"GRID", "HEADS", "DIM", "FIRST", "SECOND", "HIDDEN", "SHIFT", "COLUMNS"}
        size = ", ".join(
            f"{name.lower()} {value}" for name, value in self.constants.items() if name in sizes
        )
        name = self.module.rpartition(".")[2].removesuffix("_triton").replace("_", " ")
        return {
            "kernel": f"{name}, {self.way}", "size": size, "architecture": self.architecture,
            "warps": self.launch.num_warps, "registers": self.registers, "spilled": self.spilled,
            "shared_kb": self.shared / 1024, "resident": programs * self.launch.num_warps,
        }  # fmt: skip


def compile_all() -> list[Resources]:
    """Compile tiny's kernels for Hopper, and base's wider ones for every architecture."""
    tiny, base = (
        list(kernels_of(load_preset(f"htsat_{name}_roberta_base").audio))
        for name in ("tiny", "base")
    )
    jobs = [
        *((*each, 90) for each in tiny),
        *((*each, number) for number in ARCHITECTURES for each in base),
    ]
    jobs = [(module.__name__, *rest) for module, *rest in jobs]
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        found = pool.map(compile_for, *zip(*jobs, strict=True))
        return [Resources(*job, *each) for job, each in zip(jobs, found, strict=True)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Compile every Triton kernel ahead of time")
    parser.add_argument("--output", type=Path)
    rows = [each.row() for each in compile_all()]
    show(
        parser.parse_args().output,
        f"Triton {triton.__version__}, bf16.\n\n{table(COLUMNS, rows)}",
        rows,
    )
