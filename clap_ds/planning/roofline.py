"""Estimate the time of recorded operations on a GPU with the roofline model (Williams et al. 2009).

Operations run one after the other. Each takes the larger of the times for its FLOPs and for its
bytes at the data sheet's rates, divided by an efficiency that depends on the class of operation.

Efficiencies were measured on an H200 (`results/h200`). A GPU's own, in
`results/<device>/efficiencies.json`, override them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch

from clap_ds.flop_count.device_specs import GPUS, Gpu, find_peak
from clap_ds.planning.tracing import TOWERS, Operation
from clap_ds.utils.files import read_json
from clap_ds.utils.paths import work_folder

# Estimate → sign of the efficiency's uncertainty.
ESTIMATES = {"low": -1, "middle": 0, "high": 1}
# Python's time to launch an operation: 5 to 25 µs; it only matters if the GPU is idle.
HOST_S = 8e-6
# Minimum time of a kernel, including the gap before it.
KERNEL_S = 2e-6
# Time between two kernels of a step, on an H200 (`results/h200/step.md`).
GAP_S = 1.5e-6
# Relative uncertainty of an efficiency on the measured architecture, from other shapes, clocks and
# temperature; and on others.
SPREAD = 0.1
SPREAD_ELSEWHERE = 0.3
# Most bytes of a normalized row.
NARROW_ROW = 256
MEDIUM_ROW = 1024
# Channels of a wide head: tensor cores multiply tiles of 32, which 24 channels don't fill.
WIDE_HEAD = 32
# Below it, a product is memory-bound: the ridge points of an A100 and an H100 are 153 and 295.
RIDGE_FLOPS_PER_BYTE = 200
# Class of Inductor's kernels.
FUSED = "fused kernel"
# Fraction of an H200's rates by class: memory bandwidth, or peak FLOPs of wide products.
# `attention` (from an A100, xformers #434 and #467) and `softmax` (a guess) weren't measured.
# Window attention's backward kernel was measured with 48 programs per processor, and wide heads
# relative to narrow ones (`window.log` and kernels.md in `results/h200`). Text attention is assumed
# to reach the shares of an earlier window attention. GELU's forward kernel is assumed to reach the
# share of norms among the fused kernels of the H200's trace, as its instructions take less time
# than its bytes; its backward kernel that of all fused kernels.
# Products with GELU haven't run. For a tile of 128 × 256, an H200's processor reads 48 KB per 64
# channels, and reads and writes 128 KB, at 57 KB/µs of the L2 cache (assumed: 7.5 TB/s). Start, end
# and GELU's arithmetic take 5 µs that nothing hides, and products 0.65 µs per 64 channels. That
# makes 0.48 of the rates at 768 channels, and 0.44 at 384. Two programs per processor, with 64 KB
# per 64 channels at 192, have the cache's 0.72. Weighted by tiny's times it is 0.50.
EFFICIENCY = {
    FUSED: 0.65, "wide product": 0.73, "thin product": 0.57, "thin weight gradient": 0.87, "other product": 0.76,
    "flash attention": 0.27, "flash attention backward": 0.15, "attention": 0.28, "attention backward": 0.13,
    "narrow window attention": 0.49, "narrow window attention backward": 0.39, "wide window attention": 0.62,
    "wide window attention backward": 0.51, "text attention": 0.49, "text attention backward": 0.28,
    "triton mlp": 0.23, "triton mlp backward": 0.29, "norm": 0.30, "norm backward": 0.18, "medium norm": 0.17,
    "medium norm backward": 0.24, "narrow norm": 0.07, "narrow norm backward": 0.13, "softmax": 0.70,
    "reduction": 0.43, "element-wise": 0.60, "strided copy": 0.39, "scatter": 0.06, "optimizer": 0.80,
    "triton gelu": 0.75, "triton gelu backward": 0.65, "triton gelu linear backward": 0.50,
    "triton linear gelu": 0.65,
}  # fmt: skip
# Streaming multiprocessors or compute units by family or name. Other families are Hopper's, with an
# H200's number.
NUM_SMS = {"v100": 80, "a100": 108, "rtx": 82, "h100-pcie": 114, "b200": 148, "mi300x": 304}
H200_NUM_SMS = 132
_NAMES = {
    "product": "mm addmm",
    "other product": "bmm baddbmm convolution _fft_r2c _fft_c2r _fft_c2c",
    "flash attention": "_scaled_dot_product_flash_attention _scaled_dot_product_cudnn_attention _varlen_attn",
    "attention": "_scaled_dot_product_efficient_attention",
    "window attention": "window_attention",
    "text attention": "text_attention",
    "triton mlp": "mlp",
    "triton gelu": "bias_gelu",
    "triton gelu linear": "gelu_linear",
    "triton linear gelu": "linear_gelu",
    "norm": "native_layer_norm native_batch_norm cudnn_batch_norm native_group_norm",
    "softmax": "_softmax _log_softmax",
    "reduction": "sum mean amax amin max min var std linalg_vector_norm logsumexp",
    "strided copy": "clone roll cat stack constant_pad_nd slice select embedding index gather upsample_bicubic2d",
    "scatter": "embedding_dense index_put _index_put_impl index_add scatter_add",
    FUSED: "fused row_sums weights",
}
_CLASSES = {name: name_class for name_class, names in _NAMES.items() for name in names.split()}

# Class → `efficiency_range`.
Efficiencies = dict[str, dict[str, Any]]


def efficiency_range(middle: float, spread: float, source: str) -> dict[str, Any]:
    """Return an efficiency by estimate with a relative uncertainty, and its `source`."""
    efficiency: dict[str, Any] = {"source": source}
    for estimate, sign in ESTIMATES.items():
        # No kernel exceeds the data sheet.
        efficiency[estimate] = min(middle * (1 + sign * spread), 1.0)
    return efficiency


def op_class(operation: Operation) -> str:
    """Return the class in `EFFICIENCY` of an operation that launches kernels."""
    # From `aten.gelu_backward` or `clap_ds.mlp_backward_0`.
    short_name = operation.name.rpartition(".")[2].rstrip("_")
    name, is_backward, _ = short_name.partition("_backward")
    forward_class = _CLASSES.get(name, "element-wise")
    if name.startswith(("_foreach", "_fused")):
        forward_class = "optimizer"
    elif forward_class == "product":
        forward_class = _product_class(operation)
    elif name == "window_attention":
        forward_class = _window_class(operation)
    elif name == "native_layer_norm" and operation.dtype is not None:
        forward_class = _norm_class(operation.shapes[0][-1] * operation.dtype.itemsize)
    backward_class = f"{forward_class} backward"
    if is_backward and backward_class in EFFICIENCY:
        return backward_class
    return forward_class


def _product_class(operation: Operation) -> str:
    """Return the class of a matrix product (rows, inner) × (inner, columns)."""
    (num_rows, inner), (_, num_columns) = operation.shapes[-2:]
    shortest, middle, longest = sorted((num_rows, inner, num_columns))
    # In bf16 with one dimension much longer than the others: 2·r·i·c FLOPs over 2·longest·(the
    # other two) bytes.
    flops_per_byte = shortest * middle / (shortest + middle)
    if flops_per_byte >= RIDGE_FLOPS_PER_BYTE:
        return "wide product"
    if inner == longest:
        return "thin weight gradient"
    return "thin product"


def _window_class(operation: Operation) -> str:
    """Return the class of Triton's window attention by the channels of a head, from queries, keys
    and values (B, H, W, 3·heads·channels) and the position bias (heads, N, N)."""
    (*_, width), (heads, *_) = operation.shapes[:2]
    return (
        "wide window attention" if width // 3 // heads >= WIDE_HEAD else "narrow window attention"
    )


def _norm_class(row_bytes: int) -> str:
    if row_bytes <= NARROW_ROW:
        return "narrow norm"
    if row_bytes <= MEDIUM_ROW:
        return "medium norm"
    return "norm"


def class_efficiencies(gpu: Gpu) -> Efficiencies:
    """Return a GPU's efficiencies by class.

    Time above the data sheet's is due to instructions and latencies, which more bandwidth or larger
    tensor cores don't reduce, but more SMs do.
    """
    h200 = GPUS["h200"]
    family = gpu.name.split("-")[0]
    spread = SPREAD_ELSEWHERE if family in NUM_SMS else SPREAD
    num_sms = NUM_SMS.get(gpu.name, NUM_SMS.get(family, H200_NUM_SMS))
    efficiencies: Efficiencies = {}
    for name, h200_efficiency in EFFICIENCY.items():
        rate = "bf16_tflops" if name == "wide product" else "memory_tbytes_per_s"
        rate_per_sm = getattr(gpu, rate) / getattr(h200, rate) * H200_NUM_SMS / num_sms
        # Time at the data sheet's rate is 1. The H200's time above it is `overhead`.
        overhead = 1 / h200_efficiency - 1
        efficiency = 1 / (1 + overhead * rate_per_sm)
        efficiencies[name] = efficiency_range(efficiency, spread, "from an H200's, results/h200")
    for path in sorted((work_folder() / "results").glob("*/efficiencies.json")):
        measured = read_json(path)
        if find_peak(measured["device"]) != gpu:
            continue
        source = f"measured, results/{path.parent.name}"
        for name in EFFICIENCY.keys() & measured["classes"]:
            efficiency = measured["classes"][name]["efficiency"]
            efficiencies[name] = efficiency_range(efficiency, SPREAD, source)
    return efficiencies


def ideal_s(operation: Operation, gpu: Gpu) -> float:
    """Return an operation's time at the data sheet's rates."""
    is_16_bit = operation.dtype in (torch.bfloat16, torch.float16)
    tflops = gpu.bf16_tflops if is_16_bit else gpu.fp32_tflops
    compute_s = operation.flops / (1e12 * tflops)
    memory_s = operation.bytes_moved / (1e12 * gpu.memory_tbytes_per_s)
    return max(compute_s, memory_s)


def kernel_s(operation: Operation, gpu: Gpu, efficiencies: Efficiencies, estimate: str) -> float:
    """Return the time of an operation that launches kernels."""
    efficiency = efficiencies[op_class(operation)][estimate]
    return max(ideal_s(operation, gpu) / efficiency + GAP_S, KERNEL_S)


def seconds_by_part(
    work: Iterable[tuple[Operation, float]], gpu: Gpu, efficiencies: Efficiencies, estimate: str
) -> dict[str, float]:
    """Return the seconds of (operation, repetitions) pairs by part, those in which the GPU waits
    for the host's launches, and their sum (`step`)."""
    part_s = defaultdict[str, float](float)
    launched_s = 0.0
    for operation, repeats in work:
        part = operation.part
        if part in TOWERS:
            part += " backward" if operation.backward else " forward"
        part_s[part] += repeats * kernel_s(operation, gpu, efficiencies, estimate)
        launched_s += repeats * HOST_S
    idle_s = launched_s - sum(part_s.values())
    if idle_s > 0:
        part_s["waiting for the host"] = idle_s
    return {**part_s, "step": sum(part_s.values())}
