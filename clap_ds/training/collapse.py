"""Whether a model has collapsed: all clips and captions are one to it, and no gradient is left that would tell them apart.

A run that starts well is at chance level, too, but has a gradient: with rates of 1e-5 to 1e-3 the norm of preset `micro` was
never below 0.009. Collapsed, it was below 3e-4, or the logit scale, 10 or 14.3 at first, was below 0.2.
"""

import math
from collections import deque
from pathlib import Path

from clap_ds.config.metrics import TRAIN_LOSS
from clap_ds.weights.checkpoint_files import Manifest, read_all

STRETCH = 50  # steps in a row
AT_CHANCE, VANISHED, FLAT = 0.999, 1e-3, 1.0  # share of the chance level; gradient norm; logit scale


class LastSteps:
    """`chance` is the loss where all similarities are equal."""

    def __init__(self, chance: float) -> None:
        self.chance, self._dead = chance, 0
        self._losses: deque[float] = deque(maxlen=STRETCH)

    def add(self, loss: float, gradient_norm: float, logit_scale: float) -> None:
        self._losses.append(loss)
        is_dead = loss >= AT_CHANCE * self.chance and (gradient_norm < VANISHED or logit_scale < FLAT)
        self._dead = self._dead + 1 if is_dead else 0

    @property
    def loss(self) -> float:
        """Their mean, as a share of the chance level, which depends on the batch."""
        return sum(self._losses) / max(1, len(self._losses)) / self.chance

    def verdict(self, step: int, folder: Path) -> str | None:
        """What to say after this step of a model that has collapsed, None of another; `folder` has the run's checkpoints."""
        if self._dead < STRETCH:
            return None
        since = step - self._dead + 1
        # Step k's checkpoint holds the weights that step k + 1 works out its loss with.
        good = (name for name, each in read_all(folder).items() if each.step < since - 1 and _has_learned(each))
        advice = "No checkpoint from before that is better than chance. Start anew (--restart)"
        if newest := next(good, None):
            advice = f"Go back to the newest checkpoint from before (clap.train.resume: {folder / newest})"
        return (
            f"the model has collapsed: since step {since} its loss is at chance level, {self.chance:.4g}."
            f" {advice} with a lower learning rate or a longer warm-up"
        )


def _has_learned(checkpoint: Manifest) -> bool:
    return checkpoint.metrics.get(TRAIN_LOSS, math.inf) < AT_CHANCE
