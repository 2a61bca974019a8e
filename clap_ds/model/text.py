"""Define CLAP's text tower: RoBERTa or BERT with pooling to one vector per caption."""

from __future__ import annotations

from collections import OrderedDict
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from clap_ds.config.model import TextConfig
from clap_ds.model.dropout import Dropout
from clap_ds.model.kernels import supports_captions
from clap_ds.model.packed import Layout, Packing, lay_out
from clap_ds.model.text_attention import attend, attend_in_one_kernel


class Intermediate(nn.Module):
    """Linear and GELU, the first half of an MLP. The `triton` kernel (`gelu_triton.py`) computes
    the backward pass of both GELU and the bias."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.kernel = "torch"
        self.dense = nn.Linear(width, inner)

    def forward(self, hidden: Tensor) -> Tensor:
        if self.kernel == "triton":
            from clap_ds.model.gelu_triton import linear_gelu

            return linear_gelu(hidden, self.dense.weight, self.dense.bias)
        return F.gelu(self.dense(hidden))


class TextLayer(nn.Module):
    """A layer of RoBERTa or BERT, with `transformers`' names. With `first_only`, for a last layer
    whose first token is pooled, it computes only each caption's first token after its attention."""

    def __init__(self, config: TextConfig, dropout: float, first_only: bool) -> None:
        super().__init__()
        width = config.hidden_size
        inner = config.intermediate_size
        self.num_heads = config.num_heads
        self.first_only = first_only

        def end(wide: int) -> nn.ModuleDict:
            norm = nn.LayerNorm(width, config.layer_norm_eps)
            return nn.ModuleDict(
                {"dense": nn.Linear(wide, width), "LayerNorm": norm, "dropout": Dropout(dropout)}
            )

        mixing: dict[str, nn.Module] = {
            name: nn.Linear(width, width) for name in ("query", "key", "value")
        }
        mixing["dropout"] = nn.Dropout(dropout)
        own: Any = nn.ModuleDict(mixing)
        own.kernel = "torch"
        self.attention: Any = nn.ModuleDict({"self": own, "output": end(width)})
        self.intermediate = Intermediate(width, inner)
        self.output: Any = end(inner)

    def forward(
        self, hidden: Tensor, mask_B11L: Tensor | None = None, layout: Layout | None = None
    ) -> Tensor:
        """Map (batch, tokens, C), or (1, tokens, C) if packed, to the same shape; with `first_only`
          to (batch, 1, C) or
        (1, captions, C)."""
        mixed = self.attend(hidden, mask_B11L, layout)
        if self.first_only and layout is None:
            mixed = mixed[:, :1]
            hidden = hidden[:, :1]
        elif self.first_only and layout is not None:
            first = layout.packing.bounds[: layout.packing.num_captions]
            mixed = mixed.index_select(1, first)
            hidden = hidden.index_select(1, first)
        hidden = _end_branch(self.attention.output, mixed, hidden)
        return _end_branch(self.output, self.intermediate(hidden), hidden)

    def attend(
        self, hidden: Tensor, mask_B11L: Tensor | None = None, layout: Layout | None = None
    ) -> Tensor:
        """Return attention of the same shape, by the kernel `attention.self.kernel`."""
        own = self.attention.self
        width = hidden.shape[-1]
        linears = (own.query, own.key, own.value)
        dropout = own.dropout.p if self.training else 0.0
        longest = hidden.shape[1] if layout is None else layout.packing.max_tokens
        if own.kernel == "triton" and supports_captions(width // self.num_heads, longest):
            weight, bias = (
                torch.cat([getattr(each, name) for each in linears]) for name in ("weight", "bias")
            )
            qkv = F.linear(hidden, weight, bias.detach())
            return attend_in_one_kernel(qkv, bias, mask_B11L, layout, self.num_heads, dropout)
        heads = (
            each(hidden).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for each in linears
        )
        query, key, value = heads
        return attend(query, key, value, mask_B11L, dropout=dropout, layout=layout).flatten(2)


def _end_branch(end: Any, branch: Tensor, hidden: Tensor) -> Tensor:
    return end.LayerNorm(end.dropout(end.dense(branch)) + hidden)


class TextTower(nn.Module):
    """An encoder and its pooling: `cls_pooler` applies a tanh pooler to the first token, `mean`
    averages real tokens.

    Args:
        config: sizes.
        dropout: probability for hidden states and attention weights.
        checkpoint: whether layers store only their input for the backward pass.
    """

    roberta: Any
    """The encoder, RoBERTa or BERT; checkpoints use this name for both."""

    def __init__(self, config: TextConfig, *, dropout: float, checkpoint: bool = False) -> None:
        super().__init__()
        self.pooling = config.pooling
        self.first_position = config.first_position
        self.checkpoint = checkpoint
        self.roberta = _encoder(config, dropout)

    def blocks(self) -> list[TextLayer]:
        """Return the layers, in order."""
        return list(self.roberta.encoder.layer)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None, packing: Packing | None = None
    ) -> Tensor:
        """Return one vector per caption, (batch, hidden_size) in the parameters' dtype.

        Args:
            input_ids: (batch, tokens) int64, padded on the right; (tokens,) if packed.
            attention_mask: (batch, tokens), 1 at real tokens; None if captions are packed or
              unpadded.
            packing: positions of packed captions.
        """
        mask_B11L = None if attention_mask is None else attention_mask[:, None, None, :].bool()
        layout = None
        parts = self.roberta.embeddings
        if packing is not None:
            layout = lay_out(packing, len(input_ids), self.first_position)
            input_ids = input_ids[None]
            positions = layout.position_ids
        else:
            columns = (
                torch.arange(input_ids.shape[1], device=input_ids.device) + self.first_position
            )
            last = parts.position_embeddings.num_embeddings - 1  # only padding exceeds it
            positions = columns.clamp(max=last).expand_as(input_ids)
        tokens = parts.word_embeddings(input_ids) + parts.token_type_embeddings(
            torch.zeros_like(input_ids)
        )
        hidden = parts.dropout(parts.LayerNorm(tokens + parts.position_embeddings(positions)))
        for layer in self.blocks():
            run = (
                partial(checkpoint, layer, use_reentrant=False)
                if self.checkpoint and self.training
                else layer
            )
            hidden = run(hidden, mask_B11L, layout)
        if self.pooling == "cls_pooler":
            return self.roberta.pooler(hidden[:, 0] if layout is None else hidden[0])
        return (
            mean_over_tokens(hidden, attention_mask)
            if layout is None
            else mean_over_packed(hidden[0], layout)
        )


def mean_over_tokens(hidden_BLC: Tensor, mask_BL: Tensor | None) -> Tensor:
    """Return (batch, channels): the mean over tokens with mask 1 (all without a mask), summed in
    fp32."""
    if mask_BL is None:
        return hidden_BLC.mean(dim=1)
    weights_BL1 = mask_BL[:, :, None].float()
    total = (hidden_BLC.float() * weights_BL1).sum(dim=1)
    return (total / weights_BL1.sum(dim=1).clamp(min=1.0)).to(hidden_BLC.dtype)


def mean_over_packed(hidden_TC: Tensor, layout: Layout) -> Tensor:
    """Return (captions, channels): the mean over each packed caption's tokens, summed in fp32."""
    bounds, num_captions, _ = layout.packing
    sums_SC = hidden_TC.new_zeros(len(bounds) - 1, hidden_TC.shape[1], dtype=torch.float32)
    sums_SC = sums_SC.index_add(0, layout.caption, hidden_TC.float())
    lengths_B1 = bounds.diff()[:num_captions, None].clamp(min=1)
    return (sums_SC[:num_captions] / lengths_B1).to(hidden_TC.dtype)


def _encoder(config: TextConfig, dropout: float) -> nn.ModuleDict:
    """Build RoBERTa or BERT, initialized like `transformers`."""
    width = config.hidden_size
    padding = config.pad_token_id
    embeddings = {
        "word_embeddings": nn.Embedding(config.vocab_size, width, padding),
        "token_type_embeddings": nn.Embedding(2 if config.architecture == "bert" else 1, width),
        "LayerNorm": nn.LayerNorm(width, config.layer_norm_eps),
        "dropout": Dropout(dropout),
        "position_embeddings": nn.Embedding(config.max_positions, width, padding or None),
    }
    ends = [False] * (config.num_layers - 1) + [config.ends_with_first_token]
    layers = nn.ModuleList(TextLayer(config, dropout, first_only) for first_only in ends)
    parts: Any = {
        "embeddings": nn.ModuleDict(embeddings),
        "encoder": nn.ModuleDict({"layer": layers}),
    }
    if config.pooling == "cls_pooler":
        parts["pooler"] = nn.Sequential(
            OrderedDict(dense=nn.Linear(width, width), activation=nn.Tanh())
        )
    encoder = nn.ModuleDict(parts)
    for module in encoder.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding) and module.padding_idx is not None:
            nn.init.zeros_(module.weight.data[module.padding_idx])
    return encoder
