"""Define CLAP's text tower: RoBERTa or BERT with pooling to one vector per caption.

Modules have the names that `transformers` gives them, so that state dicts are the same. Shape
letters: B captions, L tokens of a padded caption, T tokens of packed captions, C channels.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from clap_ds.config.model import TextConfig
from clap_ds.model.dropout import Dropout
from clap_ds.model.kernels import supports_captions
from clap_ds.model.packed import PackedLayout, Packing, compute_layout
from clap_ds.model.text_attention import attend, attend_in_one_kernel

INIT_STD = 0.02
"""Standard deviation of initial weights, as in `transformers`."""


class SelfAttention(nn.Module):
    """Attention of each token over its caption, without the output projection. `kernel` is `torch`
    or `triton`; `has_varlen` is false on GPUs without variable-length attention."""

    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = width // num_heads
        self.kernel = "torch"
        self.has_varlen = True
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        hidden: Tensor,
        mask_B11L: Tensor | None = None,
        layout: PackedLayout | None = None,
    ) -> Tensor:
        """Map (B, L, C), or (1, T, C) if packed, to the same shape."""
        # The module itself isn't called: attention drops weights inside.
        dropout = self.dropout.p if self.training else 0.0
        longest = hidden.shape[1] if layout is None else layout.packing.max_seqlen
        if self.kernel == "triton" and supports_captions(self.head_dim, longest):
            qkv, bias = self._project_jointly(hidden)
            return attend_in_one_kernel(qkv, bias, mask_B11L, layout, self.num_heads, dropout)
        query = self._split_heads(self.query(hidden))
        key = self._split_heads(self.key(hidden))
        value = self._split_heads(self.value(hidden))
        mixed = attend(
            query, key, value, mask_B11L, dropout=dropout, layout=layout, has_varlen=self.has_varlen
        )
        return mixed.flatten(2)

    def _project_jointly(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return queries, keys and values by one product, and its bias."""
        linears = (self.query, self.key, self.value)
        weight = torch.cat([linear.weight for linear in linears])
        bias = torch.cat([linear.bias for linear in linears])
        # Detached, because the kernel sums the bias's gradient with those of q, k and v.
        return F.linear(hidden, weight, bias.detach()), bias

    def _split_heads(self, projected: Tensor) -> Tensor:
        """Rearrange (B, L, C) to (B, heads, L, head dim)."""
        return projected.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)


class BranchOutput(nn.Module):
    """The end of a post-norm residual branch: linear, dropout, sum with the residual, norm."""

    def __init__(self, inner: int, width: int, eps: float, dropout: float) -> None:
        super().__init__()
        self.dense = nn.Linear(inner, width)
        self.LayerNorm = nn.LayerNorm(width, eps)
        self.dropout = Dropout(dropout)

    def forward(self, branch: Tensor, residual: Tensor) -> Tensor:
        return self.add_and_norm(self.dense(branch), residual)

    def add_and_norm(self, branch: Tensor, residual: Tensor) -> Tensor:
        """Finish a branch after its linear layer."""
        return self.LayerNorm(self.dropout(branch) + residual)


class TextLayer(nn.Module):
    """A layer of RoBERTa or BERT. With `first_only`, for a last layer whose first token is pooled,
    it computes only each caption's first token after its attention. `kernel`, of the MLP, is
    `torch` or one of Triton's (`mlp_triton.py`)."""

    def __init__(self, config: TextConfig, dropout: float, first_only: bool) -> None:
        super().__init__()
        width = config.hidden_size
        inner = config.intermediate_size
        eps = config.layer_norm_eps
        self.first_only = first_only
        self.kernel = "torch"
        attention = {
            "self": SelfAttention(width, config.num_heads, dropout),
            "output": BranchOutput(width, width, eps, dropout),
        }
        self.attention: Any = nn.ModuleDict(attention)
        self.intermediate: Any = nn.ModuleDict({"dense": nn.Linear(width, inner)})
        self.output = BranchOutput(inner, width, eps, dropout)

    def forward(
        self,
        hidden: Tensor,
        mask_B11L: Tensor | None = None,
        layout: PackedLayout | None = None,
    ) -> Tensor:
        """Map (B, L, C), or (1, T, C) if packed, to the same shape; with `first_only` to (B, 1, C)
        or (1, B, C)."""
        mixed = self.attention.self(hidden, mask_B11L, layout)
        # Only first tokens are pooled, so that the rest of the layer needs no others.
        if self.first_only and layout is None:
            mixed = mixed[:, :1]
            hidden = hidden[:, :1]
        elif self.first_only and layout is not None:
            packing = layout.packing
            first_tokens = packing.cu_seqlens[: packing.num_captions]
            mixed = mixed.index_select(1, first_tokens)
            hidden = hidden.index_select(1, first_tokens)
        hidden = self.attention.output(mixed, hidden)
        return self.output.add_and_norm(self.mlp(hidden), hidden)

    def mlp(self, hidden: Tensor) -> Tensor:
        """Compute linear, GELU, linear."""
        first = self.intermediate.dense
        second = self.output.dense
        if self.kernel.startswith("triton"):
            from clap_ds.model.mlp_triton import triton_mlp

            parameters = (first.weight, first.bias, second.weight, second.bias)
            return triton_mlp(hidden, *parameters, self.kernel)
        return second(F.gelu(first(hidden)))


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
        self.roberta = _build_encoder(config, dropout)

    def blocks(self) -> list[TextLayer]:
        """Return the layers, in order."""
        return list(self.roberta.encoder.layer)

    def use_kernels(self, attention: str, mlp: str) -> None:
        """Set the kernels of all layers (`kernels.py`)."""
        for layer in self.blocks():
            layer.attention.self.kernel = attention
            layer.kernel = mlp

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None, packing: Packing | None = None
    ) -> Tensor:
        """Return one vector per caption, (B, C) in the parameters' dtype.

        Args:
            input_ids: (B, L) int64, padded on the right; (T,) if packed.
            attention_mask: (B, L), 1 at real tokens; None if captions are packed or unpadded.
            packing: positions of packed captions.
        """
        # Positions and indices are equal in all layers, so they are computed once.
        layout = None
        if packing is not None:
            layout = compute_layout(packing, len(input_ids), self.first_position)
            input_ids = input_ids[None]
        hidden = self.embed(input_ids, layout)
        # The same for all heads and queries.
        mask_B11L = None if attention_mask is None else attention_mask[:, None, None, :].bool()
        for layer in self.blocks():
            if self.checkpoint and self.training:
                hidden = checkpoint(layer, hidden, mask_B11L, layout, use_reentrant=False)
            else:
                hidden = layer(hidden, mask_B11L, layout)
        if self.pooling == "cls_pooler":
            # The last layer returned first tokens only: (B, 1, C), or (1, B, C) if packed.
            return self.roberta.pooler(hidden[:, 0] if layout is None else hidden[0])
        if layout is None:
            return mean_over_tokens(hidden, attention_mask)
        return mean_over_packed(hidden[0], layout)

    def embed(self, input_ids: Tensor, layout: PackedLayout | None) -> Tensor:
        """Return the first layer's input, (B, L, C) or (1, T, C): words, types and positions."""
        embeddings = self.roberta.embeddings
        if layout is not None:
            positions = layout.position_ids
        else:
            columns = torch.arange(input_ids.shape[1], device=input_ids.device)
            # Only padding exceeds the last position.
            last_position = embeddings.position_embeddings.num_embeddings - 1
            positions = (columns + self.first_position).clamp(max=last_position)
            positions = positions.expand_as(input_ids)
        # All tokens are of type 0.
        types = embeddings.token_type_embeddings(torch.zeros_like(input_ids))
        hidden = embeddings.word_embeddings(input_ids) + types
        # Sums are in `transformers`' order, so that roundings are the same.
        hidden = hidden + embeddings.position_embeddings(positions)
        return embeddings.dropout(embeddings.LayerNorm(hidden))


def mean_over_tokens(hidden_BLC: Tensor, mask_BL: Tensor | None) -> Tensor:
    """Return (B, C): the mean over tokens with mask 1 (all without a mask), summed in fp32."""
    if mask_BL is None:
        return hidden_BLC.mean(dim=1)
    weights_BL1 = mask_BL[:, :, None].float()
    total_BC = (hidden_BLC.float() * weights_BL1).sum(dim=1)
    # A caption without real tokens gets zeros.
    return (total_BC / weights_BL1.sum(dim=1).clamp(min=1.0)).to(hidden_BLC.dtype)


def mean_over_packed(hidden_TC: Tensor, layout: PackedLayout) -> Tensor:
    """Return (B, C): the mean over each packed caption's tokens, summed in fp32."""
    cu_seqlens, num_captions, _ = layout.packing
    sums_SC = hidden_TC.new_zeros(len(cu_seqlens) - 1, hidden_TC.shape[1], dtype=torch.float32)
    # On CUDA, tokens are added in any order.
    sums_SC = sums_SC.index_add(0, layout.caption, hidden_TC.float())
    lengths_B1 = cu_seqlens.diff()[:num_captions, None].clamp(min=1)
    return (sums_SC[:num_captions] / lengths_B1).to(hidden_TC.dtype)


def _build_encoder(config: TextConfig, dropout: float) -> nn.ModuleDict:
    """Build RoBERTa or BERT, initialized like `transformers`."""
    width = config.hidden_size
    num_types = 2 if config.architecture == "bert" else 1
    # RoBERTa counts positions from the padding id, whose embedding stays zero; BERT from 0.
    padding_position = None if config.architecture == "bert" else config.pad_token_id
    # The order of modules is that of a checkpoint's keys.
    embeddings = {
        "word_embeddings": nn.Embedding(config.vocab_size, width, config.pad_token_id),
        "token_type_embeddings": nn.Embedding(num_types, width),
        "LayerNorm": nn.LayerNorm(width, config.layer_norm_eps),
        "dropout": Dropout(dropout),
        "position_embeddings": nn.Embedding(config.max_positions, width, padding_position),
    }
    last = config.num_layers - 1
    layers = nn.ModuleList(
        TextLayer(config, dropout, number == last and config.ends_with_first_token)
        for number in range(config.num_layers)
    )
    encoder = nn.ModuleDict(
        {
            "embeddings": nn.ModuleDict(embeddings),
            "encoder": nn.ModuleDict({"layer": layers}),
        }
    )
    if config.pooling == "cls_pooler":
        pooler = OrderedDict(dense=nn.Linear(width, width), activation=nn.Tanh())
        encoder["pooler"] = nn.Sequential(pooler)
    for module in encoder.modules():
        # Normal weights, zero biases, and zeros for padding.
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=INIT_STD)
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding) and module.padding_idx is not None:
            nn.init.zeros_(module.weight.data[module.padding_idx])
    return encoder
