"""What LAION published for CLAP training on Jupiter (`published/*.csv`), its conventions, and which of its digits don't add up.

MFU in the published convention is forward GFLOPs × 3 × samples/s/GPU over the GPU's dense bf16 peak, with the forward
cost of 514 text tokens whatever the run's captions were. Peaks of other GPUs are not known here: they come with a
run's record or from the user.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

PUBLISHED_DIR = Path(__file__).with_name("published")
FORWARD_GFLOPS: Mapping[str, float] = {"htsat_tiny_roberta_base": 111.20, "htsat_base_roberta_base": 130.09}
"""Claimed forward cost per sample."""
GH200_PEAK_TFLOPS = 989.0
_SETUP = {
    "device": "GH200", "peak_tflops": GH200_PEAK_TFLOPS, "precision": "amp_bf16", "scaling": "weak", "state": "published",
}  # fmt: skip
PUBLISHED_TABLES: Mapping[str, Mapping[str, Any]] = {
    "jupiter_htsat_tiny": {"model": "htsat_tiny_roberta_base", "batch_per_gpu": 616, **_SETUP},
    "jupiter_htsat_base": {"model": "htsat_base_roberta_base", "batch_per_gpu": 416, **_SETUP},
}
"""Columns of a scaling table that the published CSV lacks, by its file name without ending."""


def published_mfu_percent(model: str, rate: float, peak_tflops: float | None) -> float | None:
    """MFU in the published convention at `rate` samples/s/GPU; None without a published cost of the model or a peak."""
    gflops = FORWARD_GFLOPS.get(model)
    return 100 * gflops * 3 * rate / (peak_tflops * 1000) if gflops and peak_tflops else None


def rounding_bounds(digits: str) -> tuple[float, float]:
    """Lowest and highest value that rounds to a printed number ("97.3" → 97.25, 97.35)."""
    value = float(digits)
    half = 0.5 * 10.0 ** -(len(digits.partition(".")[2]))
    return value - half, value + half


def rate_bounds(rate: str, total: str, num_gpus: int) -> tuple[float, float]:
    """Range of samples/s/GPU that agrees with the printed rate and, unless it is empty or contradicts it, the printed total."""
    low, high = rounding_bounds(rate)
    total_low, total_high = rounding_bounds(total) if total else (0.0, 0.0)
    narrowed = max(low, total_low / num_gpus), min(high, total_high / num_gpus)
    return narrowed if narrowed[0] <= narrowed[1] else (low, high)


def wrong_claims(
    cells: Mapping[str, str], gpus: int, model: str, peak_tflops: float | None,
    base: Mapping[str, str] | None, base_gpus: int,
) -> dict[str, str]:  # fmt: skip
    """Digits (by column) a table states that don't follow from its own samples/s, however those were rounded.

    Takes the row's cells as printed and what its MFU needs; and, where known, cells of the row that is 100 % efficient.
    """
    total = cells.get("samples_per_s", "")
    low, high = rate_bounds(cells["samples_per_s_per_gpu"], total, gpus)
    bounds = {"samples_per_s": (low * gpus, high * gpus)} if total else {}
    mfu = [published_mfu_percent(model, rate, peak_tflops) for rate in (low, high)]
    if mfu[0] is not None and mfu[1] is not None:
        bounds["mfu_percent"] = mfu[0], mfu[1]
    if base and float(base.get("scaling_efficiency_percent") or 0) == 100:
        base_low, base_high = rate_bounds(base["samples_per_s_per_gpu"], base.get("samples_per_s", ""), base_gpus)
        bounds["scaling_efficiency_percent"] = 100 * low / base_high, 100 * high / base_low
    return {name: text for name in bounds if (text := cells.get(name)) and not claim_follows(text, *bounds[name])}


def claim_follows(claimed: str, low: float, high: float) -> bool:
    """Whether a printed number is the rounding of some value in [low, high]."""
    claimed_low, claimed_high = rounding_bounds(claimed)
    tolerance = 1e-9 * abs(high)
    return claimed_low <= high + tolerance and low <= claimed_high + tolerance
