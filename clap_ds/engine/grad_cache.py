"""Compute the gradient of one contrastive loss over several micro-batches (GradCache, arXiv
2101.06983).

It needs the activations of one micro-batch. First all run forward without a graph, and only their
features are kept. The loss over the whole batch then gives a gradient for each feature. Last, each
micro-batch runs forward again, with the same dropout and augmentation. The inner product of its
features with those gradients is a surrogate loss, whose gradient is the micro-batch's part of the
total. This is exact except for the order of sums; batch norm uses each micro-batch's statistics.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from clap_ds.data.batch import Batch
from clap_ds.model.contrastive import ContrastiveModel

Forward = Callable[..., tuple[Tensor, ...]]
"""The model in training, including autocast: inputs of `Batch.model_inputs` → features and
scalars."""


@contextmanager
def kept_statistics(model: ContrastiveModel) -> Iterator[None]:
    """Restore the batch norm's statistics afterwards."""
    kept = [(buffer, buffer.clone()) for buffer in model.running_statistics()]
    yield
    for buffer, value in kept:
        buffer.copy_(value)


@torch.no_grad()
def first_pass(
    forward: Forward, model: ContrastiveModel, micro_batches: list[Batch]
) -> tuple[list[Tensor], list[dict[str, Any]]]:
    """Return the step's audio and text features, (rows, joint_dim) each, the logit scale and, if
    any, the bias, as leaves that require gradients; and the random state before each micro-batch.
    Running statistics don't change."""
    outputs = []
    states = []
    with kept_statistics(model):
        for batch in micro_batches:
            states.append(random_state(batch.device))
            outputs.append(forward(*batch.model_inputs()))
    audio, text, *_ = zip(*outputs, strict=True)
    leaves = [
        each.detach().requires_grad_()
        for each in (torch.cat(audio), torch.cat(text), *outputs[0][2:])
    ]
    return leaves, states


def second_pass(
    forward: Forward,
    batch: Batch,
    state: dict[str, Any],
    gradients: Sequence[Tensor],
    number: int,
    total: int,
) -> Tensor:
    """Compute the surrogate loss, a scalar, of micro-batch `number` (from 0) of `total`, from the
    random `state` before its first pass and the loss's `gradients` for the leaves."""
    restore_random_state(state, batch.device)
    audio, text, *scalars = forward(*batch.model_inputs())
    rows = slice(number * len(batch), (number + 1) * len(batch))
    audio_gradient, text_gradient, *scalar_gradients = gradients
    terms = [(audio * audio_gradient[rows]).sum(), (text * text_gradient[rows]).sum()]
    terms += [
        (own * gradient).sum() / total
        for own, gradient in zip(scalars, scalar_gradients, strict=True)
    ]
    return torch.stack(terms).sum()


def random_state(device: torch.device) -> dict[str, Tensor]:
    """Return the state of torch's CPU generator and, if `device` is a GPU, of the GPU's."""
    state = {"torch": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def restore_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Restore `random_state`. A state without a GPU's leaves the GPU's generator unchanged."""
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and state.get("cuda") is not None:  # earlier versions' is None
        torch.cuda.set_rng_state(state["cuda"], device)
