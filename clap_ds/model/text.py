"""CLAP's text tower: `transformers.RobertaModel`, or its BERT or MPNet, and the pooling that makes one vector of a caption.

Leaves the projection to the joint space to `clap.py` and tokenising to `clap_ds.data`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from clap_ds.config.clap_json import TEXT
from clap_ds.config.model import TextConfig
from clap_ds.model import text_attention
from clap_ds.model.hub import load_by_name
from clap_ds.model.packed import Layout, Packing, lay_out
from clap_ds.model.torchaudio_compat import torchaudio  # noqa: F401  (before transformers, which imports torchaudio where it is installed)

from transformers import AutoConfig, AutoModel, PreTrainedModel  # isort: skip
from transformers.models.roberta.modeling_roberta import RobertaAttention  # isort: skip

FIELD = "clap.model.text_from_hub"
_SIZES = TEXT | {"layer_norm_eps": "layer_norm_eps"}


class FirstTokenAttention(nn.Module):
    """A layer's attention and the projection after it, given out for each caption's first token alone, so that the rest of the
    layer computes only those rows. For the last layer where pooling looks at nothing else. Weights keep their names."""

    def __init__(self, attention: Any) -> None:
        super().__init__()
        self.self, self.output = attention.self, attention.output

    def forward(self, hidden: Tensor, *args: Any, layout: Layout | None = None, **kwargs: Any) -> tuple[Tensor, None]:
        """(batch, tokens, C) → (batch, 1, C); packed, (1, tokens, C) → (1, captions, C)."""
        mixed = self.self(hidden, *args, layout=layout, **kwargs)[0]
        if layout is None:
            return self.output(mixed[:, :1], hidden[:, :1]), None
        first = layout.packing.bounds[: layout.packing.num_captions]
        return self.output(mixed.index_select(1, first), hidden.index_select(1, first)), None


class TextTower(nn.Module):
    """An encoder and its pooling: `cls_pooler` is the first token through its tanh pooler, `mean` the mean over real tokens.
    With the former, RoBERTa's and BERT's last layer computes nothing for other tokens but their keys and values. Their
    attention is `text_attention`'s; MPNet's, with biases by distance, is transformers' own: its captions are never packed.

    Args:
        config: sizes.
        dropout: of hidden states and of attention weights.
        from_hub: start from the pretrained weights `config.hub_name` names (hub, local cache or folder; safetensors only).

    Raises:
        ValueError: those weights can't be had, or are of other sizes.
    """

    roberta: Any
    """The encoder, of whichever architecture: checkpoints know it by this name."""

    def __init__(self, config: TextConfig, *, dropout: float, from_hub: bool) -> None:
        super().__init__()
        self.pooling = config.pooling
        with_pooler = self.pooling == "cls_pooler"
        self.roberta = (pretrained if from_hub else _untrained)(config, dropout, with_pooler)
        self.adds_mask = config.architecture == "mpnet"
        if not self.adds_mask:
            self.roberta.config._attn_implementation = text_attention.NAME
        self.first_position = config.first_position
        if config.ends_with_first_token:
            last: Any = self.roberta.encoder.layer[-1]
            last.attention = FirstTokenAttention(last.attention)

    def blocks(self) -> list[nn.Module]:
        """Its layers, in order."""
        return list(self.roberta.encoder.layer)

    def compute_every_token(self) -> None:
        """Have the last layer compute all tokens after all, as other CLAPs do: to count what they cost, of BERT the same.
        Loses its weights."""
        last: Any = self.roberta.encoder.layer[-1]
        if isinstance(last.attention, FirstTokenAttention):
            last.attention = RobertaAttention(self.roberta.config).train(last.training)

    def checkpoint_activations(self, enabled: bool) -> None:
        """Whether layers keep only their input for the backward pass."""
        if enabled:  # renamed within the versions of transformers this works with
            enable = getattr(self.roberta, "activation_checkpointing_enable", None)
            (enable or self.roberta.gradient_checkpointing_enable)({"use_reentrant": False})
            self.roberta.disable_input_require_grads()  # which would have frozen layers computed again, and backward

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None, packing: Packing | None = None) -> Tensor:
        """One vector per caption, (batch, hidden_size) in the parameters' dtype.

        Args:
            input_ids: (batch, tokens) int64, padded with the padding index on the right.
            attention_mask: (batch, tokens), 1 at real tokens; None when no caption is padded: a wider choice of kernels.
            packing: for packed captions: `input_ids` is then (tokens,), without a mask.
        """
        if packing is not None:
            return self._forward_packed(input_ids, packing)
        # Four dimensions keep transformers from reading the mask's values on the host, which would wait for the device.
        mask_B11L = None if attention_mask is None else attention_mask[:, None, None, :].bool()
        if self.adds_mask and mask_B11L is not None:
            mask_B11L = (~mask_B11L).to(self.roberta.dtype) * torch.finfo(self.roberta.dtype).min
        output = self.roberta(input_ids=input_ids, attention_mask=mask_B11L)
        if self.pooling == "cls_pooler":
            return output.pooler_output
        return mean_over_tokens(output.last_hidden_state, attention_mask)

    def _forward_packed(self, input_ids_T: Tensor, packing: Packing) -> Tensor:
        layout = lay_out(packing, len(input_ids_T), self.first_position)
        output = self.roberta(input_ids=input_ids_T[None], position_ids=layout.position_ids, layout=layout)
        if self.pooling == "cls_pooler":
            return self.roberta.pooler(output.last_hidden_state.transpose(0, 1))
        return mean_over_packed_tokens(output.last_hidden_state[0], layout)


def mean_over_tokens(hidden_BLC: Tensor, mask_BL: Tensor | None) -> Tensor:
    """(batch, channels): mean over the tokens where the mask is 1 (all of them without a mask), summed in fp32."""
    if mask_BL is None:
        return hidden_BLC.mean(dim=1)
    weights_BL1 = mask_BL[:, :, None].float()
    total = (hidden_BLC.float() * weights_BL1).sum(dim=1)
    return (total / weights_BL1.sum(dim=1).clamp(min=1.0)).to(hidden_BLC.dtype)


def mean_over_packed_tokens(hidden_TC: Tensor, layout: Layout) -> Tensor:
    """(captions, channels): mean over each packed caption's tokens, summed in fp32."""
    bounds, num_captions, _ = layout.packing
    sums_SC = hidden_TC.new_zeros(len(bounds) - 1, hidden_TC.shape[1], dtype=torch.float32)
    sums_SC = sums_SC.index_add(0, layout.caption, hidden_TC.float())
    lengths_B1 = bounds.diff()[:num_captions, None].clamp(min=1)
    return (sums_SC[:num_captions] / lengths_B1).to(hidden_TC.dtype)


def _untrained(config: TextConfig, dropout: float, with_pooler: bool) -> PreTrainedModel:
    options: dict[str, Any] = {theirs: getattr(config, ours) for ours, theirs in _SIZES.items()}
    options |= {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    if config.architecture == "roberta":
        options["type_vocab_size"] = 1  # by default two, as BERT has them
    return AutoModel.from_config(AutoConfig.for_model(config.architecture, **options), add_pooling_layer=with_pooler)


def pretrained(config: TextConfig, dropout: float = 0.0, with_pooler: bool = True) -> PreTrainedModel:
    """The encoder with the weights `config.hub_name` names; ValueError where they can't be had, or are of another architecture
    or other sizes, which is found out before they are fetched."""
    if not config.hub_name:
        raise ValueError(f"{FIELD}: this preset's text tower has no pretrained checkpoint (its hub_name is empty)")

    def load_sizes(local_files_only: bool) -> Any:
        return AutoConfig.from_pretrained(config.hub_name, local_files_only=local_files_only, trust_remote_code=False)

    def load(local_files_only: bool) -> PreTrainedModel:
        return AutoModel.from_pretrained(
            config.hub_name, add_pooling_layer=with_pooler, local_files_only=local_files_only, trust_remote_code=False,
            hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout, dtype=torch.float32, use_safetensors=True,
        )  # fmt: skip

    found = load_by_name(config.hub_name, load_sizes, field=FIELD, what="weights")
    if found.model_type != config.architecture:
        kind = f"of architecture {found.model_type!r}, this preset's text tower of {config.architecture!r}"
        raise ValueError(f"{FIELD}: {config.hub_name!r} is {kind}")
    sizes = [(ours, getattr(found, theirs), getattr(config, ours)) for ours, theirs in _SIZES.items()]
    wrong = [f"{name} {size} (expected {expected})" for name, size, expected in sizes if size != expected]
    if wrong:
        raise ValueError(f"{FIELD}: {config.hub_name!r} is not of this preset's sizes: {', '.join(wrong)}")
    return load_by_name(config.hub_name, load, field=FIELD, what="weights")
