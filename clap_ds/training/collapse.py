"""Detect a collapsed model: all embeddings are equal, and the gradient vanishes.

A healthy run also starts at chance level, but with a gradient. With learning rates of 1e-5 to 1e-3, preset `micro`'s norm was
never below 0.009. After a collapse it was below 3e-4, or the logit scale, initially 10 or 14.3, was below 0.2.
"""

import math
from collections import deque
from pathlib import Path

from clap_ds.config.metrics import TRAIN_LOSS
from clap_ds.weights.checkpoint_files import Manifest, read_all

STRETCH = 50  # consecutive steps
AT_CHANCE, VANISHED, FLAT = 0.999, 1e-3, 1.0  # share of the chance level; gradient norm; logit scale


class LastSteps:
    """Statistics of the last steps. `chance` is the loss of equal similarities."""

    def __init__(self, chance: float) -> None:
        self.chance, self._dead = chance, 0
        self._losses: deque[float] = deque(maxlen=STRETCH)

    def add(self, loss: float, gradient_norm: float, logit_scale: float) -> None:
        self._losses.append(loss)
        is_dead = loss >= AT_CHANCE * self.chance and (gradient_norm < VANISHED or logit_scale < FLAT)
        self._dead = self._dead + 1 if is_dead else 0

    @property
    def loss(self) -> float:
        """Mean loss as a share of the chance level, which depends on the batch."""
        return sum(self._losses) / max(1, len(self._losses)) / self.chance

    def problem(self, step: int, folder: Path) -> str | None:
        """Return a warning if the model has collapsed, else None. `folder` holds the run's checkpoints."""
        if self._dead < STRETCH:
            return None
        since = step - self._dead + 1
        # Step k + 1 computes its loss with the weights of step k's checkpoint.
        good = (name for name, each in read_all(folder).items() if each.step < since - 1 and _has_learned(each))
        advice = "No earlier checkpoint is better than chance. Start from scratch (--restart)"
        if newest := next(good, None):
            advice = f"Resume from the newest earlier checkpoint (clap.train.resume: {folder / newest})"
        return (
            f"the model has collapsed: since step {since} its loss is at chance level, {self.chance:.4g}."
            f" {advice} with a lower learning rate or a longer warm-up"
        )


def _has_learned(checkpoint: Manifest) -> bool:
    return checkpoint.metrics.get(TRAIN_LOSS, math.inf) < AT_CHANCE
