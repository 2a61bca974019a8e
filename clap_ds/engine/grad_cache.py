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
"""The model in training, including autocast: inputs of `Batch.model_inputs` → audio and text
features, logit scale and, if any, logit bias."""


@contextmanager
def preserve_statistics(model: ContrastiveModel) -> Iterator[None]:
    """Restore the batch norm's running statistics afterwards."""
    buffers = model.running_statistics()
    values = [buffer.clone() for buffer in buffers]
    yield
    for buffer, value in zip(buffers, values, strict=True):
        buffer.copy_(value)


@torch.no_grad()
def first_pass(
    forward: Forward, model: ContrastiveModel, micro_batches: list[Batch]
) -> tuple[list[Tensor], list[dict[str, Any]]]:
    """Compute a step's features without a graph. Running statistics don't change.

    Returns leaves that require gradients, and the random state before each micro-batch. The leaves
    are the step's audio and text features, (rows, joint_dim) each, and the scalars.
    """
    outputs = []
    rng_states = []
    with preserve_statistics(model):
        for batch in micro_batches:
            rng_states.append(random_state(batch.device))
            outputs.append(forward(*batch.model_inputs()))
    # By output instead of by micro-batch.
    audio_parts, text_parts, *_ = zip(*outputs, strict=True)
    # The scalars are parameters, the same for each micro-batch.
    _, _, *scalars = outputs[0]
    values = [torch.cat(audio_parts), torch.cat(text_parts), *scalars]
    return [value.detach().requires_grad_() for value in values], rng_states


def second_pass(
    forward: Forward,
    batch: Batch,
    rng_state: dict[str, Any],
    gradients: Sequence[Tensor],
    number: int,
    num_micro_batches: int,
) -> Tensor:
    """Compute the surrogate loss, a scalar, of the micro-batch `number`, from 0.

    Args:
        rng_state: the random state before its first pass.
        gradients: the loss's, for the leaves.
    """
    restore_random_state(rng_state, batch.device)
    audio, text, *scalars = forward(*batch.model_inputs())
    audio_gradient, text_gradient, *scalar_gradients = gradients
    # Leaves have the micro-batches' rows one after the other.
    rows = slice(number * len(batch), (number + 1) * len(batch))
    terms = [(audio * audio_gradient[rows]).sum(), (text * text_gradient[rows]).sum()]
    for scalar, gradient in zip(scalars, scalar_gradients, strict=True):
        # The whole batch's gradient, which every micro-batch adds a part of.
        terms.append((scalar * gradient).sum() / num_micro_batches)
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
    # Checkpoints of earlier versions have None for a CPU.
    if device.type == "cuda" and state.get("cuda") is not None:
        torch.cuda.set_rng_state(state["cuda"], device)
