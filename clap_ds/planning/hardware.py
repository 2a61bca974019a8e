"""What a plan knows of GPUs: memory, bandwidth, links and rates, each from a data sheet. Prices are the user's to state.

The bf16 peak is `flop_count.peaks`'. Memory is what PyTorch can have ("total capacity" in its out-of-memory messages), a little
less than what is sold. How much of these rates a step reaches is `roofline.py`'s assumption. Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from clap_ds.config.errors import UserError, did_you_mean
from clap_ds.flop_count.peaks import peak_for


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU.

    Attributes:
        device_name: as the driver gives it; `peaks` knows it.
        memory_gib: that programs can have.
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


_A100, _H100 = "NVIDIA A100 data sheet (2022)", "NVIDIA H100 data sheet (2024)"
GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("a100-sxm-40gb", "A100-SXM4-40GB", 39.4, 1.555, 19.5, 300, _A100),
        Gpu("a100-sxm-80gb", "A100-SXM4-80GB", 79.2, 2.039, 19.5, 300, _A100),
        Gpu("a100-pcie-80gb", "A100 80GB PCIe", 79.2, 1.935, 19.5, 32, f"{_A100}; PCIe 4.0, without bridges"),
        Gpu("h100-sxm", "H100 80GB HBM3", 79.1, 3.35, 67, 450, _H100),
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
