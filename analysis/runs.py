"""One measured run as the rest of `analysis` sees it, whatever it was read from.

Holds only the typed record, the error class and the small helpers that keep NaN and zero out of it. Reading is the
business of `record` (run directories), `deepspeed_log` (logs) and `table` (CSV tables).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

BREAKDOWN_PARTS = ("data_wait", "forward", "loss", "backward", "exposed_communication", "optimizer")
"""Parts of a step, in the order they happen."""

Source = Literal["record", "log", "table"]


class InputError(ValueError):
    """A file or option that can't be used: says which, what was found and what was expected."""


@dataclass(frozen=True)
class Run:
    """One run. Rates are samples per second per GPU; anything not known is None, never NaN or zero."""

    source: str
    kind: Source
    state: str = "unknown"
    error: str | None = None
    model: str | None = None
    device_name: str | None = None
    precision: str | None = None
    text_tokens: int | None = None
    num_nodes: int | None = None
    num_gpus: int | None = None
    micro_batch_per_gpu: int | None = None
    gradient_accumulation_steps: int = 1
    rate: float | None = None
    """Median of the windows, samples/s/GPU."""
    total_rate: float | None = None
    """Samples/s of all GPUs where the source states it with more digits than `rate`."""
    rate_low: float | None = None
    rate_high: float | None = None
    windows: tuple[float, ...] = ()
    interval_from: str = ""
    """What `rate_low` and `rate_high` are, in words."""
    step_time_s: float | None = None
    slowest_rank_step_time_s: float | None = None
    data_wait_percent: float | None = None
    memory_peak_bytes: float | None = None
    breakdown_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds a step by part (`BREAKDOWN_PARTS`), of an instrumented pass; parts not measured are absent."""
    mfu_model_percent: float | None = None
    peak_tflops: float | None = None
    time_to_target_s: float | None = None
    """Seconds a training run took to reach `clap.train.stop_at`."""
    claims: Mapping[str, str] = field(default_factory=dict)
    """Digits a table states about itself (`mfu_percent`, …), to be checked against its own samples/s."""
    notes: tuple[str, ...] = ()
    config: Mapping[str, Any] = field(default_factory=dict)

    @property
    def batch_per_gpu(self) -> int | None:
        """Samples each GPU contributes to one optimiser step."""
        if self.micro_batch_per_gpu is None:
            return None
        return self.micro_batch_per_gpu * self.gradient_accumulation_steps

    @property
    def global_batch(self) -> int | None:
        if self.batch_per_gpu is None or self.num_gpus is None:
            return None
        return self.batch_per_gpu * self.num_gpus


def positive(value: object) -> float | None:
    """`value` as a float if it is a finite number above zero, else None."""
    number = non_negative(value)
    return number if number else None


def non_negative(value: object) -> float | None:
    """`value` as a float if it is a finite number of at least zero, else None (booleans and text are not numbers)."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) and value >= 0 else None


def whole(value: object) -> int | None:
    """`value` as an int if it is a whole number above zero, else None."""
    number = positive(value)
    return int(number) if number is not None and number == int(number) else None


def run_command(main: Callable[[], None]) -> None:
    """Run a command's `main`; a user's mistake is one line on stderr and exit code 2, not a traceback."""
    try:
        main()
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(1)


def warn(message: str) -> None:
    print(f"warning: {message}", file=sys.stderr)
