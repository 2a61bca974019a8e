"""An exponential moving average of the weights, which each step updates (Polyak and Juditsky 1992). It is kept as the optimiser
keeps its fp32 weights; frozen weights and buffers are the model's own."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from clap_ds.engine.optimizer import by_parameter, master_tensors


class WeightAverage:
    """The average, which begins with the present weights; `decay` is how much of it an update keeps.

    Attributes:
        tensors: the average, fp32, laid out as `master_tensors`.
    """

    def __init__(self, model: nn.Module, optimizer: Any, decay: float) -> None:
        self._model, self._optimizer, self._decay = model, optimizer, decay
        self.tensors = [master.detach().clone() for master in master_tensors(optimizer)]

    @torch.no_grad()
    def update(self) -> None:
        """Take in the weights of a step: average = decay · average + (1 - decay) · weights."""
        torch._foreach_lerp_(self.tensors, master_tensors(self._optimizer), 1 - self._decay)

    def state(self) -> dict[str, Tensor]:
        """Averages of the trained parameters, fp32, by name; they share the average's memory."""
        parts = by_parameter(self._optimizer, self.tensors)
        return {name: parts[id(p)] for name, p in self._model.named_parameters() if id(p) in parts}

    @torch.no_grad()
    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Go on from these weights, by parameter; those that aren't there stay."""
        for name, average in self.state().items():
            average.copy_(weights.get(name, average))

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The model's weights are the average, in its dtypes, and afterwards again what they were, to the bit."""
        average = self.state()
        kept = {name: self._model.get_parameter(name).detach().clone() for name in average}
        self._put(average)
        try:
            yield
        finally:
            self._put(kept)

    @torch.no_grad()
    def _put(self, weights: Mapping[str, Tensor]) -> None:
        for name, weight in weights.items():
            self._model.get_parameter(name).copy_(weight)
