"""Estimate the time of recorded operations on a device with the roofline model (Williams et al. 2009): sequentially, the
larger of FLOPs and bytes at low, middle and high fractions of the data sheet's rates."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch

from clap_ds.flop_count.device_specs import Gpu
from clap_ds.planning.roofline_shares import class_of, efficiencies_of
from clap_ds.planning.tracing import Operation

CASES = ("low", "middle", "high")
HOST_S = {"low": 12e-6, "middle": 8e-6, "high": 5e-6}
"""Python's time to launch an operation: 5 to 25 µs, less on newer processors. It only matters if the GPU is idle."""
KERNEL_S = 2e-6
"""Minimum time of a kernel, including the gap before it."""
TOWERS = ("audio", "text")


@dataclass(frozen=True)
class DeviceRates:
    """Hold the data sheet's rates, the fractions that classes of operations reach (default 1), a kernel's minimum time and
    the host's launch time."""

    flops_per_s: Mapping[torch.dtype, float]
    bytes_per_s: float
    kernel_s: float = 0.0
    host_s: float = 0.0
    share_of: Mapping[str, float] = field(default_factory=dict)

    def ideal_s(self, operation: Operation) -> float:
        """Return an operation's time at the data sheet's rates; 0 for views and collectives."""
        if not operation.launches or operation.is_collective:
            return 0.0
        compute_s = operation.flops / self.flops_per_s[operation.dtype or torch.float32] if operation.flops else 0.0
        return max(compute_s, operation.bytes_moved / self.bytes_per_s)

    def seconds(self, operation: Operation) -> float:
        ideal_s = self.ideal_s(operation)
        return max(ideal_s / self.share_of.get(class_of(operation), 1.0), self.kernel_s) if ideal_s else 0.0


def rates_of(gpu: Gpu, case: str) -> DeviceRates:
    """Return the rates that a GPU is assumed to reach in a case of `CASES`."""
    fast, slow = 1e12 * gpu.bf16_tflops, 1e12 * gpu.fp32_tflops
    by_dtype = {torch.bfloat16: fast, torch.float16: fast, torch.float32: slow, torch.float64: slow / 2}
    shares = {name: getattr(each, case) for name, each in efficiencies_of(gpu).items()}
    return DeviceRates(by_dtype, 1e12 * gpu.memory_tbytes_per_s, KERNEL_S, HOST_S[case], shares)


def seconds_by_part(operations: Iterable[tuple[Operation, float]], rates: DeviceRates) -> dict[str, float]:
    """Return the seconds of (operation, repetitions) pairs in order, by `part` and direction: `audio forward`, …, and in
    total (`step`). The host launches them ahead of the GPU, which waits if the host falls behind."""
    found: defaultdict[str, float] = defaultdict(float)
    launched_s = done_s = 0.0
    for operation, times in operations:
        before_s, kernel_s = done_s, rates.seconds(operation)
        launched_s += times * rates.host_s * (kernel_s > 0)
        done_s = max(done_s, launched_s) + times * kernel_s
        direction = " backward" if operation.backward else " forward"
        found[operation.part + direction * (operation.part in TOWERS)] += done_s - before_s
    return {**found, "step": sum(found.values())}
