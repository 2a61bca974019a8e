"""Classes of operations that PyTorch really dispatches, a table that is in order, and measured shares in its place."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from clap_ds.config.errors import UserError
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
    convolutions = {"narrow convolution", "convolution"}
    expected = {
        ("mm", False): products, ("mm", True): products | {"thin weight gradient"},
        ("bmm", False): {"batched product"}, ("bmm", True): {"batched product"},
        ("convolution", False): convolutions, ("convolution_backward", True): convolutions,
        ("native_layer_norm", False): norms, ("native_layer_norm_backward", True): {f"{norm} backward" for norm in norms},
        (efficient, False): {"narrow attention", "attention"},
        (f"{efficient}_backward", True): {"narrow attention backward", "attention backward"},
        (flash, False): {"flash attention"}, (f"{flash}_backward", True): {"flash attention backward"},
        ("embedding", False): {"strided copy"}, ("embedding_dense_backward", True): {"scatter"},
        ("_softmax", False): {"softmax"}, ("_softmax_backward_data", True): {"softmax"}, ("_fft_r2c", False): {"FFT"},
        ("clone", False): {"strided copy"}, ("sum", False): {"reduction"}, ("gelu_backward", True): {"element-wise"},
    }  # fmt: skip
    assert {key: found[key] for key in expected} == expected
    assert set().union(*found.values()) <= set(TABLE)


def test_shares_are_in_order_and_say_where_they_are_from() -> None:
    for gpu in GPUS.values():
        for name, each in efficiencies_of(gpu).items():
            assert 0 < each.low < each.middle < each.high < 1, name
            assert each.source == TABLE[name].source, name
            assert each.source, name


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of measured shares to be written."""
    monkeypatch.setattr(efficiency, "work_folder", lambda: tmp_path)
    (tmp_path / "results" / "h100").mkdir(parents=True)
    return tmp_path / "results" / "h100" / "efficiencies.json"


def test_a_measured_class_comes_before_the_table(results: Path) -> None:
    before, other = efficiencies_of(H100), efficiencies_of(GPUS["h200"])
    measured = {"softmax": {"efficiency": 0.5, "seconds": 0.034, "kernels": 120}}
    results.write_text(
        json.dumps({"device": "NVIDIA H100 80GB HBM3", "made_by": "", "commit": "", "classes": measured})
    )
    found = efficiencies_of(H100)["softmax"]
    assert (found.low, found.middle, found.high) == pytest.approx((0.45, 0.5, 0.55))
    assert found.source == "measured, results/h100"
    assert {**efficiencies_of(H100), "softmax": before["softmax"]} == before
    assert efficiencies_of(GPUS["h200"]) == other


@pytest.mark.parametrize(
    ("classes", "said"),
    [("1", "int"), ('{"soft": {"efficiency": 1}}', "soft: 1"), ('{"FFT": {"efficiency": 0}}', "FFT: 0")],
)
def test_measured_shares_that_cannot_be_read_are_said(classes: str, said: str, results: Path) -> None:
    results.write_text(f'{{"device": "NVIDIA H100 80GB HBM3", "classes": {classes}}}')
    with pytest.raises(UserError, match=f"h100/efficiencies.json: expected a device and classes .*{said}"):
        efficiencies_of(H100)
