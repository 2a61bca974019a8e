"""What a run's JSON lacks for training is said before anything is loaded."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from typing import Any

import pytest

from clap_ds.training.checks import problems_for_training
from tests.processes import ROOT
from tests.training.reference_steps import settings

ZERO_SHOT = {"zero_shot": {"shards": "held_out.tar"}}
STOP = {"samples": 9, "stop_at": {"zero_shot_top1": 0.9}}


@pytest.mark.parametrize(
    ("changes", "problems"),
    [
        ({}, ["clap.train: missing samples or epochs"]),
        ({"train": {"epochs": 1.0}}, ["clap.train.epochs: synthetic data has no epochs"]),
        ({"train": STOP, "evaluation": {"every_steps": 1}}, ["no evaluation gives 'zero_shot_top1'"]),
        (
            {"train": {**STOP, "stop_at": {"top1": 0.9}}, "evaluation": {**ZERO_SHOT, "every_steps": 1}},
            ["no evaluation gives 'top1'; there are zero_shot_top1, zero_shot_top5, zero_shot_map"],
        ),
        ({"train": STOP, "evaluation": ZERO_SHOT}, ["clap.evaluation.every_steps is missing"]),
        ({"train": {"samples": 9}, "checkpoint": {"best_by": "top1"}}, ["clap.checkpoint.best_by: expected one of"]),
        ({"train": STOP, "evaluation": {**ZERO_SHOT, "every_steps": 5}}, []),
    ],
)
def test_problems_name_the_field(changes: dict[str, Any], problems: list[str]) -> None:
    found = problems_for_training(settings(**changes))
    assert len(found) == len(problems)
    assert all(expected in problem for expected, problem in zip(problems, found, strict=True))


@pytest.mark.parametrize("is_installed", [True, False])
def test_weights_and_biases_must_be_installed(monkeypatch: pytest.MonkeyPatch, is_installed: bool) -> None:
    run = settings(train={"samples": 9}, wandb={"enabled": True})
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if is_installed else None)
    problems = problems_for_training(run)
    assert is_installed or "wandb.enabled: Weights & Biases is not installed" in problems[0]
    assert len(problems) == (not is_installed)


def test_the_checks_load_neither_torch_nor_deepspeed() -> None:
    program = "import sys, clap_ds.training.checks; sys.exit(not {'torch', 'deepspeed'}.isdisjoint(sys.modules))"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, timeout=60).returncode == 0
