"""Average the weights exponentially over steps (Polyak and Juditsky 1992), with the layout of the optimizer's fp32 weights.

Frozen weights and buffers are the model's own."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from clap_ds.engine.optimizer import by_parameter, master_tensors


class WeightAverage:
    """Hold the average, which starts as the current weights; an update keeps the fraction `decay` of it.

    Attributes:
        tensors: the average, fp32, with the layout of `master_tensors`.
    """

    def __init__(self, model: nn.Module, optimizer: Any, decay: float) -> None:
        self._model, self._optimizer, self._decay = model, optimizer, decay
        self.tensors = [master.detach().clone() for master in master_tensors(optimizer)]

    @torch.no_grad()
    def update(self) -> None:
        """Update the average after a step: average = decay · average + (1 - decay) · weights."""
        torch._foreach_lerp_(self.tensors, master_tensors(self._optimizer), 1 - self._decay)

    def state(self) -> dict[str, Tensor]:
        """Return fp32 averages of the trained parameters by name; they share the average's memory."""
        parts = by_parameter(self._optimizer, self.tensors)
        return {name: parts[id(p)] for name, p in self._model.named_parameters() if id(p) in parts}

    @torch.no_grad()
    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Set the average to these weights by name; missing ones stay."""
        for name, average in self.state().items():
            average.copy_(weights.get(name, average))

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Replace the model's weights by the average, in their dtypes, and restore them exactly afterwards."""
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
