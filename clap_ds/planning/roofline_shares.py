"""Estimate the fraction of its data sheet's rates that a GPU reaches, by class of operation: low, middle and high.

The fraction is the roofline time, the larger of FLOPs and bytes at the data sheet's rates, over the kernels' time.
Measurements in `results/<device>/efficiencies.json` override the table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from clap_ds.config.files import read_json
from clap_ds.config.paths import work_folder
from clap_ds.flop_count.device_specs import GPUS, Gpu, peak_for
from clap_ds.planning.tracing import Operation

SPREAD = 0.1
"""Relative uncertainty of a measured fraction, from other shapes of the class, clocks and temperature."""
NARROW_ROW, MEDIUM_ROW = 256, 1024
"""Most bytes of a normalized row."""
THIN = 200
"""FLOPs per byte below which a product is memory-bound: the ridge points of an A100 and an H100 are 153 and 295."""


@dataclass(frozen=True)
class Efficiency:
    low: float
    middle: float
    high: float
    source: str


TABLE: Mapping[str, Efficiency] = {
    "wide product": Efficiency(0.50, 0.62, 0.75, "80–84% of an H100 at the best shapes (mamf-finder), less at K = 768"),
    "thin product": Efficiency(0.35, 0.55, 0.75, "cuBLAS 40, CUTLASS 70% of an H100's bandwidth (cutlass #1176, #1139)"),
    "thin weight gradient": Efficiency(0.20, 0.40, 0.60, "split over the rows, few tiles (cutlass #1586); a guess"),
    "other product": Efficiency(0.30, 0.50, 0.70, "batches of small ones, convolutions, FFTs: few tiles, or padded; a guess"),
    "flash attention": Efficiency(0.20, 0.35, 0.55, "512 tokens on an A100 (arXiv 2307.08691), less at fewer"),
    "flash attention backward": Efficiency(0.12, 0.25, 0.42, "512 tokens on an A100 (arXiv 2307.08691), less at fewer"),
    "attention": Efficiency(0.15, 0.28, 0.50, "128–256 tokens or heads of 32 on an A100: 23–60% (xformers #434)"),
    "attention backward": Efficiency(0.06, 0.13, 0.25, "197 and 512 tokens on an A100: 9–25% (xformers #467, #587)"),
    "triton window attention": Efficiency(0.40, 0.60, 0.80, "softmax's instructions (results/triton); a guess"),
    "triton window attention backward": Efficiency(0.25, 0.45, 0.70, "12 warps at a time (results/triton); a guess"),
    "triton mlp": Efficiency(0.18, 0.26, 0.35, "GELU's instructions (results/triton)"),
    "triton mlp backward": Efficiency(0.35, 0.50, 0.75, "GELU's instructions and traffic (results/triton)"),
    "norm": Efficiency(0.35, 0.55, 0.75, "rows of 1,024 on an A100: 44–58% (apex #1037)"),
    "norm backward": Efficiency(0.15, 0.30, 0.50, "rows of 1,024 on an A100: 28–37% (apex #1037)"),
    "medium norm": Efficiency(0.17, 0.30, 0.55, "between the others"),
    "medium norm backward": Efficiency(0.08, 0.17, 0.35, "between the others"),
    "narrow norm": Efficiency(0.06, 0.12, 0.25, "a block a row (pytorch #143754, #69963), 200 rows a µs on an MI250 (#87635)"),
    "narrow norm backward": Efficiency(0.04, 0.08, 0.17, "the same, and column sums (pytorch #87635, #148605)"),
    "softmax": Efficiency(0.50, 0.70, 0.85, "a warp a row; a guess"),
    "reduction": Efficiency(0.35, 0.55, 0.80, "as element-wise along rows (pytorch #132964), less along columns; a guess"),
    "element-wise": Efficiency(0.72, 0.85, 0.92, "sums on an H100: 94% (pytorch #132964)"),
    "strided copy": Efficiency(0.35, 0.55, 0.75, "half a contiguous copy's rate (cumo #415, pytorch #194310)"),
    "scatter": Efficiency(0.06, 0.12, 0.25, "1.25 ms for 16,384 tokens of RoBERTa's size (pytorch #62495)"),
    "optimizer": Efficiency(0.50, 0.70, 0.85, "a guess"),
    "fused kernel": Efficiency(0.58, 0.70, 0.83, "Inductor's rows and element-wise kernels; a guess"),
}  # fmt: skip
"""For an H100 (SXM)."""
PROCESSORS = {
    "a100-sxm-40gb": 108, "a100-sxm-80gb": 108, "a100-pcie-80gb": 108, "h100-sxm": 132, "h100-pcie": 114, "h200": 132,
    "gh200": 132, "gh200-144gb": 132, "b200": 148, "mi300x": 304, "rtx-3090": 82,
}  # fmt: skip
"""Streaming multiprocessors or compute units."""
HOPPER = {"h100-sxm", "h100-pcie", "h200", "gh200", "gh200-144gb"}
"""GPUs with the same processors, for which a measurement of one counts."""
FUSED = "fused kernel"
"""Inductor's kernels."""
_NAMES = {
    "product": "mm addmm",
    "other product": "bmm baddbmm convolution _fft_r2c _fft_c2r _fft_c2c",
    "flash attention": "_scaled_dot_product_flash_attention _scaled_dot_product_cudnn_attention _varlen_attn",
    "attention": "_scaled_dot_product_efficient_attention",
    "triton window attention": "window_attention",
    "triton mlp": "mlp",
    "norm": "native_layer_norm native_batch_norm cudnn_batch_norm native_group_norm",
    "softmax": "_softmax _log_softmax",
    "reduction": "sum mean amax amin max min var std linalg_vector_norm logsumexp",
    "strided copy": "clone roll cat stack constant_pad_nd slice select embedding index gather upsample_bicubic2d",
    "scatter": "embedding_dense index_put _index_put_impl index_add scatter_add",
    FUSED: "fused",
}
_CLASSES = {name: each for each, names in _NAMES.items() for name in names.split()}


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


def efficiencies_of(gpu: Gpu) -> dict[str, Efficiency]:
    """Return the table for a GPU, with measurements of it or of another Hopper GPU. Time above the data sheet's is due to
    instructions and latencies, which more bandwidth or larger tensor cores don't reduce."""
    found = {name: _scaled(each, name, GPUS["h100-sxm"], gpu) for name, each in TABLE.items()}
    measured = [(path, read_json(path)) for path in sorted((work_folder() / "results").glob("*/efficiencies.json"))]
    for path, record in sorted(measured, key=lambda each: peak_for(each[1]["device"]) == gpu):  # its own come last
        if (of := peak_for(record["device"])) == gpu or (of and {of.name, gpu.name} <= HOPPER):
            for name in TABLE.keys() & record["classes"].keys():
                share = record["classes"][name]["efficiency"]
                spread = (1 - SPREAD) * share, share, (1 + SPREAD) * share
                source = f"measured on {of.name}, results/{path.parent.name}"
                found[name] = _scaled(Efficiency(*spread, source), name, of, gpu)
    return found


def _scaled(each: Efficiency, name: str, of: Gpu, gpu: Gpu) -> Efficiency:
    """Convert a class's fractions on one GPU to those on another."""
    rates = [kind.bf16_tflops if name == "wide product" else kind.memory_tbytes_per_s for kind in (gpu, of)]
    ratio = rates[0] / PROCESSORS[gpu.name] / (rates[1] / PROCESSORS[of.name])
    low, middle, high = (1 / (1 + (1 / share - 1) * ratio) for share in (each.low, each.middle, each.high))
    return Efficiency(low, middle, high, each.source)
