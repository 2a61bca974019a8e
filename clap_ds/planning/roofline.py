"""Estimate the time of recorded operations on a GPU with the roofline model (Williams et al. 2009):
sequentially, the larger of FLOPs and bytes at a share of the data sheet's rates that depends on the
class of operation.

Shares were measured on an H200 (`results/h200`). A GPU's own, in
`results/<device>/efficiencies.json`, override them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch

from clap_ds.flop_count.device_specs import GPUS, Gpu, peak_for
from clap_ds.planning.tracing import TOWERS, Operation
from clap_ds.utils.files import read_json
from clap_ds.utils.paths import work_folder

CASES = {"low": -1, "middle": 0, "high": 1}
HOST_S = (
    8e-6  # Python's time to launch an operation: 5 to 25 µs; it only matters if the GPU is idle
)
KERNEL_S = 2e-6  # minimum time of a kernel, including the gap before it
SPREAD = 0.1
SPREAD_ELSEWHERE = 0.3
"""Relative uncertainty of a share on the measured architecture, from other shapes, clocks and
temperature; and on others."""
# most bytes of a normalized row
NARROW_ROW = 256
MEDIUM_ROW = 1024
THIN = 200
"""FLOPs per byte below which a product is memory-bound: the ridge points of an A100 and an H100 are
153 and 295."""
FUSED = "fused kernel"  # Inductor's
TABLE = {
    FUSED: 0.65, "wide product": 0.73, "thin product": 0.57, "thin weight gradient": 0.87, "other product": 0.76,
    "flash attention": 0.27, "flash attention backward": 0.15, "attention": 0.28, "attention backward": 0.13,
    "triton window attention": 0.49, "triton window attention backward": 0.28, "triton mlp": 0.23, "triton mlp backward": 0.29,
    "norm": 0.30, "norm backward": 0.18, "medium norm": 0.17, "medium norm backward": 0.24, "narrow norm": 0.07,
    "narrow norm backward": 0.13, "softmax": 0.70, "reduction": 0.43, "element-wise": 0.60, "strided copy": 0.39,
    "scatter": 0.06, "optimizer": 0.80, "triton gelu backward": 0.65,
}  # fmt: skip
"""Share of an H200's rates by class: memory bandwidth, or peak FLOPs of wide products. `attention`
(from an A100, xformers #434 and #467), `softmax` (a guess) and `triton gelu backward` (as fused
kernels) weren't measured. The text tower's attention by Triton, not measured, has window
attention's."""
PROCESSORS = {"v100": 80, "a100": 108, "rtx": 82, "h100-pcie": 114, "b200": 148, "mi300x": 304}
"""Streaming multiprocessors or compute units by family or name. Other families are Hopper's, with
an H200's number."""
H200_PROCESSORS = 132
_NAMES = {
    "product": "mm addmm",
    "other product": "bmm baddbmm convolution _fft_r2c _fft_c2r _fft_c2c",
    "flash attention": "_scaled_dot_product_flash_attention _scaled_dot_product_cudnn_attention _varlen_attn",
    "attention": "_scaled_dot_product_efficient_attention",
    "triton window attention": "window_attention text_attention",
    "triton mlp": "mlp",
    "triton gelu": "bias_gelu",
    "norm": "native_layer_norm native_batch_norm cudnn_batch_norm native_group_norm",
    "softmax": "_softmax _log_softmax",
    "reduction": "sum mean amax amin max min var std linalg_vector_norm logsumexp",
    "strided copy": "clone roll cat stack constant_pad_nd slice select embedding index gather upsample_bicubic2d",
    "scatter": "embedding_dense index_put _index_put_impl index_add scatter_add",
    FUSED: "fused row_sums weights",
}
_CLASSES = {name: each for each, names in _NAMES.items() for name in names.split()}


def share(middle: float, spread: float, source: str) -> dict[str, Any]:
    """Return a share of a GPU's rates by case with a relative uncertainty, and its `source`."""
    return {"source": source} | {
        case: min(middle * (1 + sign * spread), 1.0) for case, sign in CASES.items()
    }


def class_of(operation: Operation) -> str:
    """Return the class in `TABLE` of an operation that launches kernels."""
    name, is_backward, _ = operation.name.rpartition(".")[2].rstrip("_").partition("_backward")
    found = (
        "optimizer"
        if name.startswith(("_foreach", "_fused"))
        else _CLASSES.get(name, "element-wise")
    )
    if found == "product":
        (rows, inner), (_, columns) = operation.shapes[-2:]
        first, second, longest = sorted((rows, inner, columns))
        is_thin = first * second / (first + second) < THIN
        found = (
            "wide product"
            if not is_thin
            else "thin weight gradient"
            if inner == longest
            else "thin product"
        )
    elif name == "native_layer_norm" and operation.dtype is not None:
        row = operation.shapes[0][-1] * operation.dtype.itemsize
        found = (
            "narrow norm" if row <= NARROW_ROW else "medium norm" if row <= MEDIUM_ROW else "norm"
        )
    return f"{found} backward" if is_backward and f"{found} backward" in TABLE else found


def shares_of(gpu: Gpu) -> dict[str, dict[str, Any]]:
    """Return a GPU's shares by class. Time above the data sheet's is due to instructions and
    latencies, which more bandwidth or larger tensor cores don't reduce, but more processors do."""
    h200 = GPUS["h200"]
    family = gpu.name.split("-")[0]
    found = dict[str, dict[str, Any]]()
    spread = SPREAD_ELSEWHERE if family in PROCESSORS else SPREAD
    processors = PROCESSORS.get(gpu.name, PROCESSORS.get(family, H200_PROCESSORS))
    for name, reached in TABLE.items():
        rate = "bf16_tflops" if name == "wide product" else "memory_tbytes_per_s"
        faster = getattr(gpu, rate) / getattr(h200, rate) * H200_PROCESSORS / processors
        found[name] = share(
            1 / (1 + (1 / reached - 1) * faster), spread, "from an H200's, results/h200"
        )
    for path in sorted((work_folder() / "results").glob("*/efficiencies.json")):
        measured = read_json(path)
        source = f"measured, results/{path.parent.name}"
        if peak_for(measured["device"]) == gpu:
            for name in TABLE.keys() & measured["classes"]:
                found[name] = share(measured["classes"][name]["efficiency"], SPREAD, source)
    return found


def ideal_s(operation: Operation, gpu: Gpu) -> float:
    """Return an operation's time at the data sheet's rates."""
    tflops = (
        gpu.bf16_tflops if operation.dtype in (torch.bfloat16, torch.float16) else gpu.fp32_tflops
    )
    return max(
        operation.flops / (1e12 * tflops), operation.bytes_moved / (1e12 * gpu.memory_tbytes_per_s)
    )


def seconds(operation: Operation, gpu: Gpu, shares: Any, case: str) -> float:
    """Return the time of an operation that launches kernels."""
    return max(ideal_s(operation, gpu) / shares[class_of(operation)][case], KERNEL_S)


def seconds_by_part(
    work: Iterable[tuple[Operation, float]], gpu: Gpu, shares: Any, case: str
) -> dict[str, float]:
    """Return the seconds of (operation, repetitions) pairs by part, those in which the GPU waits
    for the host's launches, and their sum (`step`)."""
    found = defaultdict[str, float](float)
    launched_s = 0.0
    for operation, times in work:
        direction = (
            (" backward" if operation.backward else " forward") if operation.part in TOWERS else ""
        )
        found[operation.part + direction] += times * seconds(operation, gpu, shares, case)
        launched_s += times * HOST_S
    if (idle_s := launched_s - sum(found.values())) > 0:
        found["waiting for the host"] = idle_s
    return {**found, "step": sum(found.values())}
