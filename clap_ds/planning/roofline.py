"""How long recorded operations take on a device of which rates are known: each as long as its FLOPs or its bytes need, whatever
is more (the roofline, Williams et al. 2009), one after the other.

A GPU reaches only a share of its data sheet's rates. Which share isn't known before a measurement, so that a time has three
values, of low, middle and high rates. What torch.compile makes of element-wise operations is modelled by `fused`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from clap_ds.flop_count.peaks import Gpu
from clap_ds.planning.trace import Operation

CASES = ("low", "middle", "high")
PRODUCT_SHARE = {"low": 0.50, "middle": 0.60, "high": 0.70}
"""Of the peak, in matrix products and convolutions: the models' are narrower than those that reach 80 %."""
ATTENTION_SHARE = {"low": 0.15, "middle": 0.25, "high": 0.40}
"""Of the peak, in fused attention: heads are 24 to 64 wide."""
MEMORY_SHARE = {"low": 0.70, "middle": 0.80, "high": 0.90}
"""Of the memory's bandwidth, in operations that only move data."""
KERNEL_S = {"low": 8e-6, "middle": 5e-6, "high": 3e-6}
"""Least time of a kernel: what Python takes to launch the next."""
TOWERS = ("audio", "text")
ATTENTION = tuple(
    name + direction
    for name in ("aten._scaled_dot_product_efficient_attention", "clap_ds.window_attention", "torch_attn._varlen_attn")
    for direction in ("", "_backward")
)


@dataclass(frozen=True)
class DeviceRates:
    """What a device reaches: FLOPs a second of matrix products, by dtype, and of operations that reach less, by name; bytes a
    second that operations read and write; and the least time of one."""

    flops_per_s: Mapping[torch.dtype, float]
    bytes_per_s: float
    kernel_s: float = 0.0
    flops_per_s_of: Mapping[str, float] = field(default_factory=dict)

    def seconds(self, operation: Operation) -> float:
        """Of one operation; 0 of views, and of collectives, which are another's business."""
        if not operation.launches or operation.is_collective:
            return 0.0
        by_dtype = self.flops_per_s[operation.dtype or torch.float32] if operation.flops else 1.0
        compute_s = operation.flops / self.flops_per_s_of.get(operation.name, by_dtype)
        memory_s = operation.bytes_moved / self.bytes_per_s
        return max(compute_s, memory_s, self.kernel_s)


def rates_of(gpu: Gpu, case: str) -> DeviceRates:
    """What a GPU is assumed to reach, low, middle or high."""
    fast, slow = (PRODUCT_SHARE[case] * 1e12 * tflops for tflops in (gpu.bf16_tflops, gpu.fp32_tflops))
    by_dtype = {torch.bfloat16: fast, torch.float16: fast, torch.float32: slow, torch.float64: slow / 2}
    attention = ATTENTION_SHARE[case] * 1e12 * gpu.bf16_tflops
    memory = MEMORY_SHARE[case] * 1e12 * gpu.memory_tbytes_per_s
    return DeviceRates(by_dtype, memory, KERNEL_S[case], dict.fromkeys(ATTENTION, attention))


def fused(operations: Sequence[Operation], parts: Collection[str] = TOWERS) -> list[Operation]:
    """What torch.compile leaves of the operations of some parts: those between two products, FFTs or custom operations become
    one kernel, which reads once what comes from before and writes only what is used after it.

    An optimistic model of Inductor in that it keeps everything in registers, a pessimistic one in that it recomputes nothing.
    """
    last_read = {number: place for place, op in enumerate(operations) for number, _ in op.read}
    result: list[Operation] = []
    group: list[Operation] = []

    def close(place: int) -> None:
        if group:
            result.append(_merged(group, {number for number, last in last_read.items() if last >= place}))
            group.clear()

    for place, operation in enumerate(operations):
        if not operation.launches:
            continue
        fusible = operation.part in parts and not operation.flops and operation.name.startswith("aten.")
        if not fusible or (group and (group[0].part, group[0].backward) != (operation.part, operation.backward)):
            close(place)
        (group if fusible else result).append(operation)
    close(len(operations))
    return result


def _merged(group: Sequence[Operation], used_later: Collection[int]) -> Operation:
    read: dict[int, int] = {}
    written: dict[int, int] = {}
    for operation in group:
        for number, num_bytes in operation.read:
            if number not in written:
                read[number] = max(read.get(number, 0), num_bytes)
        for number, num_bytes in operation.written:
            written[number] = max(written.get(number, 0), num_bytes)
    kept = tuple((number, num_bytes) for number, num_bytes in written.items() if number in used_later)
    first = group[0]
    return Operation("fused", first.part, first.backward, 0, tuple(read.items()), kept, True, first.dtype)


def seconds_by_part(operations: Iterable[tuple[Operation, float]], rates: DeviceRates) -> dict[str, float]:
    """Seconds of operations, each done so many times, by `part` and direction: `audio forward`, …, and in all (`step`)."""
    found: defaultdict[str, float] = defaultdict(float)
    for operation, times in operations:
        direction = " backward" if operation.backward else " forward"
        found[operation.part + direction * (operation.part in TOWERS)] += times * rates.seconds(operation)
    return {**found, "step": sum(found.values())}
