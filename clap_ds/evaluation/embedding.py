"""Embed clips and captions in evaluation mode, without gradients, in the model's dtype, as fp32
rows of length 1.

The last micro-batch is padded, so that a row's bits don't depend on the others; `fill=False` skips
that to save time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from clap_ds.config.model import TextConfig
from clap_ds.model.contrastive import ContrastiveModel
from clap_ds.weights.hub import PreTrainedTokenizerBase, load_tokenizer, tokenize

T = TypeVar("T")


def tokenizer_of(name: str | None, text: TextConfig, field: str) -> PreTrainedTokenizerBase:
    """Load a model's tokenizer. Raises ValueError with `field`."""
    if name is None:
        raise ValueError(f"{field}: missing; set the tokenizer that the model was trained with")
    return load_tokenizer(
        name, vocab_size=text.vocab_size, pad_token_id=text.pad_token_id, field=field
    )


def embed_audio(model: ContrastiveModel, clips: Iterable[Tensor], micro_batch: int) -> Tensor:
    """Embed inputs of `ClapModel.encode_audio`: (N, joint_dim)."""
    return _joined(model, audio_batches(model, clips, micro_batch))


def audio_batches(
    model: ContrastiveModel, clips: Iterable[Tensor], micro_batch: int, fill: bool = True
) -> Iterator[Tensor]:
    """Embed clips by micro-batches."""

    def encode(batch: list[Tensor]) -> Tensor:
        audio = torch.stack(
            batch + [torch.zeros_like(batch[0])] * (micro_batch - len(batch)) * fill
        )
        return model.encode_audio(audio.to(model.logit_scale.device).float())

    return _batches(model, clips, micro_batch, encode)


def embed_text(
    model: ContrastiveModel, captions: Sequence[str], tokenizer: PreTrainedTokenizerBase, context_length: int, micro_batch: int,
    fill: bool = True,
) -> Tensor:  # fmt: skip
    """Embed captions, truncated to `context_length`: (N, joint_dim)."""

    def encode(batch: list[str]) -> Tensor:
        ids, mask = tokenize(
            batch + [""] * (micro_batch - len(batch)) * fill, tokenizer, context_length
        )
        return model.encode_text(
            ids.to(model.logit_scale.device), mask.to(model.logit_scale.device)
        )

    return _joined(model, _batches(model, captions, micro_batch, encode))


def class_captions(
    classes: Mapping[str, Sequence[str]], templates: Sequence[str]
) -> list[list[str]]:
    """List each class's captions: all its names in all templates."""
    return [
        [text.replace("{}", name) for name in names for text in templates]
        for names in classes.values()
    ]


def class_features(captions: Sequence[Sequence[str]], text_MD: Tensor) -> Tensor:
    """Average the features of each class's captions (in order in `text_MD`): (classes, D), rows of
    length 1."""
    means = [rows.double().mean(0) for rows in text_MD.split([len(each) for each in captions])]
    return F.normalize(torch.stack(means), dim=-1).float()


def _joined(model: ContrastiveModel, batches: Iterator[Tensor]) -> Tensor:
    return torch.cat(
        [*batches] or [model.logit_scale.detach().new_zeros(0, model.config.joint_dim)]
    )


@torch.no_grad()
def _batches(
    model: ContrastiveModel,
    items: Iterable[T],
    micro_batch: int,
    encode: Callable[[list[T]], Tensor],
) -> Iterator[Tensor]:
    rest = iter(items)
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        while batch := list(islice(rest, micro_batch)):
            yield encode(batch)[: len(batch)].float()
    finally:
        for module, training in modes:
            module.training = training
