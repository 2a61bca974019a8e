"""Test classes of dispatched operations, the order of fractions, and measured ones."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from clap_ds.flop_count.device_specs import GPUS
from clap_ds.planning import roofline_shares
from clap_ds.planning.cuda_operations import like_cuda
from clap_ds.planning.roofline_shares import class_of, efficiencies_of
from clap_ds.planning.tracing import trace

H100 = GPUS["h100-sxm"]


def classes_of(work: Callable[[], torch.Tensor]) -> list[str]:
    """Return the classes of launched kernels forward and backward, except filling and summing."""
    with like_cuda(), FakeTensorMode(), trace() as recorded:
        work().sum().backward()
    return [class_of(op) for op in recorded.operations if op.launches and op.name not in ("aten.ones_like", "aten.sum")]


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
    assert {"attention", "attention backward"} <= set(classes_of(lambda: attend(24, leaf(1, 3, 64, 64))))
    assert {"strided copy", "scatter"} <= set(
        classes_of(lambda: F.embedding(torch.zeros(7, dtype=torch.long), leaf(50, 96)))
    )
    assert set(classes_of(lambda: F.gelu(leaf(50, 96)))) == {"element-wise"}


def test_shares_are_in_order_on_every_gpu() -> None:
    for gpu in GPUS.values():
        for name, each in efficiencies_of(gpu).items():
            assert 0 < each.low < each.middle < each.high < 1, name


def test_a_measured_class_comes_before_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline_shares, "work_folder", lambda: tmp_path)

    def measure(folder: str, device: str, share: float) -> None:
        path = tmp_path / "results" / folder / "efficiencies.json"
        path.parent.mkdir(parents=True)
        classes = {"softmax": {"efficiency": share}, "gone": {"efficiency": 0.1}}
        path.write_text(json.dumps({"device": device, "classes": classes}))

    before, other = efficiencies_of(H100), efficiencies_of(GPUS["a100-sxm-80gb"])
    measure("h200", "NVIDIA H200", 0.5)
    found = efficiencies_of(H100)["softmax"]
    # On an H100 the bytes take 4.8 / 3.35 times as long, and the rest as long as on an H200, as there are as many processors.
    assert found.middle == pytest.approx(4.8 / (4.8 + 3.35))
    assert found.source == "measured on h200, results/h200"
    measure("h100", "NVIDIA H100 80GB HBM3", 0.4)
    found = efficiencies_of(H100)["softmax"]
    assert (found.low, found.middle, found.high) == pytest.approx((0.36, 0.4, 0.44))
    assert {**efficiencies_of(H100), "softmax": before["softmax"]} == before
    assert efficiencies_of(GPUS["h200"])["softmax"].middle == pytest.approx(0.5)
    assert efficiencies_of(GPUS["a100-sxm-80gb"]) == other
