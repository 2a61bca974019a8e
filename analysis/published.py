"""What LAION published for CLAP training on Jupiter (`published/*.csv`), its conventions, and which of its digits
don't add up.

MFU in the published convention is forward GFLOPs × 3 × samples/s/GPU over the GPU's dense bf16 peak, with the forward
cost of 514 text tokens whatever the run's captions were. Peaks of other GPUs are not known here: they come with a
run's record or from the user.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

PUBLISHED_DIR = Path(__file__).with_name("published")
FORWARD_GFLOPS: Mapping[str, float] = {"htsat_tiny_roberta_base": 111.20, "htsat_base_roberta_base": 130.09}
"""Claimed forward cost per sample."""
GH200_PEAK_TFLOPS = 989.0


@dataclass(frozen=True)
class PublishedTable:
    """Facts about a published table that its CSV has no column for."""

    model: str
    micro_batch_per_gpu: int
    device_name: str = "GH200"
    peak_tflops: float = GH200_PEAK_TFLOPS
    precision: str = "amp_bf16"


PUBLISHED_TABLES: Mapping[str, PublishedTable] = {
    "jupiter_htsat_tiny": PublishedTable("htsat_tiny_roberta_base", 616),
    "jupiter_htsat_base": PublishedTable("htsat_base_roberta_base", 416),
}
"""By file name without ending."""


def published_mfu_percent(model: str | None, rate: float, peak_tflops: float | None) -> float | None:
    """MFU in the published convention; None where the model has no published cost or the GPU's peak is not known.

    Args:
        model: preset name.
        rate: samples/s/GPU.
        peak_tflops: dense peak of one GPU at the precision used.
    """
    gflops = FORWARD_GFLOPS.get(model or "")
    if gflops is None or peak_tflops is None:
        return None
    return 100 * gflops * 3 * rate / (peak_tflops * 1000)


def rounding_bounds(digits: str) -> tuple[float, float]:
    """Lowest and highest value that rounds to a printed number ("97.3" → 97.25, 97.35)."""
    value = float(digits)
    half = 0.5 * 10.0 ** -(len(digits.partition(".")[2]))
    return value - half, value + half


def rate_bounds(rate: str, total: str | None, num_gpus: int) -> tuple[float, float]:
    """Range of samples/s/GPU that agrees with the printed rate and, where there is one, with the printed total.

    Where the two contradict each other (an empty range) the rate per GPU is taken.
    """
    low, high = rounding_bounds(rate)
    if total:
        total_low, total_high = rounding_bounds(total)
        narrowed = max(low, total_low / num_gpus), min(high, total_high / num_gpus)
        if narrowed[0] <= narrowed[1]:
            return narrowed
    return low, high


def claim_follows(claimed: str, low: float, high: float) -> bool:
    """Whether a printed number is the rounding of some value in [low, high]."""
    claimed_low, claimed_high = rounding_bounds(claimed)
    tolerance = 1e-9 * abs(high)
    return claimed_low <= high + tolerance and low <= claimed_high + tolerance


def read_facts(path: Path) -> PublishedTable | None:
    """The facts belonging to a published table, recognised by its file name."""
    return PUBLISHED_TABLES.get(path.stem)
