"""Estimate the time of recorded operations on a GPU with the roofline model (Williams et al. 2009): sequentially, the larger of
FLOPs and bytes at a share of the data sheet's rates that depends on the class of operation.

The shares were measured on an H200 (`results/h200`). Measurements of a GPU in `results/<device>/efficiencies.json` override
them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from clap_ds.config.files import read_json
from clap_ds.config.paths import work_folder
from clap_ds.flop_count.device_specs import GPUS, Gpu, peak_for
from clap_ds.planning.tracing import Operation

CASES = {"low": -1, "middle": 0, "high": 1}
HOST_S = 8e-6
"""Python's time to launch an operation: 5 to 25 µs. It only matters if the GPU is idle."""
KERNEL_S = 2e-6
"""Minimum time of a kernel, including the gap before it."""
HOPPER = {"h100-sxm", "h100-pcie", "h800", "h200", "gh200", "gh200-144gb"}
"""GPUs with an H200's processors."""
SPREAD, SPREAD_ELSEWHERE = 0.1, 0.3
"""Relative uncertainty of a share on the measured architecture, from other shapes, clocks and temperature; and on others."""
NARROW_ROW, MEDIUM_ROW = 256, 1024
"""Most bytes of a normalized row."""
THIN = 200
"""FLOPs per byte below which a product is memory-bound: the ridge points of an A100 and an H100 are 153 and 295."""
FUSED = "fused kernel"
"""Inductor's kernels."""
TABLE = {
    FUSED: 0.65, "wide product": 0.73, "thin product": 0.57, "thin weight gradient": 0.87, "other product": 0.76,
    "flash attention": 0.27, "flash attention backward": 0.15, "attention": 0.28, "attention backward": 0.13,
    "triton window attention": 0.49, "triton window attention backward": 0.28, "triton mlp": 0.23, "triton mlp backward": 0.29,
    "norm": 0.30, "norm backward": 0.18, "medium norm": 0.17, "medium norm backward": 0.24, "narrow norm": 0.07,
    "narrow norm backward": 0.13, "softmax": 0.70, "reduction": 0.43, "element-wise": 0.60, "strided copy": 0.39,
    "scatter": 0.06, "optimizer": 0.80, "triton gelu backward": 0.65,
}  # fmt: skip
"""Share of an H200's rates by class: memory bandwidth, or peak FLOPs of wide products. `attention` (from an A100, xformers #434
and #467), `softmax` (a guess) and `triton gelu backward` (as fused kernels) weren't measured. The text tower's attention by
Triton, not measured, has window attention's."""
PROCESSORS = {
    "a100-sxm-40gb": 108, "a100-sxm-80gb": 108, "a100-pcie-80gb": 108, "h100-pcie": 114, "b200": 148, "mi300x": 304,
    "rtx-3090": 82, "v100-16gb": 80, "v100-32gb": 80,
}  # fmt: skip
"""Streaming multiprocessors or compute units, if not an H200's number."""
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
    FUSED: "fused",
}
_CLASSES = {name: each for each, names in _NAMES.items() for name in names.split()}


Share = dict[str, Any]
"""A share of a GPU's rates by case, and its `source`."""


def share(middle: float, spread: float, source: str) -> Share:
    """Return a share with a relative uncertainty."""
    return {"source": source} | {case: min(middle * (1 + sign * spread), 1.0) for case, sign in CASES.items()}


def class_of(operation: Operation) -> str:
    """Return the class in `TABLE` of an operation that launches kernels."""
    space, _, kind = operation.name.rpartition(".")
    name, is_backward, _ = kind.rstrip("_").partition("_backward")
    found = "optimizer" if name.startswith(("_foreach", "_fused")) else _CLASSES.get(name, "element-wise")
    if space == "compiled":
        found = FUSED
    elif found == "product":
        (rows, inner), (_, columns) = operation.shapes[-2:]
        first, second, longest = sorted((rows, inner, columns))
        is_thin = first * second / (first + second) < THIN
        found = "wide product" if not is_thin else "thin weight gradient" if inner == longest else "thin product"
    elif name == "native_layer_norm" and operation.dtype is not None:
        row = operation.shapes[0][-1] * operation.dtype.itemsize
        found = "narrow norm" if row <= NARROW_ROW else "medium norm" if row <= MEDIUM_ROW else "norm"
    return f"{found} backward" if is_backward and f"{found} backward" in TABLE else found


def shares_of(gpu: Gpu) -> dict[str, Share]:
    """Return a GPU's shares by class. Time above the data sheet's is due to instructions and latencies, which more bandwidth or
    larger tensor cores don't reduce, but more processors do."""
    h200, spread = GPUS["h200"], SPREAD if gpu.name in HOPPER else SPREAD_ELSEWHERE
    processors, found = PROCESSORS.get(gpu.name, H200_PROCESSORS), dict[str, Share]()
    for name, reached in TABLE.items():
        rate = "bf16_tflops" if name == "wide product" else "memory_tbytes_per_s"
        faster = getattr(gpu, rate) / getattr(h200, rate) * H200_PROCESSORS / processors
        found[name] = share(1 / (1 + (1 / reached - 1) * faster), spread, "from an H200's, results/h200")
    for path in sorted((work_folder() / "results").glob("*/efficiencies.json")):
        measured, source = read_json(path), f"measured, results/{path.parent.name}"
        if peak_for(measured["device"]) == gpu:
            classes = {name: each["efficiency"] for name, each in measured["classes"].items() if name in TABLE}
            found |= {name: share(reached, SPREAD, source) for name, reached in classes.items()}
    return found


def ideal_s(operation: Operation, gpu: Gpu) -> float:
    """Return an operation's time at the data sheet's rates."""
    tflops = gpu.bf16_tflops if operation.dtype in (torch.bfloat16, torch.float16) else gpu.fp32_tflops
    compute_s = operation.flops / (1e12 * tflops) if operation.flops else 0.0
    return max(compute_s, operation.bytes_moved / (1e12 * gpu.memory_tbytes_per_s))


def seconds(operation: Operation, gpu: Gpu, shares: Mapping[str, Share], case: str) -> float:
    """Return an operation's time; 0 if it launches nothing."""
    least = ideal_s(operation, gpu)
    return max(least / shares[class_of(operation)][case], KERNEL_S) if least else 0.0


def seconds_by_part(
    work: Iterable[tuple[Operation, float]], gpu: Gpu, shares: Mapping[str, Share], case: str
) -> dict[str, float]:
    """Return the seconds of (operation, repetitions) pairs by part, those in which the GPU waits for the host's launches, and
    their sum (`step`)."""
    found, launched_s = defaultdict[str, float](float), 0.0
    for operation, times in work:
        if spent_s := seconds(operation, gpu, shares, case):
            found[operation.place] += times * spent_s
            launched_s += times * HOST_S
    if (idle_s := launched_s - sum(found.values())) > 0:
        found["waiting for the host"] = idle_s
    return {**found, "step": sum(found.values())}
