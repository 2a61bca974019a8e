"""The gradient of one contrastive loss over several micro-batches, with the activations of one (GradCache, arXiv 2101.06983).

First all micro-batches go forward without a graph and only their features are kept. The loss over the whole batch then gives a
gradient by each feature. Last, each micro-batch goes forward again, with the same dropout and augmentation, and the inner
product of its features with those gradients is a surrogate loss: its gradient by the weights is what the micro-batch adds to
the whole loss's. Exact but for the order of sums; batch norm takes the statistics of each micro-batch, as it does of each rank.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from clap_ds.data.batch import Batch
from clap_ds.model.clap import ClapModel

Forward = Callable[..., tuple[Tensor, ...]]
"""The model as it trains, autocast included: inputs of `Batch.model_inputs` → features and scalars."""


@torch.no_grad()
def first_pass(
    forward: Forward, model: ClapModel, micro_batches: list[Batch]
) -> tuple[list[Tensor], list[dict[str, Any]]]:
    """Audio and text features of the whole step, (rows, joint_dim) each, the logit scale and, if there is one, the bias, all
    leaves that want a gradient; and the state of random numbers before each micro-batch. Running statistics stay."""
    outputs, states = [], []
    kept = [(buffer, buffer.clone()) for buffer in model.audio.running_statistics()]
    for batch in micro_batches:
        states.append(random_state(batch.device))
        outputs.append(forward(*batch.model_inputs()))
    for buffer, value in kept:
        buffer.copy_(value)
    audio, text, *_ = zip(*outputs, strict=True)
    leaves = [each.detach().requires_grad_() for each in (torch.cat(audio), torch.cat(text), *outputs[0][2:])]
    return leaves, states


def second_pass(
    forward: Forward, batch: Batch, state: dict[str, Any], gradients: Sequence[Tensor], number: int, total: int
) -> Tensor:
    """Work out the surrogate loss, scalar, of micro-batch `number` of `total`, from 0 on, from the `state` of random numbers
    before its first pass and the loss's `gradients` by the leaves of that."""
    restore_random_state(state, batch.device)
    audio, text, *scalars = forward(*batch.model_inputs())
    rows = slice(number * len(batch), (number + 1) * len(batch))
    audio_gradient, text_gradient, *scalar_gradients = gradients
    terms = [(audio * audio_gradient[rows]).sum(), (text * text_gradient[rows]).sum()]
    terms += [(own * gradient).sum() / total for own, gradient in zip(scalars, scalar_gradients, strict=True)]
    return torch.stack(terms).sum()


def random_state(device: torch.device) -> dict[str, Any]:
    """State of torch's generators: the CPU's, and the GPU's where `device` is one."""
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
    }


def restore_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Put `random_state` back. One captured without a GPU leaves the GPU's generator as it is."""
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"], device)
