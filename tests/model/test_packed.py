"""Test rows of packed captions; `test_text.py` tests the tower with them."""

import torch

from clap_ds.model.packed import pack


def test_captions_of_padding_fill_the_row_and_their_number_is_fixed() -> None:
    num_bounds = set()
    for length in range(2, 17):
        mask = (torch.arange(16) < torch.tensor([16, length])[:, None]).long()
        row, packing = pack([(torch.full((2, 16), 7), mask)], 64)
        assert row.tolist() == [7] * (16 + length) + [1] * (48 - length)
        assert packing.cu_seqlens[-1] == 64
        assert packing.cu_seqlens.diff().max() <= packing.max_seqlen == 16
        assert packing.num_captions == 2
        num_bounds.add(len(packing.cu_seqlens))
    assert len(num_bounds) == 1
