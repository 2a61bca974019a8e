"""Classes of operations that PyTorch dispatches, shares in order, and measured ones in their place."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from clap_ds.flop_count.peaks import GPUS
from clap_ds.planning import efficiency
from clap_ds.planning.cuda_operations import like_cuda
from clap_ds.planning.efficiency import TABLE, class_of, efficiencies_of
from clap_ds.planning.trace import trace

H100 = GPUS["h100-sxm"]


def _work() -> None:
    def leaf(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, requires_grad=True)

    results = [
        F.linear(leaf(5000, 768), leaf(3072, 768)),
        F.linear(leaf(5000, 96), leaf(288, 96)),
        torch.bmm(leaf(8, 64, 24), leaf(8, 24, 64)).softmax(-1),
        F.conv2d(leaf(2, 1, 16, 16), leaf(96, 1, 4, 4), stride=4),
        F.conv2d(leaf(2, 96, 16, 16), leaf(96, 96, 3, 3)),
        *(F.layer_norm(leaf(9, width), (width,), leaf(width), leaf(width)) for width in (96, 192, 768)),
        F.scaled_dot_product_attention(*(leaf(2, 3, 64, 24) for _ in range(3)), leaf(1, 3, 64, 64)),
        F.scaled_dot_product_attention(*(leaf(2, 3, 64, 64) for _ in range(3)), leaf(1, 3, 64, 64)),
        F.scaled_dot_product_attention(*(leaf(2, 3, 64, 64) for _ in range(3))),
        F.gelu(F.embedding(torch.zeros(7, dtype=torch.long), leaf(50, 96)).transpose(0, 1).contiguous()),
    ]
    torch.autograd.backward([each.float().sum() for each in results])
    torch.fft.rfft(torch.empty(4, 64))


def test_classes_are_those_of_what_is_dispatched() -> None:
    with like_cuda(), FakeTensorMode(), trace() as recorded:
        _work()
    found: dict[tuple[str, bool], set[str]] = {}
    for op in recorded.operations:
        if op.launches:
            found.setdefault((op.name.partition(".")[2], op.backward), set()).add(class_of(op))
    efficient, flash = (f"_scaled_dot_product_{kernel}_attention" for kernel in ("efficient", "flash"))
    products, norms = {"wide product", "thin product"}, {"narrow norm", "medium norm", "norm"}
    expected = {
        ("mm", False): products, ("mm", True): products | {"thin weight gradient"},
        **{(name, False): {"other product"} for name in ("bmm", "convolution", "_fft_r2c")},
        ("native_layer_norm", False): norms, ("native_layer_norm_backward", True): {f"{norm} backward" for norm in norms},
        (efficient, False): {"attention"}, (f"{efficient}_backward", True): {"attention backward"},
        (flash, False): {"flash attention"}, (f"{flash}_backward", True): {"flash attention backward"},
        ("embedding", False): {"strided copy"}, ("embedding_dense_backward", True): {"scatter"},
        ("_softmax", False): {"softmax"}, ("sum", False): {"reduction"}, ("gelu_backward", True): {"element-wise"},
    }  # fmt: skip
    assert {key: found[key] for key in expected} == expected
    assert set().union(*found.values()) <= set(TABLE)


def test_shares_are_in_order_on_every_gpu() -> None:
    for gpu in GPUS.values():
        for name, each in efficiencies_of(gpu).items():
            assert 0 < each.low < each.middle < each.high < 1, name


def test_a_measured_class_comes_before_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(efficiency, "work_folder", lambda: tmp_path)
    before, other = efficiencies_of(H100), efficiencies_of(GPUS["h200"])
    path = tmp_path / "results" / "h100" / "efficiencies.json"
    path.parent.mkdir(parents=True)
    path.write_text(
        '{"device": "NVIDIA H100 80GB HBM3", "classes": {"softmax": {"efficiency": 0.5}, "gone": {"efficiency": 0.1}}}'
    )
    found = efficiencies_of(H100)["softmax"]
    assert (found.low, found.middle, found.high) == pytest.approx((0.45, 0.5, 0.55))
    assert {**efficiencies_of(H100), "softmax": before["softmax"]} == before
    assert efficiencies_of(GPUS["h200"]) == other
