"""Test classes of dispatched operations, efficiencies, and times against hand calculations."""

import gzip
import json
import tarfile
from dataclasses import replace
from itertools import pairwise
from statistics import median

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from clap_ds.flop_count.device_specs import GPUS
from clap_ds.planning import roofline
from clap_ds.planning.cuda_operations import cuda_semantics
from clap_ds.planning.roofline import (
    EFFICIENCY,
    GAP_S,
    HOST_S,
    KERNEL_S,
    class_efficiencies,
    efficiency_range,
    kernel_s,
    op_class,
    seconds_by_part,
)
from clap_ds.planning.tracing import Operation, TraceRecorder
from clap_ds.utils.paths import CHECKOUT

H100 = GPUS["h100-sxm"]
# 100 FLOPs and 10 bytes a second.
SLOW_GPU = replace(H100, bf16_tflops=100e-12, memory_tbytes_per_s=10e-12)
PERFECT = dict.fromkeys(EFFICIENCY, efficiency_range(1.0, 0.0, ""))
# In the profile. `test_window_attention_...` has other measurements.
UNMEASURED = {
    name
    for name in EFFICIENCY
    if name in ("attention", "attention backward", "softmax")
    or name.startswith(
        ("narrow window", "wide window", "text attention", "triton gelu", "triton linear")
    )
}


def leaf(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, requires_grad=True)


def attend(width: int, *mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(*(leaf(2, 3, 64, width) for _ in range(3)), *mask)


def normalize(width: int) -> Tensor:
    return F.layer_norm(leaf(9, width), (width,), leaf(width), leaf(width))


@pytest.mark.parametrize(
    ("work", "classes"),
    [
        (lambda: F.linear(leaf(5000, 768), leaf(3072, 768)), {"wide product"}),
        (lambda: F.linear(leaf(5000, 96), leaf(288, 96)), {"thin product", "thin weight gradient"}),
        (lambda: normalize(96), {"narrow norm", "narrow norm backward"}),
        (lambda: normalize(192), {"medium norm", "medium norm backward"}),
        (lambda: normalize(768), {"norm", "norm backward"}),
        (lambda: attend(64), {"flash attention", "flash attention backward"}),
        (lambda: attend(24, leaf(1, 3, 64, 64)), {"attention", "attention backward"}),
    ],
)  # fmt: skip
def test_dispatched_operations_have_their_class(work, classes):
    with cuda_semantics(), FakeTensorMode(), TraceRecorder() as recorder:
        work().sum().backward()
    assert classes <= {op_class(op) for op in recorder.operations if op.bytes_moved}


def test_triton_kernels_have_their_class():
    for operation, name in (
        ("bias_gelu", "triton gelu"),
        ("bias_gelu_backward", "triton gelu backward"),
        ("gelu_linear_backward", "triton gelu linear backward"),
        ("linear_gelu", "triton linear gelu"),
    ):
        assert op_class(Operation(f"clap_ds.{operation}", "text", True, 0, 1)) == name


def test_efficiencies_equal_the_h200s_measured_ones():
    assert CHECKOUT
    path = CHECKOUT / "results" / "h200" / "efficiencies.json"
    measured = json.loads(path.read_text())["classes"]
    for name in EFFICIENCY.keys() - UNMEASURED:
        assert EFFICIENCY[name] == pytest.approx(measured[name]["efficiency"], abs=0.006), name


def test_window_attention_has_the_shares_of_experiments_and_kernels_on_an_h200():
    assert CHECKOUT
    results = CHECKOUT / "results" / "h200"
    profiled = json.loads((results / "efficiencies.json").read_text())["classes"]
    forward = profiled["triton window attention"]["efficiency"]
    assert EFFICIENCY["narrow window attention"] == pytest.approx(forward, abs=0.006)
    with tarfile.open(results / "step.tar.xz") as archive:
        log = archive.extractfile("step/window.log")
        assert log is not None
        lines = log.read().decode().splitlines()
    # Milliseconds with 48 programs, by size and shift.
    times_ms = {}
    for line in lines:
        if line.endswith(":"):
            size = line.rstrip(":")
        elif line.split()[0] == "P48":
            times_ms[size] = float(line.split()[1])
    stages = {"64x4x24": 2, "32x8x24": 2, "16x16x24": 6, "8x32x24": 2}
    total_ms = times_ms["64x4x24 shift 4"] - times_ms["64x4x24 shift 0"]
    total_ms += sum(number * times_ms[f"{size} shift 0"] for size, number in stages.items())
    earlier = profiled["triton window attention backward"]
    narrow = earlier["efficiency"] * 1000 * earlier["seconds"] / total_ms
    assert EFFICIENCY["narrow window attention backward"] == pytest.approx(narrow, abs=0.006)
    # Stage 0 of HTSAT-base has the bytes of 128 × 416 to those of 96 × 616 of HTSAT-tiny.
    bytes_ratio = 128 * 416 / (96 * 616)
    ms_ratio = times_ms["64x4x32 shift 0"] / times_ms["64x4x24 shift 0"]
    wide = narrow * bytes_ratio / ms_ratio
    assert EFFICIENCY["wide window attention backward"] == pytest.approx(wide, abs=0.006)


def test_a_gpus_own_measurement_replaces_the_estimate(monkeypatch, tmp_path):
    monkeypatch.setattr(roofline, "work_folder", lambda: tmp_path)
    estimated = class_efficiencies(H100)
    h200 = class_efficiencies(GPUS["h200"])
    # On an H100 the bytes take 4.8 / 3.35 times as long, and the rest as long as on an H200, as
    # there are as many SMs.
    assert estimated["softmax"]["middle"] == pytest.approx(1 / (1 + (1 / 0.7 - 1) * 3.35 / 4.8))
    (tmp_path / "results" / "h100").mkdir(parents=True)
    classes = {"softmax": {"efficiency": 0.5}, "unknown": {"efficiency": 0.5}}
    content = {"device": "NVIDIA H100 80GB HBM3", "classes": classes}
    (tmp_path / "results" / "h100" / "efficiencies.json").write_text(json.dumps(content))
    measured = efficiency_range(0.5, 0.1, "measured, results/h100")
    assert class_efficiencies(H100) == {**estimated, "softmax": measured}
    assert class_efficiencies(GPUS["h200"]) == h200


def test_times_of_short_kernels_and_of_gaps_are_those_of_an_h200():
    """Compare with starts of kernels right after kernels of less than 3 µs in the profile of a
    compiled step."""
    assert CHECKOUT
    with tarfile.open(CHECKOUT / "results" / "h200" / "step.tar.xz") as archive:
        trace = archive.extractfile("step/trace.json.gz")
        assert trace is not None
        events = json.loads(gzip.decompress(trace.read()))["traceEvents"]
    kernels = sorted(
        (event["ts"], event["dur"]) for event in events if event.get("cat") == "kernel"
    )
    intervals_us = [
        next_us - start_us
        for (start_us, duration_us), (next_us, _) in pairwise(kernels)
        if duration_us < 3
    ]
    assert len(intervals_us) > 900
    assert min(intervals_us) < 1e6 * KERNEL_S < median(intervals_us)
    work = sorted(
        (event["ts"], event["dur"])
        for event in events
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
    )
    gaps_us = [next_us - start_us - us for (start_us, us), (next_us, _) in pairwise(work)]
    # Without waits for the host, and work of other streams.
    gaps_us = [gap for gap in gaps_us if 0 < gap < 20]
    assert median(gaps_us) == pytest.approx(1e6 * GAP_S, abs=0.05)


@pytest.mark.parametrize(
    ("name", "flops", "num_bytes", "seconds"),
    [("aten.add", 400, 20, 4), ("clap_ds.mlp", 400, 0, 20), ("aten.add", 400, 100, 10)],
)
def test_operation_takes_the_longer_of_compute_and_memory(name, flops, num_bytes, seconds):
    efficiencies = PERFECT | {"triton mlp": efficiency_range(0.2, 0.0, "")}
    operation = Operation(name, "audio", False, flops, num_bytes, torch.bfloat16)
    assert kernel_s(operation, SLOW_GPU, efficiencies, "middle") == pytest.approx(seconds)
    assert kernel_s(operation, H100, efficiencies, "middle") == KERNEL_S


def test_gpu_waits_for_a_host_that_launches_more_slowly():
    work = [(Operation("aten.add", "audio", backward, 0, 1), 10.0) for backward in (False, True)]
    expected = {"audio forward": 10 * KERNEL_S, "audio backward": 10 * KERNEL_S}
    expected |= {"waiting for the host": 20 * (HOST_S - KERNEL_S), "step": 20 * HOST_S}
    assert seconds_by_part(work, H100, PERFECT, "middle") == pytest.approx(expected)
    # On a slow GPU, the host is ahead.
    assert seconds_by_part(work, SLOW_GPU, PERFECT, "low")["step"] == pytest.approx(2 + 20 * GAP_S)
