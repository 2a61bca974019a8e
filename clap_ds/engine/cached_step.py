"""The gradient of one contrastive loss over several micro-batches, with the activations of one (GradCache, arXiv 2101.06983).

First all micro-batches go forward without a graph and only their features are kept. The loss over the whole batch then gives a
gradient by each feature. Last, each micro-batch goes forward again, with the same dropout and augmentation, and the inner
product of its features with those gradients is a surrogate loss: its gradient by the weights is what the micro-batch adds to
the whole loss's. A third more work than one large batch, for a batch that memory doesn't limit.

Exact but for the order of sums, with one thing to know: batch norm over mel bins takes the statistics of each micro-batch, as
it takes those of each rank in data parallelism. The gradient is exact for the model with that normalisation, which is not quite
the one that a single large batch would train. Leaves boundaries, backward passes and the update to the engine.
"""

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from clap_ds.data.batch import Batch
from clap_ds.model.clap import ClapModel

REPEAT_TOLERANCE = 1e-2
"""Most that a feature of the second forward pass may be off from the first; features have length 1."""


class FeatureCache:
    """Features of a step's micro-batches, and then the gradient of the loss by them.

    Args:
        forward: the model as it trains, autocast included: inputs of `Batch.model_inputs` → features and scalars.
        model: the one behind `forward`, whose running statistics only the second pass updates.
        micro_batches: all of one size, on the device.
    """

    def __init__(
        self, forward: Callable[..., tuple[Tensor, ...]], model: ClapModel, micro_batches: list[Batch]
    ) -> None:
        self._forward, self._micro_batches = forward, micro_batches
        self._random_states: list[dict[str, Any]] = []
        outputs = []
        kept = [(buffer, buffer.clone()) for buffer in model.audio.batch_norm.buffers()]
        with torch.no_grad():
            for batch in micro_batches:
                self._random_states.append(random_state(batch.device))
                outputs.append(forward(*batch.model_inputs()))
        for buffer, value in kept:
            buffer.copy_(value)
        audio, text, *_ = zip(*outputs, strict=True)
        # Audio and text features of the whole step (rows, joint_dim), then the logit scale and, if there is one, the bias.
        self._leaves = [each.detach().requires_grad_() for each in (torch.cat(audio), torch.cat(text), *outputs[0][2:])]
        self._gradients: tuple[Tensor, ...] = ()

    def differentiate(self, loss: Callable[..., Tensor]) -> Tensor:
        """This rank's loss over the whole step, scalar, detached; a collective where the loss is one."""
        value = loss(*self._leaves)
        self._gradients = torch.autograd.grad(value, self._leaves)
        return value.detach()

    def surrogate_losses(self, *, check: bool) -> Iterator[Callable[[], Tensor]]:
        """For each micro-batch, a function that runs it forward again and gives its surrogate loss, scalar.

        With `check`, which waits for the device, it raises ValueError if its features differ from the first pass's: something
        in the model doesn't repeat.
        """
        start = 0
        for batch, state in zip(self._micro_batches, self._random_states, strict=True):
            rows = slice(start, start + len(batch))
            start = rows.stop

            def surrogate(batch: Batch = batch, state: dict[str, Any] = state, rows: slice = rows) -> Tensor:
                restore_random_state(state, batch.device)
                audio, text, *scalars = self._forward(*batch.model_inputs())
                if check:
                    self._check_repeated(rows, audio, text)
                audio_gradient, text_gradient, *scalar_gradients = self._gradients
                terms = [(audio * audio_gradient[rows]).sum(), (text * text_gradient[rows]).sum()]
                own = zip(scalars, scalar_gradients, strict=True)
                terms += [(scalar * gradient).sum() / len(self._micro_batches) for scalar, gradient in own]
                return torch.stack(terms).sum()

            yield surrogate

    def _check_repeated(self, rows: slice, *features: Tensor) -> None:
        off = max(
            float((now.detach() - first.detach()[rows]).abs().max())
            for now, first in zip(features, self._leaves[:2], strict=True)
        )
        if not off <= REPEAT_TOLERANCE and all(feature.isfinite().all() for feature in features):
            raise ValueError(
                f"clap.train.accumulation cached: a micro-batch's second forward pass gave features {off:.3g} off the first's,"
                " so gradients would be wrong; something in the model draws random numbers that can't be drawn again (set"
                " clap.compile off, or dropout, drop_path and spec_augment)"
            )


def random_state(device: torch.device) -> dict[str, Any]:
    """State of torch's (CPU, and the GPU's where `device` is one), Python's and NumPy's generators, as tensors and numbers."""
    _, keys, *others = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        "python": random.getstate(),
        "numpy": (torch.from_numpy(np.asarray(keys, dtype=np.int64)), *others),
    }


def restore_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Put `random_state` back. One captured without a GPU leaves the GPU's generator as it is."""
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"], device)
    random.setstate(state["python"])
    keys, *others = state["numpy"]
    np.random.set_state(("MT19937", keys.numpy().astype(np.uint32), *others))
