"""Predict one GPU's memory by part, the largest micro-batch that fits, and its speed without
communication."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import asdict
from functools import cache, partial
from typing import Any

from clap_ds.config.settings import RunSettings
from clap_ds.engine.compile import resolve_compile_mode
from clap_ds.flop_count.device_specs import Gpu
from clap_ds.model.kernels import LEAST_CAPABILITY, select_kernels
from clap_ds.planning.communication import Traffic
from clap_ds.planning.planned_gpu import describe_triton, resolve_for_gpu
from clap_ds.planning.roofline import (
    ESTIMATES,
    class_efficiencies,
    kernel_s,
    op_class,
    seconds_by_part,
)
from clap_ds.planning.step import CUDA, Step, compiled_kernels, trace_step
from clap_ds.planning.tracing import Operation

GIB = 2**30
# CUDA context, kernels and cuBLAS workspace: 0.5 to 0.8 on H100 (assumed).
CONTEXT_GIB = 0.7
# Channel buffers if there is more than one rank (assumed).
NCCL_GIB = 0.8
# Fraction of live memory that PyTorch's allocator holds in addition: 0.3% to 1.6% on an H200
# (`results/h200`).
FRAGMENTATION = 0.016
# Fraction of the audio tower's backward pass in early stages (assumed: half of their bytes).
EARLY_STAGES_SHARE = 0.5
# Of the micro-batch if a larger one needs no more memory.
GROWTH = 4
MAX_TRIES = 8


def predict(
    run: RunSettings, gpu: Gpu, smallest: int, largest: int, *, find_micro_batch: bool
) -> dict[str, Any]:
    """Return a report's fields: memory on `largest` GPUs, and speed on `smallest`."""
    run = resolve_for_gpu(run, gpu)
    has_flash = gpu.capability >= LEAST_CAPABILITY
    trace = cache(partial(trace_step, run, has_flash=has_flash))

    def memory(micro_batch: int) -> dict[str, float]:
        return memory_parts(trace(micro_batch, largest), largest)

    step = trace(run.micro_batch, smallest)
    parts = memory(run.micro_batch)
    peak_gib = sum(parts.values())
    fitting = None
    if find_micro_batch:
        fitting = largest_micro_batch(
            lambda size: sum(memory(size).values()), run.micro_batch, gpu.memory_gib
        )
    compiled = resolve_compile_mode(run.clap.compile, CUDA)
    fused = [] if compiled == "off" else compiled_kernels(run, run.micro_batch)
    speed = predict_speed(step, gpu, fused)
    largest_speed = predict_speed(trace(run.micro_batch, largest), gpu, fused)
    return {
        **select_kernels(run.clap.model, CUDA)._asdict(),
        "compile": compiled,
        "memory_gpus": largest,
        "fits": peak_gib <= gpu.memory_gib,
        "peak_memory_gib": peak_gib,
        "device_memory_gib": gpu.memory_gib,
        "largest_micro_batch": fitting,
        "memory_gib": parts,
        "step_gpus": smallest,
        **speed,
        "largest_loss_s": largest_speed["step_s"]["loss"],
        "traffic": describe_traffic(step, speed["step_s"], run.clap.loss.kind),
        "parameters": step.num_parameters,
        "triton": describe_triton(gpu),
    }


def describe_traffic(
    step: Step, step_s: dict[str, dict[str, float]], loss_kind: str
) -> dict[str, float]:
    """Return the fields of `Traffic` for a step with these seconds by part and estimate."""
    # Softmax's columns are one of the loss's six products; other losses wait for both towers.
    column_share = 1 / 6 if loss_kind == "softmax" else 0.0
    middle_s = {part: estimates["middle"] for part, estimates in step_s.items()}
    traffic = Traffic(
        gradient_bytes=step.gradient_bytes,
        last_gradient_bytes=step.last_gradient_bytes,
        last_backward_s=EARLY_STAGES_SHARE * middle_s.get("audio backward", 0.0),
        feature_bytes=step.feature_bytes,
        num_gathers=step.num_gathers,
        text_forward_s=middle_s["text forward"],
        columns_s=column_share * middle_s["loss"],
    )
    return asdict(traffic)


def memory_parts(step: Step, world_size: int) -> dict[str, float]:
    """Return GiB by part at the peak, largest first; their sum is the peak."""
    names = {"audio": "audio activations", "text": "text activations"}
    parts = {}
    for part, num_bytes in step.recorder.at_peak.items():
        parts[names.get(part, part)] = num_bytes / GIB
    parts["fragmentation"] = FRAGMENTATION * sum(parts.values())
    libraries_gib = CONTEXT_GIB
    if world_size > 1:
        libraries_gib += NCCL_GIB
    parts["context and libraries (assumed)"] = libraries_gib
    return dict(sorted(parts.items(), key=lambda item: -item[1]))


def largest_micro_batch(
    peak_gib: Callable[[int], float], start: int, limit_gib: float
) -> int | None:
    """Return the largest multiple of 8 whose peak is within the limit; None if 8 is too large.

    Extrapolate linearly from the last two sizes, because each peak requires recording a step; from
    the first as if half of it were constant. Small batches may need less memory than the weight
    update, which has a constant size.
    """
    peaks: dict[int, float] = {}
    previous = 0
    size = start
    while size not in peaks and len(peaks) < MAX_TRIES:
        peaks[size] = peak_gib(size)
        constant_gib = peaks.get(previous, peaks[size] / 2)
        slope = (peaks[size] - constant_gib) / (size - previous)
        target: float = GROWTH * max(size, previous)
        if slope > 0:
            target = size + (limit_gib - peaks[size]) / slope
        previous = size
        size = max(int(target) // 8, 1) * 8
    fitting = [size // 8 * 8 for size, peak in peaks.items() if peak <= limit_gib]
    # A start below 8 rounds to 0.
    return max(fitting, default=0) or None


def predict_speed(step: Step, gpu: Gpu, kernels: Iterable[Operation]) -> dict[str, Any]:
    """Predict one GPU's speed, without communication."""
    work = step.work(kernels)
    efficiencies = class_efficiencies(gpu)
    class_s = defaultdict[str, float](float)
    for operation, repeats in work:
        class_s[op_class(operation)] += repeats * kernel_s(operation, gpu, efficiencies, "middle")
    # Estimate → part of the step → seconds. Low efficiencies take longest, and wait least for the
    # host, so the fastest estimate has all parts.
    part_s = {case: seconds_by_part(work, gpu, efficiencies, case) for case in ESTIMATES}
    return {
        "classes": {
            name: {"kernels_s": total_s, **efficiencies[name]} for name, total_s in class_s.items()
        },
        "samples_per_s_per_gpu": {
            case: step.num_samples / parts["step"] for case, parts in part_s.items()
        },
        "step_s": {
            part: {case: parts.get(part, 0.0) for case, parts in part_s.items()}
            for part in part_s["high"]
        },
        "tflop": sum(repeats * operation.flops for operation, repeats in work) / 1e12,
    }
