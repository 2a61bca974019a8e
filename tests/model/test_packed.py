"""Packed captions against the padded model: embeddings, gradients, pooling, and shapes that repeat."""

import pytest
import torch
import torch.nn.functional as F

from clap_ds.config.model import load_preset
from clap_ds.model import text_attention
from clap_ds.model.packed import lay_out, pack, token_multiple
from clap_ds.model.text import TextTower
from tests.model.reference_clap import captions

MICRO = load_preset("micro").text


def tower(pooling: str) -> TextTower:
    torch.manual_seed(0)
    config = MICRO.model_copy(update={"pooling": pooling})
    model = TextTower(config, dropout=0.0, from_hub=False)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            torch.manual_seed(len(name))
            parameter.copy_(torch.randn(parameter.shape) * (0.5 if parameter.ndim > 1 else 1))
    return model.double()


@pytest.mark.parametrize("multiple", [1, 64])
@pytest.mark.parametrize("pooling", ["cls_pooler", "mean"])
def test_packed_captions_give_what_padded_ones_give(pooling: str, multiple: int) -> None:
    """Oracle: the padded model through PyTorch's own attention, in fp64."""
    input_ids, mask = captions(5, 24, MICRO.vocab_size, seed=0)
    padded, packed = tower(pooling), tower(pooling)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_attention, "_attend_padded", F.scaled_dot_product_attention)
        expected = padded(input_ids, mask)
    row, packing = pack([(input_ids[:2], mask[:2]), (input_ids[2:], mask[2:])], multiple)
    assert len(row) == -(-int(mask.sum()) // multiple) * multiple
    got = packed(row, None, packing)
    assert got.shape == expected.shape == (5, 32)
    rounding = 1e-9 if pooling == "cls_pooler" else 2e-6  # means are summed in fp32
    torch.testing.assert_close(got, expected, rtol=rounding, atol=rounding)
    torch.testing.assert_close(packed(input_ids, mask), expected, rtol=rounding, atol=rounding)
    probe = torch.randn(expected.shape, dtype=torch.float64)
    (expected * probe).sum().backward()
    (got * probe).sum().backward()
    reference = dict(padded.named_parameters())
    for name, parameter in packed.named_parameters():
        torch.testing.assert_close(parameter.grad, reference[name].grad, rtol=1e-7, atol=10 * rounding, msg=name)


def test_captions_of_padding_fill_the_row_and_their_number_is_fixed() -> None:
    num_bounds = set()
    for length in range(2, 17):
        mask = (torch.arange(16) < torch.tensor([16, length])[:, None]).long()
        row, packing = pack([(torch.full((2, 16), 7), mask)], 64)
        assert row.tolist() == [7] * (16 + length) + [1] * (48 - length)
        assert packing.bounds[-1] == 64
        assert packing.bounds.diff().max() <= packing.max_tokens == 16
        assert packing.num_captions == 2
        num_bounds.add(len(packing.bounds))
    assert len(num_bounds) == 1


def test_positions_start_anew_with_every_caption_and_the_multiple_costs_about_a_hundredth() -> None:
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    row, packing = pack([(torch.tensor([[0, 5, 2], [0, 2, 1]]), mask)], 8)
    layout = lay_out(packing, len(row))
    assert row.tolist() == [0, 5, 2, 0, 2, 1, 1, 1]
    assert layout.position_ids.tolist() == [[2, 3, 4, 2, 3, 2, 3, 4]]
    assert layout.caption.tolist()[:5] == [0, 0, 0, 1, 1]
    assert [token_multiple(*sizes) for sizes in ((8, 77), (616, 77), (1, 16))] == [8, 256, 8]
