"""Test rows of packed captions; `test_text.py` tests the tower with them."""

import torch

from clap_ds.model.packed import pack


def test_row_is_filled_by_fixed_number_of_padding_captions() -> None:
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
