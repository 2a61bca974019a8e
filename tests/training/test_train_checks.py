"""What a run's JSON lacks for training is said before anything is loaded."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from clap_ds.training.checks import problems_for_training
from tests.training.reference_steps import settings

ZERO_SHOT = {"zero_shot": {"shards": "held_out.tar"}}


def _run(evaluation: dict[str, Any] | None = None, checkpoint: dict[str, Any] | None = None, **changes: Any) -> Any:
    run = settings(**changes)
    sections = {"evaluation": evaluation or {}, "checkpoint": checkpoint or {}}
    run.clap = type(run.clap).model_validate({**run.clap.model_dump(), **sections})
    return run


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "clap.train: missing samples or epochs"),
        ({"train": {"epochs": 1.0}}, "clap.train.epochs: synthetic data has no epochs"),
        (
            {"train": {"samples": 9, "stop_at": {"zero_shot_top1": 0.9}}, "evaluation": {"every_steps": 1}},
            "no evaluation gives 'zero_shot_top1'",
        ),
        (
            {"train": {"samples": 9, "stop_at": {"zero_shot_top": 0.9}}, "evaluation": {**ZERO_SHOT, "every_steps": 1}},
            "no evaluation gives 'zero_shot_top'; there are zero_shot_top1, zero_shot_top5, zero_shot_map",
        ),
        (
            {"train": {"samples": 9, "stop_at": {"zero_shot_top1": 0.9}}, "evaluation": ZERO_SHOT},
            "clap.evaluation.every_steps is missing",
        ),
        ({"train": {"samples": 9}, "checkpoint": {"best_by": "top1"}}, "clap.checkpoint.best_by: expected one of"),
    ],
)
def test_problems_name_the_field(changes: dict[str, Any], said: str) -> None:
    (problem,) = problems_for_training(_run(**changes))
    assert said in problem


def test_nothing_is_wrong_with_a_good_run() -> None:
    train = {"samples": 9, "stop_at": {"zero_shot_top1": 0.9}}
    assert problems_for_training(_run(train=train, evaluation={**ZERO_SHOT, "every_steps": 5})) == []


def test_weights_and_biases_must_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    run = _run(train={"samples": 9}, wandb={"enabled": True})
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    (problem,) = problems_for_training(run)
    assert "wandb.enabled: Weights & Biases is not installed" in problem
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert problems_for_training(run) == []


def test_the_checks_load_neither_torch_nor_deepspeed() -> None:
    program = "import sys, clap_ds.training.checks; sys.exit(not {'torch', 'deepspeed'}.isdisjoint(sys.modules))"
    assert subprocess.run([sys.executable, "-c", program], cwd=Path(__file__).parents[2], timeout=60).returncode == 0
