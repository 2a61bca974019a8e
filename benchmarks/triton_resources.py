"""Command: registers, spills and occupancy of the Triton kernels, compiled ahead of time; and their roofline.

    python -m benchmarks.triton_resources [--architectures 80 90 100] [--output results/triton/resources.md]

Needs no GPU: Triton's wheel brings the assembler. Kernels are compiled in bf16 for the stages of tiny and base as the model
launches them. Programs resident on a multiprocessor are as many as its registers, shared memory, tensor memory and warps allow.
The roofline is of what each kernel must move, multiply and, of the fused ones, issue, at an H100's rates; it takes as long as
the longest of these.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from benchmarks.common import make_parser, show, table
from clap_ds.config.errors import run_alone
from clap_ds.config.model import AudioConfig, load_preset
from clap_ds.model import mlp_triton, window_attention_triton
from clap_ds.model.kernel_choice import KernelChoice, Launch
from clap_ds.model.triton_common import launch_options

MICRO_BATCHES = {"tiny": 616, "base": 416}
SHARED_KB = {80: 164, 90: 228, 100: 228}
"""Of a multiprocessor, by architecture; each program takes one more than it asks for (CUDA C++ Programming Guide, 20.2)."""
REGISTERS, WARPS, TENSOR_COLUMNS = 65536, 64, 512
BANDWIDTH, RATE, ISSUE = 3.35e12, 700e12, 132 * 128 * 1.7e9
"""An H100's bytes/s, bf16 FLOP/s as large products reach, and instructions of one thread that it issues a second at 1.7 GHz."""
INSTRUCTIONS = {"mlp": {"forward": 31, "backward": 43}, "attention": {"forward": 20, "backward": 34}}
"""For each hidden unit and each score, in tiny's first stage, as `cuobjdump -sass` shows the kernels for sm_90a."""
COLUMNS = (
    "kernel {kernel} | shape {shape} | sm {architecture} | warps {num_warps} | stages {num_stages} | limit {max_registers}"
    " | registers {registers} | spilled, bytes {spilled} | shared, KB {shared_kb:.1f} | programs resident {resident}"
)
ROOFLINE = (
    "model {model} | stage {stage} | part {kind} | forward, GB {forward_gb:.2f} | forward, ms {forward_ms:.2f}"
    " | backward, GB {backward_gb:.2f} | backward, ms {backward_ms:.2f} | kept, GiB {kept_gib:.2f}"
)


@dataclass(frozen=True)
class Case:
    """A kernel as a stage launches it. `way` is `forward` or `backward`."""

    kernel: str
    way: str
    shape: tuple[int, ...]
    """(grid, heads, head dim, shift) of `attention`, (channels, hidden units) of `mlp`."""
    launch: Launch


@dataclass(frozen=True)
class Resources:
    """What a compiled kernel takes: registers of a thread, bytes of a thread's that spill to memory, shared memory of a
    program, and how many programs a multiprocessor holds."""

    registers: int
    spilled: int
    shared_kb: float
    resident: int


def cases_of(audio: AudioConfig) -> Iterator[Case]:
    """A model's kernels as they are launched by default: the attention of its first and last stage, between which only the
    grid's size and the number of heads differ, and every MLP that there is a kernel for."""
    found: list[tuple[str, tuple[int, ...], KernelChoice]] = []
    for stage in (0, audio.num_stages - 1):
        grid, heads, dim = audio.stage_grids[stage], audio.num_heads[stage], audio.stage_dims[stage]
        for shift in (0, audio.attention_window // 2)[: 2 if grid > audio.attention_window else 1]:
            found.append(("attention", (grid, heads, dim // heads, shift), window_attention_triton.LAUNCHES[0]))
    sizes = [(dim, audio.mlp_ratio * dim) for dim in audio.stage_dims]
    found += [("mlp", size, mlp_triton.default(size[0])) for size in sizes if mlp_triton.supports(*size)]
    for kernel, shape, choice in found:
        for way in ("forward", "backward"):
            yield Case(kernel, way, shape, getattr(choice, way))


def resources(case: Case, architecture: int) -> Resources:
    """Compiles a kernel for an architecture: 80, 90 (as sm_90a) or 100."""
    kernel, constants = _kernel_of(case)
    names = [parameter.name for parameter in kernel.params if not parameter.is_constexpr]
    signature = {name: _type_of(name) for name in names} | dict.fromkeys(constants, "constexpr")
    aligned = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in names if name.endswith("_ptr")}
    options = launch_options(case.launch)
    target = GPUTarget("cuda", architecture, 32)
    compiled: Any = triton.compile(ASTSource(kernel, signature, constants, aligned), target=target, options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, spilled = (int(re.search(rf"{name}:(\d+)", said)[1]) for name in ("REG", "STACK"))  # type: ignore[index]
    warps, shared, columns = case.launch.num_warps, compiled.metadata.shared, getattr(compiled.metadata, "tmem_size", 0)
    by_shared = SHARED_KB[architecture] * 1024 // (shared + 1024)
    by_registers = REGISTERS // (-(-registers // 8) * 8 * 32 * warps)
    by_columns = TENSOR_COLUMNS // columns if columns else WARPS
    resident = min(by_shared, by_registers, by_columns, WARPS // warps)
    return Resources(registers, spilled, shared / 1024, resident)


def _kernel_of(case: Case) -> tuple[Any, dict[str, Any]]:
    """The kernel and its compile-time arguments, as its module makes them of tensors of the shape."""
    if case.kernel == "attention":
        grid, heads, dim, shift = case.shape
        qkv, bias = (
            torch.empty(1, grid, grid, 3 * heads * dim, device="meta"),
            torch.empty(heads, 64, 64, device="meta"),
        )
        module: Any = window_attention_triton
        constants = module._constants(qkv, bias, 8, shift)
    else:
        channels, hidden = case.shape
        tokens, weight = torch.empty(1, channels, device="meta"), torch.empty(hidden, channels, device="meta")
        module = mlp_triton
        block = module.FORWARD_BLOCK if case.way == "forward" else module.BACKWARD_BLOCK
        constants = module._constants(tokens, weight, block)
    return getattr(module, f"_{case.way}_kernel"), constants


def _type_of(name: str) -> str:
    if name.endswith("_ptr"):
        return "*fp32" if name in ("d_bias_ptr", "d_biases_ptr") else "*bf16"
    return "fp32" if name == "scale" else "i32"


def _row(job: tuple[Case, int]) -> dict[str, Any]:
    case, architecture = job
    name = f"sm_{architecture}{'a' if architecture == 90 else ''}"
    shown = {"kernel": f"{case.kernel}, {case.way}", "shape": " × ".join(map(str, case.shape)), "architecture": name}
    return {**shown, **case.launch._asdict(), **asdict(resources(case, architecture))}


def roofline(model: str, stage: int) -> list[dict[str, Any]]:
    """Least traffic and time of a block's attention between its projections and of its MLP, at the published micro-batch. The
    MLP operation by operation, fused as it is, and fused with the weights' gradients in a kernel of their own that computes the
    hidden units a third time."""
    audio = load_preset(f"htsat_{model}_roberta_base").audio
    C, T = audio.stage_dims[stage], MICRO_BATCHES[model] * audio.stage_grids[stage] ** 2
    units, in_window = T * audio.mlp_ratio * C, audio.attention_window**2
    tokens, hidden, product = 2 * T * C, 2 * units, 2 * C * units
    issued = {way: each * units for way, each in INSTRUCTIONS["mlp"].items()}
    scores = {way: each * T * in_window * audio.num_heads[stage] for way, each in INSTRUCTIONS["attention"].items()}
    mixing = 2 * T * in_window * C
    linear, sums = (tokens + hidden, product, 0), [(hidden, 0, 0), (tokens, 0, 0)]
    fused = [(2 * tokens, 2 * product, issued["forward"])]
    written = (3 * tokens + 2 * hidden, 3 * product, issued["backward"])
    again = [(3 * tokens, 3 * product, issued["backward"]), (2 * tokens, 4 * product, issued["backward"])]
    kinds: dict[str, Any] = {  # forward, backward, kept beside the input
        "MLP, torch": ([linear, (2 * hidden, 0, 0), linear], [*[linear] * 4, (3 * hidden, 0, 0), *sums], 2 * hidden),
        "MLP, triton": (fused, [written, linear, linear], 0),
        "MLP, all in kernels": (fused, again, 0),
        "attention, triton": (
            [(4 * tokens, 2 * mixing, scores["forward"])],
            [(7 * tokens, 5 * mixing, scores["backward"])],
            2 * tokens,
        ),
    }
    rows = []
    for kind, (forward, backward, kept) in kinds.items():
        row: dict[str, Any] = {"model": model, "stage": stage, "kind": kind, "kept_gib": (tokens + kept) / 2**30}
        for way, kernels in (("forward", forward), ("backward", backward)):
            bounds = [(moved / BANDWIDTH, flops / RATE, count / ISSUE) for moved, flops, count in kernels]
            row[f"{way}_gb"] = sum(moved for moved, *_ in kernels) / 1e9
            row[f"{way}_ms"] = 1e3 * sum(map(max, bounds))
        rows.append(row)
    return rows


def main(argv: list[str] | None = None) -> None:
    """Compile, count and print."""
    parser = make_parser("triton_resources", __doc__)
    parser.add_argument("--architectures", nargs="+", type=int, choices=SHARED_KB, default=list(SHARED_KB), metavar="N")
    arguments = parser.parse_args(argv)
    presets = [load_preset(f"htsat_{name}_roberta_base").audio for name in MICRO_BATCHES]
    jobs = [(case, number) for number in arguments.architectures for audio in presets for case in cases_of(audio)]
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        rows = list(pool.map(_row, jobs))
    bounds = [row for name in MICRO_BATCHES for stage in (0, 1) for row in roofline(name, stage)]
    rates = f"{BANDWIDTH / 1e12:g} TB/s, {RATE / 1e12:g} TFLOPS and {ISSUE / 1e12:.1f} tera-instructions a second"
    batches = " and ".join(f"{clips} clips ({name})" for name, clips in MICRO_BATCHES.items())
    title = f"The least that parts of a block take at {rates}, {batches}:"
    text = f"Triton {triton.__version__}, bf16.\n\n{table(COLUMNS, rows)}\n\n{title}\n\n{table(ROOFLINE, bounds)}"
    show(arguments.output, text, {"kernels": rows, "roofline": bounds})


if __name__ == "__main__":
    run_alone(main)
