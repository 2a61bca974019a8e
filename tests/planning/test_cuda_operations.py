"""Operations that stand in for what a CPU would run, and that they are gone afterwards."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from clap_ds.model import text_attention
from clap_ds.planning.cuda_operations import like_cuda
from clap_ds.planning.trace import trace


def test_attention_and_dropout_are_cudas() -> None:
    q = torch.empty(2, 3, 8, 16, requires_grad=True)
    bias, mask = torch.empty(1, 1, 8, 8, requires_grad=True), torch.ones(2, 1, 1, 8, dtype=torch.bool)
    with like_cuda(), FakeTensorMode(allow_non_fake_inputs=True) as fakes, trace() as recorded:
        q, bias, mask = (fakes.from_tensor(each) for each in (q, bias, mask))
        mixed = F.scaled_dot_product_attention(q, q, q, bias)
        mixed = nn.Dropout(0.5).train()(mixed + text_attention.attend(q, q, q, mask).transpose(1, 2))
        mixed.sum().backward()
        assert q.is_cuda
    names = [operation.name for operation in recorded.operations]
    attention = "aten._scaled_dot_product_efficient_attention"
    assert names.count(attention) == names.count(f"{attention}_backward") == 2
    assert "aten.native_dropout" in names
    # The bias gradient is expanded over batch and heads (a padded row each), then summed.
    backward = [op for op in recorded.operations if op.name == f"{attention}_backward"]
    assert any(4 * 2 * 3 * 8 * 8 in [num_bytes for _, num_bytes in op.written] for op in backward)
    assert not Tensor(1).is_cuda
    assert F.dropout.__module__ == F.layer_norm.__module__ == "torch.nn.functional"


@pytest.mark.parametrize(("dtype", "casts"), [(torch.bfloat16, 1), (torch.float16, 0)])
def test_layer_norm_and_softmax_give_fp32_under_autocast(dtype: torch.dtype, casts: int) -> None:
    norm, linear = nn.LayerNorm(8), nn.Linear(8, 8)
    with like_cuda(), FakeTensorMode(allow_non_fake_inputs=True), torch.autocast("cpu", dtype):
        hidden = linear(torch.empty(2, 8))
        with trace() as recorded:
            assert [each.dtype for each in (hidden, F.softmax(hidden, -1))] == [dtype, torch.float32]
        assert norm(hidden).dtype == torch.float32
    names = [operation.name for operation in recorded.operations]
    assert (names.count("aten._to_copy"), names.count("aten._softmax")) == (casts, 1)
