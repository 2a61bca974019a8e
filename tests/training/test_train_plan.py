"""Problems of a run's JSON for training are reported before anything is loaded."""

import importlib.util
import subprocess
import sys
from typing import Any

import pytest

from clap_ds.training.plan import problems_for_training
from tests.processes import ROOT
from tests.training.reference_steps import settings

ZERO_SHOT = {"zero_shot": {"shards": "held_out.tar"}, "every_steps": 5}
STOP = {"max_samples": 9, "target_metrics": {"zero_shot_top1": 0.9}}
SHARDS = {"source": "webdataset", "shards": "a.tar", "tokenizer": "x"}
NO_EPOCHS = "clap.train.epochs: synthetic"
ONE_PAIR = "train_micro_batch_size_per_gpu: 1 on 1 rank"


def copied_to(url: str) -> dict[str, Any]:
    return {"train": {"max_samples": 9}, "checkpoint": {"remote_sync": url}}


def sized(accumulation: str, micro_batch: int = 1, steps: int = 4) -> dict[str, Any]:
    sizes = {"train_micro_batch_size_per_gpu": micro_batch, "gradient_accumulation_steps": steps}
    return {"train": {"max_samples": 9, "accumulation": accumulation}, **sizes}


CASES: list[tuple[dict[str, Any], str | None]] = [
    ({}, "clap.train: max_samples and epochs are missing"),
    ({"train": {"epochs": 1.0}}, NO_EPOCHS),
    (
        {"train": {"max_samples": 9, "target_metrics": {"top1": 0.9}}, "evaluation": ZERO_SHOT},
        "available: zero_shot_top1",
    ),
    (
        {"train": STOP, "evaluation": ZERO_SHOT | {"every_steps": None}},
        "clap.evaluation.every_steps is missing",
    ),
    ({"train": STOP, "evaluation": ZERO_SHOT}, None),
    (
        {"train": {"max_samples": 9}, "checkpoint": {"best_metric": "top1"}},
        "clap.checkpoint.best_metric: no evaluation computes",
    ),
    (
        copied_to("s3://key:hush@bucket/run"),
        "remote_sync: the s3 URL of bucket contains credentials",
    ),
    (copied_to("gopher://host/run"), "gopher"),
    (sized("plain"), ONE_PAIR),
    (sized("gradcache"), None),
    (sized("gradcache", steps=1), ONE_PAIR),
    *(
        (
            {"train": {"max_samples": 9, "batch_ramp": ramp}, "gradient_accumulation_steps": 4},
            problem,
        )
        for ramp, problem in (
            ([[0, 6], [30, 12]], None),
            ([[9, 6], [30, 12]], "the first 0"),
            ([[0, 6], [0, 12]], "the first 0"),
            ([[0, 7], [30, 12]], "multiples of 3, the micro-batches of all ranks, found [7]"),
            ([[0, 3], [30, 6]], "global batch 12 as the last one, found 6"),
        )
    ),
]


@pytest.mark.parametrize(("changes", "expected"), CASES)
def test_problems_name_the_field(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], expected: str | None
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    run = settings(**changes)
    found = problems_for_training(run.clap, run.deepspeed, 1)
    assert len(found) == (expected is not None)
    assert (expected or "") in "".join(found)
    assert "hush" not in "".join(found)
    if expected == ONE_PAIR:  # not a problem for more ranks, or an unknown number
        assert not problems_for_training(run.clap, run.deepspeed, 2) + problems_for_training(
            run.clap, run.deepspeed
        )


def test_the_checks_load_neither_torch_nor_deepspeed() -> None:
    program = (
        "import sys, clap_ds.train; sys.exit(not {'torch', 'deepspeed'}.isdisjoint(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, timeout=180).returncode == 0
