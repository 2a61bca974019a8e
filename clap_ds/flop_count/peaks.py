"""Peak rates of accelerators and what follows from them: model FLOPs utilisation.

Dense bf16 with fp32 accumulation, by the exact name the driver gives; data sheets that state a rate with 2:4 sparsity
are halved. A device that isn't listed has no peak and so no MFU: none is ever guessed. Imports nothing heavy.
"""

from __future__ import annotations

from dataclasses import dataclass

from clap_ds.flop_count.analytic import BACKWARD_OVER_FORWARD
from clap_ds.record.schema import Summary

TRAINING_OVER_FORWARD = 1 + BACKWARD_OVER_FORWARD


@dataclass(frozen=True)
class Peak:
    """Dense bf16 rate of one device in TFLOPS, and where it is stated."""

    tflops: float
    source: str


_A100 = Peak(312, "NVIDIA A100 data sheet, nvidia.com/en-us/data-center/a100")
_H100 = "NVIDIA H100 data sheet, nvidia.com/en-us/data-center/h100"
_H200 = "NVIDIA H200 data sheet, nvidia.com/en-us/data-center/h200"
_GH200 = Peak(989, "NVIDIA GH200 data sheet (as the published runs assume), 1,979 TFLOPS with sparsity")
_MI300X = Peak(1307.4, "AMD Instinct MI300X data sheet, amd.com/en/products/accelerators/instinct/mi300/mi300x.html")

PEAKS: dict[str, Peak] = {
    **dict.fromkeys(
        (
            "A100-SXM4-40GB",
            "A100-SXM4-80GB",
            "A100-PCIE-40GB",
            "NVIDIA A100-SXM4-40GB",
            "NVIDIA A100-SXM4-80GB",
            "NVIDIA A100-PCIE-40GB",
            "NVIDIA A100 80GB PCIe",
        ),
        _A100,
    ),
    "NVIDIA L40S": Peak(362, "NVIDIA L40S data sheet, nvidia.com/en-us/data-center/l40s: 733 TFLOPS with sparsity"),
    "NVIDIA H100 80GB HBM3": Peak(989, f"{_H100} (SXM): 1,979 TFLOPS with sparsity"),
    "NVIDIA H100 PCIe": Peak(756, f"{_H100} (PCIe): 1,513 TFLOPS with sparsity"),
    "NVIDIA H100 NVL": Peak(835, f"{_H100} (NVL): 1,671 TFLOPS with sparsity"),
    "NVIDIA H200": Peak(989, f"{_H200} (SXM): 1,979 TFLOPS with sparsity"),
    "NVIDIA H200 NVL": Peak(835, f"{_H200} (NVL): 1,671 TFLOPS with sparsity"),
    **dict.fromkeys(("NVIDIA GH200 120GB", "NVIDIA GH200 480GB", "NVIDIA GH200 144G HBM3e"), _GH200),
    "NVIDIA B200": Peak(2250, "NVIDIA Blackwell data sheet (HGX B200): 4,500 TFLOPS with sparsity"),
    "NVIDIA GB200": Peak(2500, "NVIDIA GB200 NVL72 data sheet: 5,000 TFLOPS with sparsity"),
    "AMD Instinct MI250X": Peak(
        191.5, "AMD Instinct MI250X data sheet: 383 TFLOPS a card; one device is one of its two dies"
    ),
    "AMD Instinct MI300A": Peak(980.6, "AMD Instinct MI300A data sheet"),
    "AMD Instinct MI300X": _MI300X,
    "AMD Instinct MI325X": Peak(1307.4, "AMD Instinct MI325X data sheet"),
}
"""Peak by the name `torch.cuda.get_device_name` gives."""


def peak_for(device_name: str, override_tflops: float | None = None) -> Peak | None:
    """The peak of a device: what `clap.hardware.peak_tflops` says, else what the table has, else None."""
    if override_tflops is not None:
        return Peak(override_tflops, "clap.hardware.peak_tflops")
    return PEAKS.get(device_name)


def no_peak_message(device_name: str) -> str:
    """Why there is no MFU and what to do about it."""
    return (
        f"no MFU: the peak of {device_name!r} is not known; set clap.hardware.peak_tflops to its dense bf16 TFLOPS"
        ' (in the run\'s JSON: "clap": {"hardware": {"peak_tflops": …}})'
    )


def achieved_tflops(forward_flops: float, samples_per_s: float) -> float:
    """TFLOPS of one device while training: forward and backward, recomputation not counted.

    Args:
        forward_flops: FLOPs of one sample's forward pass.
        samples_per_s: samples per second of one device.
    """
    return TRAINING_OVER_FORWARD * forward_flops * samples_per_s / 1e12


def mfu_percent(forward_flops: float, samples_per_s: float, peak: Peak | None) -> float | None:
    """Model FLOPs utilisation (arXiv 2204.02311, appendix B) in percent; None without a peak."""
    return None if peak is None else 100 * achieved_tflops(forward_flops, samples_per_s) / peak.tflops


def utilization(
    published_flops: float,
    model_flops: float,
    samples_per_s: float,
    device_name: str,
    override_tflops: float | None,
    recomputed_flops: float = 0.0,
) -> Summary:
    """The summary's fields: MFU in both conventions, achieved TFLOPS (of the work really done), and the peak.

    Args:
        published_flops: forward FLOPs a sample in the published convention.
        model_flops: forward FLOPs a sample of the work really done.
        samples_per_s: samples per second of one device.
        device_name: as the driver gives it.
        override_tflops: `clap.hardware.peak_tflops`.
        recomputed_flops: of those, the FLOPs that activation checkpointing does once more in the backward pass. They count
            as hardware's (`hfu_percent`), never as the model's.
    """
    peak = peak_for(device_name, override_tflops)
    hardware_tflops = achieved_tflops(model_flops + recomputed_flops / TRAINING_OVER_FORWARD, samples_per_s)
    return {
        "mfu_published_percent": mfu_percent(published_flops, samples_per_s, peak),
        "mfu_model_percent": mfu_percent(model_flops, samples_per_s, peak),
        "hfu_percent": None if peak is None else 100 * hardware_tflops / peak.tflops,
        "achieved_tflops": achieved_tflops(model_flops, samples_per_s),
        "hardware_tflops": hardware_tflops,
        "peak_tflops": None if peak is None else peak.tflops,
        "peak_source": no_peak_message(device_name) if peak is None else peak.source,
    }
