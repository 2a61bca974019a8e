"""The rows of packed captions; `test_text.py` has what the tower makes of them."""

import torch

from clap_ds.model.packed import lay_out, pack, token_multiple


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
