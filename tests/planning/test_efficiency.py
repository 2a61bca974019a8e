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
        F.conv2d(leaf(2, 96, 16, 16), leaf(96, 1, 7, 7), groups=96),
        F.conv2d(leaf(2, 96, 16, 16), leaf(96, 96, 3, 3)),
        *(F.layer_norm(leaf(9, width), (width,), leaf(width), leaf(width)) for width in (96, 192, 768)),
        *(F.scaled_dot_product_attention(*(leaf(2, 3, 64, dim) for _ in range(3))) for dim in (24, 64)),
        F.gelu(F.embedding(torch.zeros(7, dtype=torch.long), leaf(50, 96)).transpose(0, 1).contiguous()),
    ]
    torch.autograd.backward([each.float().sum() for each in results])
    torch.fft.rfft(torch.empty(4, 64))


def test_classes_are_those_of_what_is_dispatched() -> None:
    with like_cuda(), FakeTensorMode(), trace() as recorded:
        _work()
    found = {(op.name.partition(".")[2], op.backward): set[str]() for op in recorded.operations if op.launches}
    for op in recorded.operations:
        if op.launches:
            found[op.name.partition(".")[2], op.backward].add(class_of(op))
    attention = "_scaled_dot_product_efficient_attention"
    assert found["mm", False] == {"wide product", "thin product"}
    assert found["mm", True] == {"wide product", "thin product", "thin weight gradient"}
    assert found["bmm", False] == found["bmm", True] == {"batched product"}
    assert found["convolution", False] == {"narrow convolution", "depthwise convolution", "convolution"}
    assert found["convolution_backward", True] == found["convolution", False]
    assert found["native_layer_norm", False] == {"narrow norm", "medium norm", "norm"}
    assert found["native_layer_norm_backward", True] == {
        f"{each} backward" for each in found["native_layer_norm", False]
    }
    assert found[attention, False] == {"narrow attention", "attention"}
    assert found[f"{attention}_backward", True] == {"narrow attention backward", "attention backward"}
    assert found["embedding", False] == {"gather"}
    assert found["embedding_dense_backward", True] == {"scatter"}
    assert found["_softmax", False] == found["_softmax_backward_data", True] == {"softmax"}
    assert found["clone", False] == {"strided copy"}
    assert found["sum", False] == {"reduction"}
    assert found["_fft_r2c", False] == {"FFT"}
    assert found["gelu", False] == found["gelu_backward", True] == {"element-wise"}
    assert set().union(*found.values()) <= set(TABLE)


def test_shares_are_in_order_and_say_where_they_are_from() -> None:
    for name, each in TABLE.items():
        assert 0 < each.low < each.middle < each.high < 1, name
        assert each.source, name


def test_a_measured_class_comes_before_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(efficiency, "work_folder", lambda: tmp_path)
    assert efficiencies_of(H100) == TABLE
    path = tmp_path / "results" / "h100" / "efficiencies.json"
    path.parent.mkdir(parents=True)
    measured = {"softmax": {"efficiency": 0.5, "seconds": 0.034, "kernels": 120}}
    path.write_text(json.dumps({"device": "NVIDIA H100 80GB HBM3", "made_by": "", "commit": "", "classes": measured}))
    found = efficiencies_of(H100)["softmax"]
    assert (found.low, found.middle, found.high) == pytest.approx((0.45, 0.5, 0.55))
    assert "measured, h100" in found.source
    assert {**efficiencies_of(H100), "softmax": TABLE["softmax"]} == TABLE
    assert efficiencies_of(GPUS["h200"]) == TABLE


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "expected a device, and classes"),
        ('{"device": "NVIDIA H100 80GB HBM3", "classes": {"softmax": 1}}', "expected a device, and classes"),
        (
            '{"device": "NVIDIA H100 80GB HBM3", "classes": {"soft": {"efficiency": 1}}}',
            "classes.soft: expected a class",
        ),
        ('{"device": "NVIDIA H100 80GB HBM3", "classes": {"FFT": {"efficiency": 0}}}', "classes.FFT: .* found 0"),
    ],
)
def test_measured_shares_that_cannot_be_read_are_said(
    text: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(efficiency, "work_folder", lambda: tmp_path)
    (tmp_path / "results" / "h100").mkdir(parents=True)
    (tmp_path / "results" / "h100" / "efficiencies.json").write_text(text)
    with pytest.raises(UserError, match=said):
        efficiencies_of(H100)
