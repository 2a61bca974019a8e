"""Embeddings of clips and captions by a model as it is in use: evaluation mode, no gradients, its own dtype; fp32 rows.

Micro-batches are always full, the last filled up with zeros or empty captions, so that a compiled model meets one shape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import TypeVar

import torch
from torch import Tensor

from clap_ds.model.clap import ClapModel
from clap_ds.model.tokenizer import PreTrainedTokenizerBase, tokenize

T = TypeVar("T")


def embed_audio(model: ClapModel, clips: Iterable[Tensor], micro_batch: int) -> Tensor:
    """(N, joint_dim) fp32, rows of length 1, of clips as `ClapModel.encode_audio` takes a batch of them."""

    def encode(batch: list[Tensor]) -> Tensor:
        audio = torch.stack(batch + [torch.zeros_like(batch[0])] * (micro_batch - len(batch)))
        return model.encode_audio(audio.to(_device(model)).float())

    return _embed(model, clips, micro_batch, encode)


def embed_text(
    model: ClapModel, captions: Sequence[str], tokenizer: PreTrainedTokenizerBase, text_tokens: int, micro_batch: int
) -> Tensor:
    """(N, joint_dim) fp32, rows of length 1, of captions, cut after `text_tokens`."""

    def encode(batch: list[str]) -> Tensor:
        ids, mask = tokenize(batch + [""] * (micro_batch - len(batch)), tokenizer, text_tokens)
        return model.encode_text(ids.to(_device(model)), mask.to(_device(model)))

    return _embed(model, captions, micro_batch, encode)


@torch.no_grad()
def _embed(model: ClapModel, items: Iterable[T], micro_batch: int, encode: Callable[[list[T]], Tensor]) -> Tensor:
    rest, features = iter(items), [torch.zeros(0, model.config.joint_dim, device=_device(model))]
    with _evaluating(model):
        while batch := list(islice(rest, micro_batch)):
            features.append(encode(batch)[: len(batch)].float())
    return torch.cat(features)


def _device(model: ClapModel) -> torch.device:
    return model.logit_scale.device


@contextmanager
def _evaluating(model: ClapModel) -> Iterator[None]:
    """Evaluation mode; each module's own mode is restored."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
