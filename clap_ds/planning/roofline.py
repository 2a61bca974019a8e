"""How long recorded operations take on a device of which rates are known: each as long as its FLOPs or its bytes need, whatever
is more (the roofline, Williams et al. 2009), one after the other, at low, middle and high shares of the data sheet's rates."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from clap_ds.flop_count.device_specs import Gpu
from clap_ds.planning.roofline_shares import class_of, efficiencies_of
from clap_ds.planning.trace import Operation

CASES = ("low", "middle", "high")
HOST_S = {"low": 12e-6, "middle": 8e-6, "high": 5e-6}
"""What Python takes to launch an operation: 5 to 25 µs, the less the younger the processor. Waited for only where the GPU has
nothing left to do."""
KERNEL_S = 2e-6
"""Least time of a kernel, the gap before it included."""
TOWERS = ("audio", "text")
ROW_SUMS = ("aten.sum", "aten.native_layer_norm_backward")


@dataclass(frozen=True)
class DeviceRates:
    """By the data sheet, but for the share of it that classes of operations reach (others 1), the least time of a kernel and
    the host's time to launch one."""

    flops_per_s: Mapping[torch.dtype, float]
    bytes_per_s: float
    kernel_s: float = 0.0
    host_s: float = 0.0
    share_of: Mapping[str, float] = field(default_factory=dict)

    def ideal_s(self, operation: Operation) -> float:
        """Of one operation at the data sheet's rates; 0 of views and of collectives."""
        if not operation.launches or operation.is_collective:
            return 0.0
        compute_s = operation.flops / self.flops_per_s[operation.dtype or torch.float32] if operation.flops else 0.0
        return max(compute_s, operation.bytes_moved / self.bytes_per_s)

    def seconds(self, operation: Operation) -> float:
        ideal_s = self.ideal_s(operation)
        return max(ideal_s / self.share_of.get(class_of(operation), 1.0), self.kernel_s) if ideal_s else 0.0


def rates_of(gpu: Gpu, case: str) -> DeviceRates:
    """What a GPU is assumed to reach, low, middle or high."""
    fast, slow = 1e12 * gpu.bf16_tflops, 1e12 * gpu.fp32_tflops
    by_dtype = {torch.bfloat16: fast, torch.float16: fast, torch.float32: slow, torch.float64: slow / 2}
    shares = {name: getattr(each, case) for name, each in efficiencies_of(gpu).items()}
    return DeviceRates(by_dtype, 1e12 * gpu.memory_tbytes_per_s, KERNEL_S, HOST_S[case], shares)


def fused(operations: Sequence[Operation], parts: Collection[str] = TOWERS) -> list[Operation]:
    """What torch.compile leaves of the operations of some parts: those between two products, FFTs or custom operations become
    one kernel, which reads once what comes from before and writes only what is used after it. Sums over rows, of biases' and
    norms' gradients, are kernels of their own, which read their inputs once more."""
    last_read = {number: place for place, op in enumerate(operations) for number, _ in op.read}
    result: list[Operation] = []
    group: list[Operation] = []

    def close(place: int) -> None:
        if group:
            result.append(_merged(group, {number for number, last in last_read.items() if last >= place}))
            result.extend(replace(each, name="fused") for each in group if each.backward and each.name in ROW_SUMS)
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
        read |= {n: max(read.get(n, 0), size) for n, size in operation.read if n not in written}
        written |= {n: max(written.get(n, 0), size) for n, size in operation.written}
    kept = {number: size for number, size in written.items() if number in used_later}
    return replace(group[0], name="fused", flops=0, read=(*read.items(),), written=(*kept.items(),), shapes=())


def seconds_by_part(operations: Iterable[tuple[Operation, float]], rates: DeviceRates) -> dict[str, float]:
    """Seconds of operations in their order, each done so many times, by `part` and direction: `audio forward`, …, and in all
    (`step`). The host launches them one after the other ahead of the GPU, which waits where it isn't ahead."""
    found: defaultdict[str, float] = defaultdict(float)
    launched_s = done_s = 0.0
    for operation, times in operations:
        before_s, kernel_s = done_s, rates.seconds(operation)
        launched_s += times * rates.host_s * (kernel_s > 0)
        done_s = max(done_s, launched_s) + times * kernel_s
        direction = " backward" if operation.backward else " forward"
        found[operation.part + direction * (operation.part in TOWERS)] += done_s - before_s
    return {**found, "step": sum(found.values())}
