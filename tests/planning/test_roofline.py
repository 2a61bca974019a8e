"""Test classes of dispatched operations, shares, and times against hand calculations."""

import gzip
import json
import tarfile
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from clap_ds.flop_count.device_specs import GPUS
from clap_ds.planning import roofline
from clap_ds.planning.cuda_operations import like_cuda
from clap_ds.planning.roofline import (
    HOST_S,
    KERNEL_S,
    TABLE,
    op_class,
    seconds,
    seconds_by_part,
    share,
    shares_of,
)
from clap_ds.planning.tracing import Operation, Recorded
from clap_ds.utils.paths import CHECKOUT

H100 = GPUS["h100-sxm"]
BF16 = torch.bfloat16
GPU = replace(H100, bf16_tflops=100e-12, memory_tbytes_per_s=10e-12)
ALL = dict.fromkeys(TABLE, share(1.0, 0.0, "")) | {"triton mlp": share(0.2, 0.0, "")}


def classes_of(work: Callable[[], torch.Tensor]) -> list[str]:
    """Return the classes of launched kernels forward and backward, except filling and summing."""
    with like_cuda(), FakeTensorMode(), Recorded() as recorded:
        work().sum().backward()
    return [
        op_class(op)
        for op in recorded.operations
        if op.bytes_moved and op.name not in ("aten.ones_like", "aten.sum")
    ]


def leaf(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, requires_grad=True)


def attend(width: int, *mask: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(*(leaf(2, 3, 64, width) for _ in range(3)), *mask)


def normed(width: int) -> torch.Tensor:
    return F.layer_norm(leaf(9, width), (width,), leaf(width), leaf(width))


def test_classes_are_those_of_what_is_dispatched() -> None:
    assert set(classes_of(lambda: F.linear(leaf(5000, 768), leaf(3072, 768)))) == {"wide product"}
    thin = classes_of(lambda: F.linear(leaf(5000, 96), leaf(288, 96)))
    assert sorted(thin) == ["thin product", "thin product", "thin weight gradient"]
    assert "other product" in classes_of(lambda: torch.bmm(leaf(8, 64, 24), leaf(8, 24, 64)))
    for width, norm in ((96, "narrow norm"), (192, "medium norm"), (768, "norm")):
        assert classes_of(lambda width=width: normed(width)) == [norm, f"{norm} backward"]
    assert {"flash attention", "flash attention backward"} <= set(classes_of(lambda: attend(64)))
    assert {"attention", "attention backward"} <= set(
        classes_of(lambda: attend(24, leaf(1, 3, 64, 64)))
    )
    assert {"strided copy", "scatter"} <= set(
        classes_of(lambda: F.embedding(torch.zeros(7, dtype=torch.long), leaf(50, 96)))
    )
    assert set(classes_of(lambda: F.gelu(leaf(50, 96)))) == {"element-wise"}
    assert (
        op_class(Operation("clap_ds.bias_gelu_backward", "text", True, 0, 1))
        == "triton gelu backward"
    )


def test_shares_were_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert CHECKOUT
    measured = json.loads((CHECKOUT / "results" / "h200" / "efficiencies.json").read_text())[
        "classes"
    ]
    for name in TABLE.keys() - {
        "attention",
        "attention backward",
        "softmax",
        "triton gelu backward",
    }:
        assert TABLE[name] == pytest.approx(measured[name]["efficiency"], abs=0.006), name
    monkeypatch.setattr(roofline, "work_folder", lambda: tmp_path)
    before = shares_of(H100)
    other = shares_of(GPUS["h200"])
    # On an H100 the bytes take 4.8 / 3.35 times as long, and the rest as long as on an H200, as
    # there are as many processors.
    assert before["softmax"]["middle"] == pytest.approx(1 / (1 + (1 / 0.7 - 1) * 3.35 / 4.8))
    middle = 1 / (1 + (1 / 0.7 - 1) * 2.039 / 4.8 * 132 / 108)
    assert shares_of(GPUS["a100-sxm-80gb"])["softmax"] == pytest.approx(
        share(middle, 0.3, before["softmax"]["source"])
    )
    path = tmp_path / "results" / "h100" / "efficiencies.json"
    path.parent.mkdir(parents=True)
    classes = {"softmax": {"efficiency": 0.5}, "gone": {"efficiency": 0.1}}
    path.write_text(json.dumps({"device": "NVIDIA H100 80GB HBM3", "classes": classes}))
    assert shares_of(H100) == {**before, "softmax": share(0.5, 0.1, "measured, results/h100")}
    assert shares_of(GPUS["h200"]) == other


def test_the_least_time_of_a_kernel_is_that_of_short_ones_in_a_row_on_an_h200() -> None:
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
        later_us - start_us
        for (start_us, duration_us), (later_us, _) in pairwise(kernels)
        if duration_us < 3
    ]
    assert len(intervals_us) > 900
    assert min(intervals_us) < 1e6 * KERNEL_S < median(intervals_us)


def test_launching_an_operation_from_python_takes_5_to_25_microseconds() -> None:
    assert 5e-6 <= HOST_S <= 25e-6


def test_no_share_exceeds_the_data_sheet() -> None:
    assert share(0.8, 0.3, "") == {
        "source": "",
        "low": pytest.approx(0.56),
        "middle": 0.8,
        "high": 1.0,
    }


def test_an_operation_takes_what_it_needs_most_of() -> None:
    def time(name: str, flops: int, moved: int) -> float:
        return seconds(Operation(name, "audio", False, flops, moved, BF16), GPU, ALL, "middle")

    assert time("aten.add", 400, 20) == pytest.approx(4)
    assert time("aten.add", 400, 100) == pytest.approx(10)
    assert time("clap_ds.mlp", 400, 0) == pytest.approx(20)
    assert seconds(Operation("aten.add", "audio", False, 0, 1), H100, ALL, "middle") == KERNEL_S


def test_the_gpu_waits_if_the_host_launches_more_slowly() -> None:
    work = [(Operation("aten.add", "audio", backward, 0, 1), 10.0) for backward in (False, True)]
    expected = {"audio forward": 10 * KERNEL_S, "audio backward": 10 * KERNEL_S}
    expected |= {"waiting for the host": 20 * (HOST_S - KERNEL_S), "step": 20 * HOST_S}
    assert seconds_by_part(work, H100, ALL, "middle") == pytest.approx(expected)
    assert seconds_by_part(work, GPU, ALL, "low")["step"] == pytest.approx(2)
