"""Warnings about implausible measurements. Standard library only."""

from __future__ import annotations

MOST_MFU_PERCENT = 90.0
"""Implausible for training, with all work counted: matrix products alone reach about 80%."""
MOST_UNEVEN = 0.02
"""Relative difference of throughput by the median step from that over time, above which to warn."""


def doubtful_mfu(published_percent: float | None, model_percent: float | None) -> list[str]:
    """Return warnings about impossible MFU in either convention."""
    found = []
    if (published_percent or 0) > 100:
        why = "isn't a share of the peak: it always counts full-length captions (514 text tokens)"
        found.append(f"MFU of {published_percent:.1f}% in the published convention {why}")
    if (model_percent or 0) > MOST_MFU_PERCENT:
        why = f"is implausible, above {MOST_MFU_PERCENT:g}%: check the throughput and the peak"
        found.append(f"MFU of {model_percent:.1f}% (executed FLOPs) {why}")
    return found


def uneven_steps(rate: float, batch: float, median_step_s: float) -> list[str]:
    """Return a warning if a GPU's samples/s over time differ from those of its median step of `batch` samples."""
    by_median = batch / median_step_s
    difference = by_median / rate - 1
    told = f"step times are uneven: the median step implies {by_median:,.5g} samples/s ({100 * difference:+.1f}%)"
    return [told] if abs(difference) > MOST_UNEVEN else []
