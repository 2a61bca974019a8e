"""Pack captions into one row of tokens without padding between them.

The row is filled up to a multiple of tokens with a fixed number of padding captions, some empty,
whose results are ignored. Repeated shapes avoid recompilation and memory fragmentation. Shape
letters: S captions including padding ones, T tokens, L the longest caption.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from clap_ds.config.model import PAD_TOKEN_ID

FIRST_POSITION = PAD_TOKEN_ID + 1
ROW_SHARE = 128
"""The multiple is the largest power of two up to 1/128 of the padded tokens, so that filling costs
about 1%."""
SMALLEST_MULTIPLE = 8


class Packing(NamedTuple):
    """The position of each caption in the row."""

    bounds: Tensor
    """(S + 1,) int32, on the tokens' device: caption i is tokens bounds[i] to bounds[i + 1]."""
    num_captions: int
    """Real captions, which come first."""
    max_tokens: int


class Layout(NamedTuple):
    """Indices for attention and pooling, computed from a `Packing` once per forward pass.

    Attributes:
        position_ids: (1, T), for the text tower.
        to_padded: (S·L,), the token at each place of the padded form; any token at padding.
        to_row: (T,), the place of each token in the padded form.
        keep: (S, 1, 1, L) bool, true at real tokens of the padded form.
        caption: (T,), the caption of each token.
        longest: L.
    """

    packing: Packing
    position_ids: Tensor
    to_padded: Tensor
    to_row: Tensor
    keep: Tensor
    caption: Tensor
    longest: int


def token_multiple(num_captions: int, context_length: int) -> int:
    """Return the number that the row's length must be a multiple of."""
    share = num_captions * context_length // ROW_SHARE
    return max(SMALLEST_MULTIPLE, 1 << share.bit_length() - 1 if share else 0)


def pack(
    captions: list[tuple[Tensor, Tensor]], multiple: int | None = None
) -> tuple[Tensor, Packing]:
    """Pack a batch in parts, each token ids (B, context_length) and mask, 1 at real tokens, which
    come first. Returns token ids (T,), with T divisible by `multiple`, and their packing."""
    max_tokens = captions[0][0].shape[1]
    lengths = torch.cat([mask.sum(dim=1) for _, mask in captions])
    multiple = multiple or token_multiple(len(lengths), max_tokens)
    num_tokens = int(lengths.sum())
    filling = -num_tokens % multiple
    num_fillers = -(-(multiple - 1) // max_tokens)
    fillers = (filling - max_tokens * torch.arange(num_fillers)).clamp(0, max_tokens)
    bounds = torch.zeros(len(lengths) + num_fillers + 1, dtype=torch.int32)
    bounds[1:] = torch.cat([lengths, fillers]).cumsum(dim=0)
    ids = [ids[mask.bool()] for ids, mask in captions]
    row = torch.cat([*ids, ids[0].new_full((filling,), PAD_TOKEN_ID)])
    return row, Packing(bounds, len(lengths), max_tokens)


def lay_out(packing: Packing, num_tokens: int, first_position: int = FIRST_POSITION) -> Layout:
    """Return the `Layout` of a row of `num_tokens`, with positions counted from `first_position` in
    each caption. The padded form is as long as the longest caption on CPUs, and `max_tokens`
    elsewhere, to avoid a device synchronization."""
    bounds = packing.bounds
    lengths = bounds.diff()
    on_cpu = bounds.device.type == "cpu" and not torch.compiler.is_compiling()
    longest = int(lengths.max()) if on_cpu else packing.max_tokens
    token, column = (torch.arange(count, device=bounds.device) for count in (num_tokens, longest))
    caption = torch.searchsorted(bounds[1:], token.int(), right=True)
    place = token - bounds[caption]
    to_padded = (bounds[:-1, None] + column).clamp(max=num_tokens - 1).flatten()
    keep = (column < lengths[:, None])[:, None, None, :]
    return Layout(
        packing,
        (place + first_position)[None],
        to_padded,
        caption * longest + place,
        keep,
        caption,
        longest,
    )
