"""Embed clips and captions in evaluation mode, without gradients, in the model's dtype, as fp32
rows of length 1.

The last micro-batch is padded, so that a row's bits don't depend on the others; `fill=False` skips
that to save time.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice, product
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from clap_ds.config.model import TextConfig
from clap_ds.model.contrastive import ContrastiveModel
from clap_ds.weights.hub import PreTrainedTokenizerBase, load_tokenizer, tokenize

T = TypeVar("T")


def load_model_tokenizer(name: str | None, text: TextConfig, field: str) -> PreTrainedTokenizerBase:
    """Load a model's tokenizer. Raises ValueError with `field`."""
    if name is None:
        raise ValueError(f"{field}: missing; set the tokenizer that the model was trained with")
    return load_tokenizer(
        name, vocab_size=text.vocab_size, pad_token_id=text.pad_token_id, field=field
    )


def embed_audio(model: ContrastiveModel, clips: Iterable[Tensor], micro_batch: int) -> Tensor:
    """Embed inputs of `ClapModel.encode_audio`: (N, joint_dim)."""
    return _concatenate(model, audio_batches(model, clips, micro_batch))


def audio_batches(
    model: ContrastiveModel, clips: Iterable[Tensor], micro_batch: int, fill: bool = True
) -> Iterator[Tensor]:
    """Embed clips by micro-batches."""

    def encode(batch: list[Tensor]) -> Tensor:
        if fill:
            padding = torch.zeros_like(batch[0])
            batch = batch + [padding] * (micro_batch - len(batch))
        audio = torch.stack(batch)
        return model.encode_audio(audio.to(model.logit_scale.device).float())

    return _batches(model, clips, micro_batch, encode)


def embed_text(
    model: ContrastiveModel,
    captions: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    context_length: int,
    micro_batch: int,
    fill: bool = True,
) -> Tensor:
    """Embed captions, truncated to `context_length`: (N, joint_dim)."""
    device = model.logit_scale.device

    def encode(batch: list[str]) -> Tensor:
        if fill:
            batch = batch + [""] * (micro_batch - len(batch))
        ids, mask = tokenize(batch, tokenizer, context_length, model.config.text.caption_prefix)
        return model.encode_text(ids.to(device), mask.to(device))

    return _concatenate(model, _batches(model, captions, micro_batch, encode))


def class_captions(
    classes: Mapping[str, Sequence[str]], templates: Sequence[str]
) -> list[list[str]]:
    """List each class's captions: all its names in all templates."""
    captions_by_class = []
    for names in classes.values():
        pairs = product(names, templates)
        captions_by_class.append([template.replace("{}", name) for name, template in pairs])
    return captions_by_class


def class_features(captions_by_class: Sequence[Sequence[str]], text_MD: Tensor) -> Tensor:
    """Average the features of each class's captions (in order in `text_MD`): (classes, D), rows of
    length 1."""
    counts = [len(captions) for captions in captions_by_class]
    # In fp64, so that the order of captions doesn't matter.
    means = [features_MD.double().mean(0) for features_MD in text_MD.split(counts)]
    return F.normalize(torch.stack(means), dim=-1).float()


def _concatenate(model: ContrastiveModel, batches: Iterator[Tensor]) -> Tensor:
    # A rank may have no item.
    none = model.logit_scale.detach().new_zeros(0, model.config.joint_dim)
    return torch.cat([*batches] or [none])


@torch.no_grad()
def _batches(
    model: ContrastiveModel,
    items: Iterable[T],
    micro_batch: int,
    encode: Callable[[list[T]], Tensor],
) -> Iterator[Tensor]:
    """Yield the features of micro-batches in evaluation mode, and restore every module's mode."""
    items = iter(items)
    # Frozen towers are in evaluation mode in training, too.
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        while batch := list(islice(items, micro_batch)):
            # Without the rows that fill the micro-batch.
            yield encode(batch)[: len(batch)].float()
    finally:
        for module, training in modes:
            module.training = training
