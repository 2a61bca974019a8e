"""A collapsed model is distinguished from an untrained one; the run warns and records it."""

import math
import re
from pathlib import Path

import pytest

from clap_ds.config.metrics import TRAIN_LOSS
from clap_ds.engine.loss import LOSSES
from clap_ds.training.collapse import STRETCH, LastSteps
from clap_ds.weights.checkpoint_files import MANIFEST, Manifest, begin, write_file

CHANCE = {"softmax": math.log(8), "sigmoid": math.log(8) + 7 * math.log(8 / 7)}
Step = tuple[float, float, float]  # loss, gradient norm, logit scale, as measured with 8 pairs
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
        assert (steps.problem(number, tmp_path) is not None) == (collapses and number >= STRETCH)
    steps.add(0.9 * steps.chance, 1.0, 14.0)
    assert steps.problem(4 * STRETCH, tmp_path) is None
    assert steps.loss == pytest.approx(((STRETCH - 1) * step[0] / steps.chance + 0.9) / STRETCH)


@pytest.mark.parametrize(
    ("saved", "named"),
    [({2: 0.9, 3: 0.95, 4: 0.99, 40: 0.5}, 3), ({4: 0.9, 40: 0.5}, None), ({2: 0.9, 3: 1.0}, 2)],
    ids=["with step 4's weights step 5's loss is at chance", "none", "a collapsed run resumed from step 3"],
)
def test_advice_names_the_newest_checkpoint_from_before(
    tmp_path: Path, saved: dict[int, float], named: int | None
) -> None:
    for step, loss in saved.items():
        with begin(tmp_path, step) as draft:
            manifest = Manifest(step, step, {}, {}, None, {TRAIN_LOSS: loss}, {})
            write_file(draft / MANIFEST, manifest.to_json().encode())
    steps = LastSteps(math.log(8))
    for _ in range(STRETCH):
        steps.add(*STEPS["lr 0.01"][1])
    said = re.findall(r"since step 5 |step-\d+|--restart", steps.problem(STRETCH + 4, tmp_path) or "")
    assert said == ["since step 5 ", f"step-{named:08d}" if named else "--restart"]
