"""A run's length, the actions due after each step, and problems of its JSON, which are reported
before torch is loaded."""

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from clap_ds.checkpoint.train_state import TrainState
from clap_ds.config.batch_sizes import BatchSizes
from clap_ds.training.plan import StepActions, TrainPlan, problems_for_training
from tests.processes import ROOT
from tests.training.reference_steps import settings


@examples(deadline=None)
@given(
    samples=st.integers(1, 5000),
    batch=st.integers(1, 500),
    samples_before=st.integers(0, 5000),
    ramp_starts=st.lists(st.integers(1, 3000), max_size=3),
)
def test_last_step_equals_count_of_steps(samples, batch, samples_before, ramp_starts):
    ramp = [[start, batch + number] for number, start in enumerate(sorted({0, *ramp_starts}))]
    plan = TrainPlan(samples, ramp[-1][1], ramp=ramp)
    state = TrainState(samples=samples_before)
    last_step = plan.last_step(state)
    batches = []
    while not plan.is_done(state):
        batches.append(plan.batch(state.samples))
        plan.advance(state)
    assert (state.step, state.samples) == (last_step, samples_before + sum(batches))
    assert batches == sorted(batches)


def test_epochs_are_counted_in_samples():
    data = {"source": "webdataset", "shards": "a.tar", "tokenizer": "x"}
    clap = settings(train={"epochs": 2.5}, data=data).clap
    sizes = BatchSizes(3, 2, 12)
    plan = TrainPlan.from_settings(clap, sizes, 101)
    state = TrainState(samples=190)
    plan.advance(state)
    assert (plan.samples, state.samples, state.epoch) == (253, 202, 2)
    with pytest.raises(ValueError, match=r"clap\.train\.epochs"):
        TrainPlan.from_settings(clap, sizes, None)


NOTHING = StepActions(log=False, evaluate=False, save=False, stop=False)
EVERYTHING = StepActions(log=True, evaluate=True, save=True, stop=True)
TARGET = {"top1": 0.5}
PLAN = TrainPlan(100, 10, log_every=3, evaluate_every=4, save_every=5, target_metrics=TARGET)
REACHED = {"target": TARGET, "time_to_target_s": 1.0}


@pytest.mark.parametrize(
    ("state", "signal", "expected"),
    [
        (TrainState(3, 30), 0, NOTHING._replace(log=True)),
        (TrainState(4, 40), 0, NOTHING._replace(log=True, evaluate=True)),
        # Not saved after step 5.
        (TrainState(7, 70), 0, NOTHING._replace(log=True, save=True)),
        (TrainState(7, 70, saved_step=5), 0, NOTHING),
        (TrainState(4, 40), 15, EVERYTHING._replace(evaluate=False)),
        (TrainState(10, 100, saved_step=5), 0, EVERYTHING),
        (TrainState(4, 40, extra=REACHED), 0, EVERYTHING),
    ],
)
def test_due_actions_after_step(state, signal, expected):
    assert PLAN.due(state, signal) == expected
    assert PLAN.due(state, signal, is_late=True) == expected._replace(log=True, save=True)


def test_target_is_described_only_if_it_is_the_plans():
    state = TrainState(4, extra=REACHED)
    assert PLAN.describe_target(state) == "target reached at step 4, after 1 s: top1 0.5"
    assert replace(PLAN, target_metrics={"top1": 0.4}).describe_target(state) is None


TRAIN = {"max_samples": 9}
ZERO_SHOT = {"zero_shot": {"shards": "held_out.tar"}, "every_steps": 5}
TOP1_TARGET = TRAIN | {"target_metrics": {"zero_shot_top1": 0.9}}


def with_ramp(*ramp: list[int]) -> dict[str, Any]:
    return {"train": TRAIN | {"batch_ramp": ramp}, "gradient_accumulation_steps": 4}


def with_one_pair(accumulation: str, steps: int) -> dict[str, Any]:
    sizes = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": steps}
    return {"train": TRAIN | {"accumulation": accumulation}, **sizes}


MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({}, "clap.train: max_samples and epochs are missing"),
    ({"train": {"epochs": 1.0}}, "clap.train.epochs: synthetic"),
    (
        {"train": TOP1_TARGET, "evaluation": ZERO_SHOT | {"every_steps": None}},
        "clap.evaluation.every_steps is missing",
    ),
    (
        {"train": TRAIN, "checkpoint": {"best_metric": "top1"}},
        "clap.checkpoint.best_metric: no evaluation computes",
    ),
    (
        {"train": TRAIN, "profile": {"start_step": 3, "steps": 2}},
        "clap.profile: expected steps up to 3, the run's last, found 3 to 4",
    ),
    (with_one_pair("gradcache", 1), "train_micro_batch_size_per_gpu: 1 on 1 rank"),
    (with_ramp([9, 6], [30, 12]), "the first 0"),
    (with_ramp([0, 7], [30, 12]), "multiples of 3, the micro-batches of all ranks, found [7]"),
    (with_ramp([0, 3], [30, 6]), "global batch 12 as the last one, found 6"),
]


@pytest.mark.parametrize(("changes", "expected"), MISTAKES)
def test_mistake_for_training_names_field(changes, expected):
    run = settings(**changes)
    (problem,) = problems_for_training(run.clap, run.deepspeed, 1)
    assert expected in problem


def test_checks_load_neither_torch_nor_deepspeed():
    program = (
        "import sys, clap_ds.train; sys.exit(not {'torch', 'deepspeed'}.isdisjoint(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, timeout=180).returncode == 0
