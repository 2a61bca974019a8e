"""Test the text tower: padding, packing and pooling."""

from typing import Any

import pytest
import torch
from torch import Tensor

from clap_ds.config.model import load_preset
from clap_ds.model import text_attention
from clap_ds.model.packed import compute_layout, pack
from clap_ds.model.text import TextTower
from tests.model.reference_clap import MICRO_TEXT

import transformers  # isort: skip

MICRO = load_preset("micro").text


@pytest.mark.parametrize(
    ("dropout", "has_varlen", "is_varlen"),
    [(0.0, True, True), (0.1, True, False), (0.0, False, False)],
)
def test_packed_captions_on_a_gpu_in_16_bits_keep_attention_dropout(
    monkeypatch, dropout, has_varlen, is_varlen
):
    """Variable-length attention has no dropout, and older GPUs lack it."""
    calls = []

    def note_call(query: Tensor, *_: object) -> Tensor:
        calls.append(query.shape)
        return query.transpose(1, 2)

    mask = (torch.arange(16) < torch.tensor([16, 5])[:, None]).long()
    row, packing = pack([(torch.full((2, 16), 7), mask)], 8)
    layout = compute_layout(packing, len(row), 2)
    monkeypatch.setattr(Tensor, "is_cuda", True)
    monkeypatch.setattr(text_attention, "_attend_varlen", note_call)
    heads = torch.randn(1, 2, len(row), 4, dtype=torch.bfloat16)
    output = text_attention.attend(
        heads, heads, heads, None, dropout=dropout, layout=layout, has_varlen=has_varlen
    )
    assert output.shape == (1, len(row), 2, 4)
    assert bool(calls) == is_varlen


@pytest.mark.parametrize("pooling", ["cls_pooler", "mean"])
@pytest.mark.parametrize(
    ("kind", "pad_token_id"),
    # The last one is multilingual E5-small's.
    [("Roberta", 1), ("XLMRoberta", 1), ("Bert", 0), ("Bert", 1)],
)
def test_padded_and_packed_captions_equal_transformers(kind, pad_token_id, pooling):
    """Compare with transformers' attention, pooling and gradients in fp64; the tower sums means in
    fp32."""
    sizes: dict[str, Any] = {**MICRO_TEXT, "layer_norm_eps": 1e-5, "attn_implementation": "eager"}
    architecture = "bert" if kind == "Bert" else "roberta"
    sizes |= {"type_vocab_size": 2 if kind == "Bert" else 1, "pad_token_id": pad_token_id}
    config = getattr(transformers, f"{kind}Config")(**sizes)
    reference = getattr(transformers, f"{kind}Model")(config)
    for name, parameter in reference.named_parameters():
        torch.manual_seed(len(name))
        torch.nn.init.normal_(parameter, std=0.3)
    changes = {"architecture": architecture, "pad_token_id": pad_token_id, "pooling": pooling}
    ours = TextTower(MICRO.model_copy(update=changes), dropout=0.0).double()
    reference = reference.double().eval()
    ours.roberta.load_state_dict(reference.state_dict(), strict=pooling == "cls_pooler")
    mask = (torch.arange(24) < torch.tensor([24, 3, 17, 2])[:, None]).long()
    ids = torch.randint(5, MICRO.vocab_size, (4, 24))
    ids = ids.where(mask.bool(), torch.tensor(pad_token_id))
    output = reference(input_ids=ids, attention_mask=mask)
    means = (output.last_hidden_state * mask[:, :, None]).sum(1) / mask.sum(1, keepdim=True)
    expected = output.pooler_output if pooling == "cls_pooler" else means
    probe = torch.randn(expected.shape, dtype=torch.float64)
    (expected * probe).sum().backward()
    row, packing = pack([(ids[:2], mask[:2]), (ids[2:], mask[2:])], 64)
    rounding = 1e-9 if pooling == "cls_pooler" else 2e-6
    for inputs in ((ids, mask), (row, None, packing)):
        ours.zero_grad()
        pooled = ours(*inputs)
        torch.testing.assert_close(pooled, expected, rtol=rounding, atol=rounding)
        (pooled * probe).sum().backward()
        for name, parameter in ours.roberta.named_parameters():
            gradient = reference.get_parameter(name).grad
            torch.testing.assert_close(
                parameter.grad, gradient, rtol=10 * rounding, atol=10 * rounding, msg=name
            )


def test_row_is_filled_by_fixed_number_of_padding_captions():
    sizes = set()
    for length in range(2, 17):
        mask = (torch.arange(16) < torch.tensor([16, length])[:, None]).long()
        row, packing = pack([(torch.full((2, 16), 7), mask)], 64)
        assert row.tolist() == [7] * (16 + length) + [1] * (48 - length)
        assert packing.cu_seqlens[-1] == 64
        assert packing.cu_seqlens.diff().max() <= packing.max_seqlen == 16
        assert packing.num_captions == 2
        sizes.add(len(packing.cu_seqlens))
    assert len(sizes) == 1
