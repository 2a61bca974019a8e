"""Test the search for a micro-batch with known memory functions, the sum of memory parts, and the
speed of known operations."""

from collections import Counter

import pytest
import torch

from clap_ds.flop_count.device_specs import gpu_named
from clap_ds.planning.prediction import GIB, largest_micro_batch, memory_parts, predict_speed
from clap_ds.planning.roofline import GAP_S
from clap_ds.planning.step import Step
from clap_ds.planning.tracing import Operation, TraceRecorder


def linear(size: int) -> float:
    return 2 + size * 0.1015625


def with_constant(size: int) -> float:
    """Below 400 samples, the weight update needs more."""
    return max(40.0, 0.1 * size)


def quadratic(size: int) -> float:
    return 0.1 * size + 1e-5 * size**2


@pytest.mark.parametrize(
    ("peak_gib", "start", "limit_gib", "expected"),
    [
        (linear, 616, 80, 768),
        (linear, 2000, 80, 768),
        (linear, 616, 3, 8),
        (linear, 616, 2.5, None),
        (with_constant, 8, 60, 600),
        (quadratic, 64, 80, 744),
    ],
)
def test_largest_micro_batch_is_found_in_few_tries(peak_gib, start, limit_gib, expected):
    tried = []

    def record(size: int) -> float:
        tried.append(size)
        return peak_gib(size)

    assert largest_micro_batch(record, start, limit_gib) == expected
    assert len(tried) <= 7


def step_of(*operations: Operation) -> Step:
    recorder = TraceRecorder()
    recorder.operations.extend(operations)
    return Step(
        recorder,
        num_samples=1,
        repeats=3.0,
        num_forward=1,
        num_backward=1,
        num_parameters=100,
        gradient_bytes=200,
        last_gradient_bytes=20,
        feature_bytes=10,
        num_gathers=1,
    )


def test_parts_of_memory_add_up():
    step = step_of()
    step.recorder.at_peak = Counter({"weights": GIB, "audio": 4 * GIB})
    parts = memory_parts(step, 2)
    assert (parts["audio activations"], parts["weights"]) == (4, 1)
    # As docs/estimation.md has them. One rank has no NCCL buffers.
    assert sum(parts.values()) == pytest.approx(5 * 1.016 + 0.7 + 0.8)
    assert sum(memory_parts(step, 1).values()) == pytest.approx(5 * 1.016 + 0.7)
    assert list(parts.values()) == sorted(parts.values(), reverse=True)


def test_repeated_operations_count_as_often_as_they_run():
    """A million rows times a 512 × 512 matrix: at 73% of 989 TFLOPS the product takes 0.726 ms."""
    shapes = ((10**6, 512), (512, 512))
    flops = 2 * 512**2 * 10**6
    product = Operation("aten.mm", "audio", False, flops, 10**9, torch.bfloat16, shapes)
    speed = predict_speed(step_of(product), gpu_named("h100-sxm"), [])
    assert speed["tflop"] == pytest.approx(3 * flops / 1e12)
    efficiency = speed["classes"]["wide product"]
    seconds = 3 * (0.726e-3 + GAP_S)
    assert efficiency["kernels_s"] == pytest.approx(seconds, rel=1e-3)
    assert (efficiency["low"], efficiency["high"]) == pytest.approx((0.657, 0.803))
    assert speed["samples_per_s_per_gpu"]["middle"] == pytest.approx(1 / seconds, rel=1e-3)
