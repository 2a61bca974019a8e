"""The gradient of one contrastive loss over several micro-batches, with the activations of one (GradCache, arXiv 2101.06983).

First all micro-batches go forward without a graph and only their features are kept. The loss over the whole batch then gives a
gradient by each feature. Last, each micro-batch goes forward again, with the same dropout and augmentation, and the inner
product of its features with those gradients is a surrogate loss: its gradient by the weights is what the micro-batch adds to
the whole loss's. A third more work than one large batch, for a batch that memory doesn't limit.

Exact but for the order of sums, with one thing to know: batch norm over mel bins takes the statistics of each micro-batch, as
it takes those of each rank in data parallelism. The gradient is exact for the model with that normalisation, which is not quite
the one that a single large batch would train. Leaves boundaries, backward passes and the update to the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from clap_ds.data.batch import Batch

REPEAT_TOLERANCE = 1e-2
"""Most that a feature of the second forward pass may be off from the first; features have length 1."""


class FeatureCache:
    """Features of a step's micro-batches, and then the gradient of the loss by them.

    Args:
        forward: the model as it trains, autocast included: inputs of `Batch.model_inputs` → features and scalars.
        model: the module behind `forward`, for its running statistics, which only the second pass updates.
        micro_batches: all of one size, on the device.
    """

    def __init__(
        self, forward: Callable[..., tuple[Tensor, ...]], model: nn.Module, micro_batches: list[Batch]
    ) -> None:
        self._forward = forward
        self._micro_batches = micro_batches
        self._generators: list[_Generators] = []
        outputs = []
        with torch.no_grad(), _kept_statistics(model):
            for batch in micro_batches:
                self._generators.append(_Generators(batch.device))
                outputs.append(forward(*batch.model_inputs()))
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

        Args:
            check: compare the features with the first pass's, which waits for the device.

        Raises:
            ValueError: they differ: something in the model doesn't repeat.
        """
        start = 0
        for batch, generators in zip(self._micro_batches, self._generators, strict=True):
            rows = slice(start, start + len(batch))
            start = rows.stop

            def surrogate(batch: Batch = batch, generators: _Generators = generators, rows: slice = rows) -> Tensor:
                generators.restore()
                audio, text, *scalars = self._forward(*batch.model_inputs())
                if check:
                    self._check_repeated(rows, audio, text)
                audio_gradient, text_gradient, *scalar_gradients = self._gradients
                terms = [(audio * audio_gradient[rows]).sum(), (text * text_gradient[rows]).sum()]
                share = 1 / len(self._micro_batches)
                terms += [
                    (scalar * gradient).sum() * share
                    for scalar, gradient in zip(scalars, scalar_gradients, strict=True)
                ]
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


class _Generators:
    """State of the random number generators that a forward pass on `device` draws from."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._host = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def restore(self) -> None:
        torch.set_rng_state(self._host)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda, self._device)


@contextmanager
def _kept_statistics(model: nn.Module) -> Iterator[None]:
    """Batch norm's running statistics are afterwards what they were."""
    buffers: list[Any] = [
        buffer
        for module in model.modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm)
        for buffer in module.buffers()
    ]
    before = [buffer.clone() for buffer in buffers]
    try:
        yield
    finally:
        for buffer, value in zip(buffers, before, strict=True):
            buffer.copy_(value)
