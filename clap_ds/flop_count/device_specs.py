"""Data-sheet rates of accelerators, and model FLOPs utilization (MFU) from their peaks.

Peaks are for dense bf16 (V100: fp16) with fp32 accumulation. Rates with 2:4 sparsity are halved.
Names are those of drivers. A device that isn't listed, such as a MIG slice, has no peak and no MFU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from clap_ds.run_records.schema import Summary
from clap_ds.utils.errors import UserError, did_you_mean

# In the published convention, every forward product has two in the backward pass, for its input and
# its weight.
TRAINING_OVER_FORWARD = 3


@dataclass(frozen=True)
class Gpu:
    """A GPU's data sheet. Fields used only by plans are 0 if plans don't support it."""

    # From drivers, without the vendor, separated by commas.
    names: str
    # Dense, with fp32 accumulation.
    bf16_tflops: float
    source: str
    # In plans.
    name: str = ""
    # Available to PyTorch, slightly less than nominal.
    memory_gib: float = 0.0
    memory_tbytes_per_s: float = 0.0
    # Outside tensor cores.
    fp32_tflops: float = 0.0
    # To other GPUs of its node, one way.
    link_gbytes_per_s: float = 0.0
    # CUDA compute capability; of newer GPUs at least this one.
    capability: tuple[int, int] = (8, 0)

    @property
    def device_name(self) -> str:
        return self.names.split(", ")[0]


_V100 = "NVIDIA V100 data sheet (2020), fp16 as it has no bf16"
_A100 = "NVIDIA A100 data sheet (2022)"
_A800 = "NVIDIA A800 data sheet: an A100 with slower NVLink"
_H100 = "NVIDIA H100 data sheet (2024), half of its rate with sparsity"
_H800 = "NVIDIA H800 data sheet, half of its rate with sparsity"
_H200 = "NVIDIA H200 data sheet (2024), half of its rate with sparsity"
_GH200 = "NVIDIA GH200 data sheet (2024; as the published runs assume), half of 1,979 TFLOPS with sparsity"
_AMD = "AMD Instinct {} data sheet (2023)"
# fmt: off
_TABLE = (
    # names, TFLOPS, source, name in plans, GiB, TB/s, fp32 TFLOPS, GB/s of links, capability
    Gpu("Tesla V100-SXM2-16GB", 125, _V100, "v100-16gb", 15.7, 0.9, 15.7, 150, (7, 0)),
    Gpu("Tesla V100-SXM2-32GB", 125, _V100, "v100-32gb", 31.7, 0.9, 15.7, 150, (7, 0)),
    Gpu("A100-SXM4-40GB", 312, _A100, "a100-sxm-40gb", 39.4, 1.555, 19.5, 300),
    Gpu("A100-SXM4-80GB", 312, _A100, "a100-sxm-80gb", 79.2, 2.039, 19.5, 300),
    Gpu("A100 80GB PCIe, A100-PCIE-80GB", 312,
        f"{_A100}; PCIe 4.0", "a100-pcie-80gb", 79.2, 1.935, 19.5, 32),
    Gpu("A100-PCIE-40GB", 312, _A100),
    Gpu("A800-SXM4-40GB, A800-SXM4-80GB, A800 80GB PCIe", 312, _A800),
    Gpu("A30", 165, "NVIDIA A30 data sheet"),
    Gpu("A40", 149.7, "NVIDIA A40 data sheet, half of its rate with sparsity"),
    Gpu("L40", 181.05, "NVIDIA L40 data sheet, half of its rate with sparsity"),
    Gpu("L40S", 362, "NVIDIA L40S data sheet, half of its rate with sparsity"),
    Gpu("H100 80GB HBM3, H100 SXM5 80GB, H100-SXM5-80GB", 989,
        _H100, "h100-sxm", 79.1, 3.35, 67, 450),
    Gpu("H100 PCIe, H100 80GB PCIe", 756,
        f"{_H100}; PCIe 5.0, no bridges", "h100-pcie", 79.1, 2.0, 51, 64),
    Gpu("H100 NVL", 835, _H100),
    Gpu("H800, H800 80GB HBM3", 989, _H800, "h800", 79.1, 3.35, 67, 200),
    Gpu("H800 PCIe", 756, _H800),
    Gpu("H20, H20-3e, H20 96GB HBM3", 148, "NVIDIA H20 data sheet"),
    Gpu("H200, H200 141GB HBM3e", 989, _H200, "h200", 139.8, 4.8, 67, 450),
    Gpu("H200 NVL", 835, _H200),
    Gpu("GH200 480GB, GH200, GH200 96GB HBM3, GH200 120GB", 989,
        _GH200, "gh200", 94.5, 4.0, 67, 450),
    Gpu("GH200 144G HBM3e, GH200 144GB HBM3e", 989, _GH200, "gh200-144gb", 140.0, 4.9, 67, 450),
    Gpu("B200", 2250,
        "NVIDIA HGX B200 data sheet (2025), half of its rate with sparsity", "b200", 178.3, 7.7, 75, 900),
    Gpu("GB200", 2500, "NVIDIA GB200 NVL72 data sheet, half of its rate with sparsity"),
    Gpu("GeForce RTX 3090", 71,
        "NVIDIA GA102 white paper (2020); PCIe 4.0", "rtx-3090", 23.7, 0.936, 35.6, 32),
    Gpu("MI210", 181, _AMD.format("MI210")),
    Gpu("MI250X", 191.5,
        _AMD.format("MI250X") + ": 383 TFLOPS a card; one device is one of its two dies"),
    Gpu("MI300A", 980.6, _AMD.format("MI300A")),
    Gpu("MI300X, MI300X OAM, MI300X VF", 1307.4,
        _AMD.format("MI300X"), "mi300x", 191.5, 5.3, 163.4, 448),
    Gpu("MI325X, MI325X OAM, MI325X VF", 1307.4, _AMD.format("MI325X")),
)
# fmt: on
# GPUs that plans support.
GPUS = {gpu.name: gpu for gpu in _TABLE if gpu.name}
ALIASES = {"a100": "a100-sxm-80gb", "h100": "h100-sxm"}


def _normalize(device_name: str) -> str:
    """Return a name without vendor, case, spaces and hyphens, which differ between drivers and
    users."""
    parts = device_name.casefold().replace("-", " ").split()
    return " ".join(part for part in parts if part not in ("nvidia", "amd", "instinct"))


_BY_DEVICE = {_normalize(name): gpu for gpu in _TABLE for name in gpu.names.split(", ")}


def find_peak(device_name: str, override_tflops: float | None = None) -> Gpu | None:
    """Return the device with its peak from `clap.hardware.peak_tflops`, else by its full name; None
    if unknown."""
    if override_tflops is not None:
        return Gpu(device_name, override_tflops, "clap.hardware.peak_tflops")
    return _BY_DEVICE.get(_normalize(device_name))


def gpu_named(name: str) -> Gpu:
    """Return the GPU of this name. Raises UserError with the nearest name if it isn't listed."""
    normalized = name.casefold().replace("_", "-")
    gpu = GPUS.get(ALIASES.get(normalized, normalized))
    if gpu is None:
        raise UserError(f"--gpu {name}: unknown GPU{did_you_mean(normalized, GPUS, len(GPUS))}")
    return gpu


def utilization(
    published_flops: float | None, training_flops: float, samples_per_s: float, device_name: str,
    override_tflops: float | None, recomputed_flops: float = 0.0,
) -> Summary:  # fmt: skip
    """Return the summary's fields: MFU (arXiv 2204.02311, appendix B) in percent in both
    conventions, achieved TFLOPS and the peak.

    If the peak is unknown, percentages are None and `peak_source` gives instructions.

    Args:
        published_flops: of a sample's forward pass in the published convention, if it has any.
        training_flops: executed per sample in forward and backward.
        recomputed_flops: executed per sample in addition. They count for `hfu_percent`.
    """
    tera_per_s = samples_per_s / 1e12
    achieved_tflops = training_flops * tera_per_s
    hardware_tflops = achieved_tflops + recomputed_flops * tera_per_s
    summary: Any = {
        "mfu_published_percent": None,
        "mfu_model_percent": None,
        "hfu_percent": None,
        "achieved_tflops": achieved_tflops,
        "hardware_tflops": hardware_tflops,
        "peak_tflops": None,
        "peak_source": (
            f"no MFU: the peak of {device_name!r} is unknown; set clap.hardware.peak_tflops to its dense bf16 TFLOPS"
            ' (in the run\'s JSON: "clap": {"hardware": {"peak_tflops": …}})'
        ),
    }
    peak = find_peak(device_name, override_tflops)
    if peak is not None:
        summary["mfu_model_percent"] = 100 * achieved_tflops / peak.bf16_tflops
        summary["hfu_percent"] = 100 * hardware_tflops / peak.bf16_tflops
        summary |= {"peak_tflops": peak.bf16_tflops, "peak_source": peak.source}
        if published_flops is not None:
            published_tflops = TRAINING_OVER_FORWARD * published_flops * tera_per_s
            summary["mfu_published_percent"] = 100 * published_tflops / peak.bf16_tflops
    return cast("Summary", summary)
