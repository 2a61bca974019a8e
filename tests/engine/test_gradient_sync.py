"""The overlapped all-reduce gives DeepSpeed's result, and runs during the backward pass."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from tests.engine.test_engine import batches_of, model_of, settings
from tests.rank_pool import RankPool
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


def _gradients(
    sync: str, precision: str, accumulation: int, changes: dict[str, Any]
) -> tuple[Tensor, set[str]]:
    """Return gradients of two steps from the same weights, in fp64, and the dtypes that were sent.
    With `sync` "none" gradients are this rank's own."""
    run = settings(precision, accumulation, "overlap" if sync == "none" else sync, **changes)
    engine = engine_of(run, model_of(run))
    batches = batches_of(run)
    gradients = []
    dtypes = set()
    for _ in range(2):
        with engine.sync.off() if sync == "none" else nullcontext():
            events = _events(lambda: engine.accumulate(batches), SEND)
        dtypes |= {event.dtypes()[0] for event in events}
        for parameter in engine.model.parameters():
            assert parameter.grad is not None
            gradients.append(parameter.grad.double().flatten())
        engine.deepspeed.zero_grad()
    return torch.cat(gradients), dtypes


def _error_over_deepspeeds(*case: Any) -> tuple[set[str], float]:
    exact, _ = _gradients("none", *case)
    dist.all_reduce(exact)
    exact /= dist.get_world_size()
    overlapped, dtypes = _gradients("overlap", *case)
    by_deepspeed, _ = _gradients("deepspeed", *case)
    return dtypes, float((overlapped - exact).norm() / (by_deepspeed - exact).norm())


@pytest.mark.parametrize(
    ("precision", "accumulation", "changes", "dtypes"),
    [
        # Matrices, and the vectors that stay fp32.
        ("bf16", 1, {}, {BF16, FP32}),
        ("fp32", 2, {}, {FP32}),
        # By DeepSpeed.
        ("bf16", 1, {"communication_data_type": "fp32"}, {FP32}),
    ],
)
def test_averages_are_as_exact_as_deepspeeds(
    two_ranks: RankPool, precision: str, accumulation: int, changes: Any, dtypes: Any
) -> None:
    """A sum of two has one order, and its half is exact."""
    for sent, error in two_ranks.run(_error_over_deepspeeds, precision, accumulation, changes):
        assert sent == dtypes
        assert error <= 1.0


def _order_of_events(sync: str) -> list[str]:
    """Return the events of the third step: all-reduces, and "ready" for each gradient."""
    run = settings("fp32", 1, sync)
    engine = engine_of(run, model_of(run))
    batches = batches_of(run)
    for _ in range(2):
        engine.step(batches)
    for parameter in engine.model.parameters():
        parameter.register_post_accumulate_grad_hook(record_function("ready")(lambda _: None))
    return [event.name() for event in _events(lambda: engine.step(batches), CALL, "ready")]


def test_overlapped_gradients_are_sent_while_others_are_computed(two_ranks: RankPool) -> None:
    for events in two_ranks.run(_order_of_events, "overlap"):
        assert events.count(CALL) > 3
        assert events[: events.index(CALL)].count("ready") < events.count("ready") / 3


def _sent_fractions(sync: str, accumulation: str) -> list[float]:
    """Return how often every gradient is reduced in each call."""
    run = settings("fp32", 1, clap={"gradient_sync": sync, "train": {"accumulation": accumulation}})
    engine = engine_of(run, model_of(run))
    batches = batches_of(run)
    num_elements = sum(parameter.numel() for parameter in engine.model.parameters())
    engine.set_accumulation_steps(2)

    def sent(action: Callable[..., object], *, off: bool) -> float:
        with engine.sync.off() if off else nullcontext():
            events = _events(lambda: action(batches), SEND)
        return sum(torch.Size(event.shapes()[0]).numel() for event in events) / num_elements

    fractions = [sent(engine.step, off=True), sent(engine.step, off=False)]
    fractions.append(sent(engine.accumulate, off=True))
    engine.deepspeed.zero_grad()
    return [*fractions, sent(engine.step, off=False)]


@pytest.mark.parametrize("accumulation", ["plain", "gradcache"])
@pytest.mark.parametrize("sync", ["overlap", "deepspeed"])
def test_gradients_are_sent_once_a_step_and_never_while_off(
    two_ranks: RankPool, sync: str, accumulation: str
) -> None:
    assert two_ranks.run(_sent_fractions, sync, accumulation) == [[0, 1, 0, 1]] * 2
