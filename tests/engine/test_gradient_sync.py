"""The overlapped all-reduce sends gradients once, in their dtype, during the backward pass.

`test_engine.py` and `test_grad_cache.py` compare its results."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from tests.engine.test_engine import batches_of, model_of, settings
from tests.training.reference_steps import engine_of

# Names in torch's profiler. The thread that computes gradients requests an all-reduce, and another
# runs it later.
CALL = "c10d::allreduce_"
SEND = "gloo:all_reduce"
BF16 = "c10::BFloat16"
FP32 = "float"


def _events(action: Callable[[], object], *names: str) -> list[Any]:
    """Return events with these names from torch's profiler, in order."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        action()
    events = profiler.profiler.kineto_results.events()
    return sorted(
        (event for event in events if event.name() in names), key=lambda event: event.start_ns()
    )


def _order_of_events() -> list[str]:
    """Return the events of the third step: all-reduces, and "ready" for each gradient."""
    run = settings("fp32", 1)
    engine = engine_of(run, model_of(run))
    batches = batches_of(run)
    for _ in range(2):
        engine.step(batches)
    for parameter in engine.model.parameters():
        parameter.register_post_accumulate_grad_hook(record_function("ready")(lambda _: None))
    return [event.name() for event in _events(lambda: engine.step(batches), CALL, "ready")]


def test_overlapped_gradients_are_sent_while_others_are_computed(two_ranks):
    for events in two_ranks.run(_order_of_events):
        assert events.count(CALL) > 3
        assert events[: events.index(CALL)].count("ready") < events.count("ready") / 3


def _sent(precision: str, changes: dict[str, Any]) -> tuple[list[float], set[str]]:
    """Return how often every gradient is reduced in each of two steps, of which the first is local,
    and the dtypes that were sent."""
    run = settings(precision, 2, **changes)
    engine = engine_of(run, model_of(run))
    batches = batches_of(run)
    num_elements = sum(parameter.numel() for parameter in engine.model.parameters())
    fractions = []
    for scope in (engine.sync.off(), nullcontext()):
        with scope:
            events = _events(lambda: engine.step(batches), SEND)
        sizes = [torch.Size(event.shapes()[0]).numel() for event in events]
        fractions.append(sum(sizes) / num_elements)
    return fractions, {event.dtypes()[0] for event in events}


@pytest.mark.parametrize(
    ("precision", "changes", "dtypes"),
    [
        ("fp32", {"sync": "deepspeed"}, {FP32}),
        # Matrices, and the vectors that stay fp32.
        ("bf16", {}, {BF16, FP32}),
        # By DeepSpeed.
        ("bf16", {"communication_data_type": "fp32"}, {FP32}),
    ],
)
def test_gradients_are_sent_once_a_step_in_their_dtype_and_never_while_off(
    two_ranks, precision, changes, dtypes
):
    assert two_ranks.run(_sent, precision, changes) == [([0, 1], dtypes)] * 2
