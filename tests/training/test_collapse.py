"""A model that has collapsed is told from one that has only begun; and what such a run says, keeps and ends with."""

import math
from pathlib import Path

import pytest

from clap_ds.engine.loss import LOSSES
from clap_ds.training.collapse import STRETCH, LastSteps

CHANCE = {"softmax": math.log(8), "sigmoid": math.log(8) + 7 * math.log(8 / 7)}
Step = tuple[float, float, float]  # loss, gradient norm, logit scale, as they were found with 8 pairs
STEPS: dict[str, tuple[str, Step, bool]] = {
    "a flat start": ("softmax", (2.0788, 0.0379, 14.2), False),
    "a flat start, sigmoid": ("sigmoid", (3.0136, 0.0095, 10.1), False),
    "learnt by heart": ("softmax", (1e-6, 1e-5, 14.5), False),
    "norm not known": ("softmax", (2.0794, math.nan, 14.3), False),
    "lr 0.01": ("softmax", (2.079442, 9e-5, 13.3), True),
    "lr 1, sigmoid": ("sigmoid", (3.0148, 0.034, 0.029), True),
}


@pytest.mark.parametrize(("kind", "step", "collapses"), STEPS.values(), ids=STEPS)
def test_what_has_begun_is_told_from_what_has_collapsed(tmp_path: Path, kind: str, step: Step, collapses: bool) -> None:
    steps = LastSteps(LOSSES[kind].chance(8))
    assert steps.chance == pytest.approx(CHANCE[kind], rel=1e-6)
    for number in range(1, 4 * STRETCH):
        steps.add(*step)
        assert (steps.verdict(number, tmp_path) is not None) == (collapses and number >= STRETCH)
    steps.add(0.9 * steps.chance, 1.0, 14.0)
    assert steps.verdict(4 * STRETCH, tmp_path) is None
    assert steps.loss == pytest.approx(((STRETCH - 1) * step[0] / steps.chance + 0.9) / STRETCH)
