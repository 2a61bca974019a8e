"""Rates of accelerators by their data sheets, and what follows from their peaks: model FLOPs utilisation.

Dense bf16 with fp32 accumulation, by the whole name that the driver gives; data sheets that state a rate with 2:4 sparsity
are halved. A device that isn't listed has no peak and so no MFU: none is guessed from a part of its name, as an H20 is no
H200 and a slice of an H200 (MIG) neither. Imports nothing heavy.
"""

from __future__ import annotations

from dataclasses import dataclass

from clap_ds.config.errors import UserError, did_you_mean
from clap_ds.record.schema import Summary

TRAINING_OVER_FORWARD = 3
"""By the published convention: every forward product has two in backward, for its input and for its weight."""


@dataclass(frozen=True)
class Peak:
    """Dense bf16 rate of one device in TFLOPS, and where it is stated."""

    tflops: float
    source: str


_A100 = "NVIDIA A100 data sheet, nvidia.com/en-us/data-center/a100"
_A800 = "NVIDIA A800 data sheet: an A100 with slower NVLink"
_L40S = "NVIDIA L40S data sheet, nvidia.com/en-us/data-center/l40s: 733 TFLOPS with sparsity"
_H100 = "NVIDIA H100 data sheet, nvidia.com/en-us/data-center/h100"
_H200 = "NVIDIA H200 data sheet, nvidia.com/en-us/data-center/h200"
_H800 = "NVIDIA H800 data sheet: an H100 with slower NVLink and fp64"
_GH200 = "NVIDIA GH200 data sheet (as the published runs assume), 1,979 TFLOPS with sparsity"
_MI250X = "AMD Instinct MI250X data sheet: 383 TFLOPS a card; one device is one of its two dies"
_MI300X = "AMD Instinct MI300X data sheet, amd.com/en/products/accelerators/instinct/mi300/mi300x.html"
_TABLE: list[tuple[float, str, str]] = [
    (312, _A100, "A100-SXM4-40GB, A100-SXM4-80GB, A100-PCIE-40GB, A100-PCIE-80GB, A100 80GB PCIe"),
    (312, _A800, "A800-SXM4-40GB, A800-SXM4-80GB, A800 80GB PCIe"),
    (165, "NVIDIA A30 data sheet, nvidia.com/en-us/data-center/products/a30-gpu", "A30"),
    (149.7, "NVIDIA A40 data sheet, nvidia.com/en-us/data-center/a40: 299.4 TFLOPS with sparsity", "A40"),
    (181.05, "NVIDIA L40 data sheet, nvidia.com/en-us/data-center/l40: 362.1 TFLOPS with sparsity", "L40"),
    (362, _L40S, "L40S"),
    (989, f"{_H100} (SXM): 1,979 TFLOPS with sparsity", "H100 80GB HBM3, H100 SXM5 80GB, H100-SXM5-80GB"),
    (756, f"{_H100} (PCIe): 1,513 TFLOPS with sparsity", "H100 PCIe, H100 80GB PCIe"),
    (835, f"{_H100} (NVL): 1,671 TFLOPS with sparsity", "H100 NVL"),
    (989, f"{_H800}: 1,979 TFLOPS with sparsity", "H800, H800 80GB HBM3"),
    (756, f"{_H800} (PCIe): 1,513 TFLOPS with sparsity", "H800 PCIe"),
    (148, "NVIDIA H20 data sheet: 148 TFLOPS dense", "H20, H20-3e, H20 96GB HBM3"),
    (989, f"{_H200} (SXM): 1,979 TFLOPS with sparsity", "H200, H200 141GB HBM3e"),
    (835, f"{_H200} (NVL): 1,671 TFLOPS with sparsity", "H200 NVL"),
    (989, _GH200, "GH200, GH200 96GB HBM3, GH200 120GB, GH200 480GB, GH200 144G HBM3e, GH200 144GB HBM3e"),
    (2250, "NVIDIA Blackwell data sheet (HGX B200): 4,500 TFLOPS with sparsity", "B200"),
    (2500, "NVIDIA GB200 NVL72 data sheet: 5,000 TFLOPS with sparsity", "GB200"),
    (181, "AMD Instinct MI210 data sheet", "AMD Instinct MI210"),
    (191.5, _MI250X, "AMD Instinct MI250X"),
    (980.6, "AMD Instinct MI300A data sheet", "AMD Instinct MI300A"),
    (1307.4, _MI300X, "AMD Instinct MI300X, AMD Instinct MI300X OAM, AMD Instinct MI300X VF"),
    (1307.4, "AMD Instinct MI325X data sheet", "AMD Instinct MI325X, AMD Instinct MI325X OAM, AMD Instinct MI325X VF"),
]


def _plain(device_name: str) -> str:
    """A name as it is compared: drivers, and people who copy them, differ in the maker's name, case, spaces and hyphens."""
    words = device_name.casefold().replace("-", " ").split()
    return " ".join(word for word in words if word not in ("nvidia", "amd", "instinct"))


_PEAKS = {_plain(name): Peak(tflops, source) for tflops, source, names in _TABLE for name in names.split(", ")}
"""Peak by the name that `torch.cuda.get_device_name` gives, made plain."""


def peak_for(device_name: str, override_tflops: float | None = None) -> Peak | None:
    """The peak of a device: what `clap.hardware.peak_tflops` says, else what the table has under the whole name, else None."""
    if override_tflops is not None:
        return Peak(override_tflops, "clap.hardware.peak_tflops")
    return _PEAKS.get(_plain(device_name))


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU, as plans know it; prices are the user's to state.

    Attributes:
        device_name: as the driver gives it.
        memory_gib: that PyTorch can have ("total capacity" in its out-of-memory messages), a little less than is sold.
        memory_tbytes_per_s: of its memory.
        fp32_tflops: outside tensor cores.
        link_gbytes_per_s: to other GPUs of its node, one way.
        source: of bandwidths and the fp32 rate.
    """

    name: str
    device_name: str
    memory_gib: float
    memory_tbytes_per_s: float
    fp32_tflops: float
    link_gbytes_per_s: float
    source: str

    @property
    def bf16_tflops(self) -> float:
        """Dense, with fp32 accumulation."""
        peak = peak_for(self.device_name)
        assert peak is not None
        return peak.tflops


_A100_SHEET, _H100_SHEET = "NVIDIA A100 data sheet (2022)", "NVIDIA H100 data sheet (2024)"
GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("a100-sxm-40gb", "A100-SXM4-40GB", 39.4, 1.555, 19.5, 300, _A100_SHEET),
        Gpu("a100-sxm-80gb", "A100-SXM4-80GB", 79.2, 2.039, 19.5, 300, _A100_SHEET),
        Gpu("a100-pcie-80gb", "A100 80GB PCIe", 79.2, 1.935, 19.5, 32, f"{_A100_SHEET}; PCIe 4.0, without bridges"),
        Gpu("h100-sxm", "H100 80GB HBM3", 79.1, 3.35, 67, 450, _H100_SHEET),
        Gpu("h100-pcie", "H100 PCIe", 79.1, 2.0, 51, 64, "NVIDIA H100 PCIe product brief (2022); PCIe 5.0, no bridges"),
        Gpu("h200", "H200", 139.8, 4.8, 67, 450, "NVIDIA H200 data sheet (2024)"),
        Gpu("gh200", "GH200 480GB", 94.5, 4.0, 67, 450, "NVIDIA GH200 data sheet (2024): 96 GB HBM3"),
        Gpu("gh200-144gb", "GH200 144G HBM3e", 140.0, 4.9, 67, 450, "NVIDIA GH200 data sheet (2024): 144 GB HBM3e"),
        Gpu("b200", "B200", 178.3, 7.7, 75, 900, "NVIDIA HGX B200 data sheet (2025)"),
        Gpu("mi300x", "AMD Instinct MI300X", 191.5, 5.3, 163.4, 448, "AMD Instinct MI300X data sheet (2023)"),
    )
}
ALIASES = {"a100": "a100-sxm-80gb", "h100": "h100-sxm"}


def gpu_named(name: str) -> Gpu:
    """Raises UserError, with the nearest name that there is, for one that isn't listed."""
    plain = name.casefold().replace("_", "-")
    found = GPUS.get(ALIASES.get(plain, plain))
    if found is None:
        raise UserError(f"--gpu {name}: not in the table{did_you_mean(plain, GPUS)}")
    return found


def utilization(
    published_flops: float,
    training_flops: float,
    samples_per_s: float,
    device_name: str,
    override_tflops: float | None,
    recomputed_flops: float = 0.0,
) -> Summary:
    """The summary's fields: model FLOPs utilisation (arXiv 2204.02311, appendix B) in percent in both conventions, achieved
    TFLOPS (of the work really done), and the peak. Without a peak there is no percentage, and `peak_source` says what to do.

    Args:
        published_flops: forward FLOPs a sample in the published convention, in which training takes three times as many.
        training_flops: a sample's of the work really done, forward and backward.
        samples_per_s: of one device, whose name is as the driver gives it.
        override_tflops: `clap.hardware.peak_tflops`.
        recomputed_flops: forward FLOPs a sample that are done once more, by activation checkpointing or cached accumulation.
            They count as hardware's (`hfu_percent`), never as the model's.
    """
    peak = peak_for(device_name, override_tflops)
    per_s = samples_per_s / 1e12
    published, achieved = TRAINING_OVER_FORWARD * published_flops * per_s, training_flops * per_s
    hardware = achieved + recomputed_flops * per_s
    missing = (
        f"no MFU: the peak of {device_name!r} is not known; set clap.hardware.peak_tflops to its dense bf16 TFLOPS"
        ' (in the run\'s JSON: "clap": {"hardware": {"peak_tflops": …}})'
    )
    return {
        "mfu_published_percent": None if peak is None else 100 * published / peak.tflops,
        "mfu_model_percent": None if peak is None else 100 * achieved / peak.tflops,
        "hfu_percent": None if peak is None else 100 * hardware / peak.tflops,
        "achieved_tflops": achieved,
        "hardware_tflops": hardware,
        "peak_tflops": None if peak is None else peak.tflops,
        "peak_source": missing if peak is None else peak.source,
    }
