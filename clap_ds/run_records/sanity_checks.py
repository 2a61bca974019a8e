"""What has to be said beside a figure. Standard library only."""

from __future__ import annotations

MOST_MFU_PERCENT = 90.0
"""No training is known to come near this share of a peak with all its work counted: matrix products alone reach about 80 %."""
MOST_UNEVEN = 0.02
"""Share by which the median step may tell another rate than the one over time without a word."""


def doubtful_mfu(published_percent: float | None, model_percent: float | None) -> list[str]:
    """Say where a model FLOPs utilization, by either convention, can't be real."""
    found = []
    if published_percent is not None and published_percent > 100:
        found.append(
            f"MFU of {published_percent:.1f} % in the published convention is no share of the peak: it counts captions of full"
            " length (514 text tokens), whatever was done"
        )
    if model_percent is not None and model_percent > MOST_MFU_PERCENT:
        found.append(
            f"MFU of {model_percent:.1f} % of the work done is not possible: the rate or the peak must be wrong"
            f" (more than {MOST_MFU_PERCENT:g} %)"
        )
    return found


def uneven_steps(rate: float, batch: float, median_step_s: float) -> list[str]:
    """A line where a GPU's rate over time (samples/s) isn't that of its median step of `batch` samples; else nothing."""
    by_median = batch / median_step_s
    if abs(by_median / rate - 1) <= MOST_UNEVEN:
        return []
    percent = 100 * (by_median / rate - 1)
    return [f"the median step amounts to {by_median:,.5g} samples/s, {percent:+.1f} %: steps take unlike times"]
