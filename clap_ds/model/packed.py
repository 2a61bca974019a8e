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

MULTIPLES_PER_ROW = 128
"""The multiple is the largest power of two up to 1/128 of the padded tokens, so that filling costs
about 1%."""
SMALLEST_MULTIPLE = 8


class Packing(NamedTuple):
    """The position of each caption in the row."""

    cu_seqlens: Tensor
    """(S + 1,) int32, on the tokens' device, as in FlashAttention: caption i is tokens
    cu_seqlens[i] to cu_seqlens[i + 1]."""
    num_captions: int
    """Real captions, which come first."""
    max_seqlen: int
    """Most tokens of a caption, a constant of the run: the context length."""


class PackedLayout(NamedTuple):
    """Indices for attention and pooling, computed from a `Packing` once per forward pass.

    Attributes:
        position_ids: (1, T), for the text tower.
        to_padded: (S·L,), the token at each place of the padded form; any token at padding.
        to_row: (T,), the place of each token in the padded form.
        is_token: (S, 1, 1, L) bool, true at real tokens of the padded form.
        caption: (T,), the caption of each token.
        longest: L.
    """

    packing: Packing
    position_ids: Tensor
    to_padded: Tensor
    to_row: Tensor
    is_token: Tensor
    caption: Tensor
    longest: int


def token_multiple(num_captions: int, context_length: int) -> int:
    """Return the number that the row's length must be a multiple of."""
    limit = num_captions * context_length // MULTIPLES_PER_ROW
    if limit < SMALLEST_MULTIPLE:
        return SMALLEST_MULTIPLE
    return 1 << limit.bit_length() - 1


def pack(
    captions: list[tuple[Tensor, Tensor]], multiple: int | None = None
) -> tuple[Tensor, Packing]:
    """Pack a batch in parts, each token ids (B, context_length) and mask, 1 at real tokens, which
    come first. Returns token ids (T,), with T divisible by `multiple`, and their packing."""
    context_length = captions[0][0].shape[1]
    lengths = torch.cat([mask.sum(dim=1) for _, mask in captions])
    multiple = multiple or token_multiple(len(lengths), context_length)
    num_padding = -int(lengths.sum()) % multiple

    # As many padding captions as the most padding, multiple - 1 tokens, needs: the number of
    # captions is then the same in every batch. Full ones come first, then a partial one.
    num_fillers = -(-(multiple - 1) // context_length)
    fillers = num_padding - context_length * torch.arange(num_fillers)
    fillers = fillers.clamp(0, context_length)

    cu_seqlens = torch.zeros(len(lengths) + num_fillers + 1, dtype=torch.int32)
    cu_seqlens[1:] = torch.cat([lengths, fillers]).cumsum(dim=0)
    # Padding is at captions' ends, so that masks select consecutive tokens.
    tokens = [ids[mask.bool()] for ids, mask in captions]
    tokens.append(tokens[0].new_full((num_padding,), PAD_TOKEN_ID))
    return torch.cat(tokens), Packing(cu_seqlens, len(lengths), context_length)


def compute_layout(packing: Packing, num_tokens: int, first_position: int) -> PackedLayout:
    """Return the layout of a row of `num_tokens`, with positions counted from `first_position` in
    each caption. The padded form is as long as the longest caption on CPUs, and `max_seqlen`
    elsewhere, to avoid a device synchronization."""
    cu_seqlens = packing.cu_seqlens
    device = cu_seqlens.device
    lengths = cu_seqlens.diff()
    longest = packing.max_seqlen
    if device.type == "cpu" and not torch.compiler.is_compiling():
        longest = int(lengths.max())

    # From the row to the padded form: a token's caption, and its place within it.
    token = torch.arange(num_tokens, device=device)
    caption = torch.searchsorted(cu_seqlens[1:], token.int(), right=True)
    position = token - cu_seqlens[caption]

    # From the padded form to the row. Places after a caption's end read the next one's tokens.
    column = torch.arange(longest, device=device)
    to_padded = (cu_seqlens[:-1, None] + column).clamp(max=num_tokens - 1).flatten()
    is_token = (column < lengths[:, None])[:, None, None, :]
    return PackedLayout(
        packing=packing,
        position_ids=(position + first_position)[None],
        to_padded=to_padded,
        to_row=caption * longest + position,
        is_token=is_token,
        caption=caption,
        longest=longest,
    )
