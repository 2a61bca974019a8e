"""The overlapped all-reduce does what DeepSpeed's own does, and does it under the backward pass."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from clap_ds.engine.building import freeze
from clap_ds.engine.engine import ClapEngine
from clap_ds.record.clock import PhaseTimer
from tests.engine.test_engine import DEVICE, batches_of, model_of, settings
from tests.rank_pool import RankPool

TIMER = PhaseTimer(DEVICE, instrumented=False)


def _weights_after_four_steps(sync: str, precision: str, accumulation: int, changes: dict[str, Any]) -> list[Tensor]:
    """With a tower frozen where gradients travel in fp32."""
    run = settings(precision, accumulation, sync, **changes)
    model = model_of(run)
    freeze(model, ["text"] if changes.get("communication_data_type") == "fp32" else [])
    engine, batches = ClapEngine(run, model, DEVICE), batches_of(run)
    for _ in range(4):
        engine.step(batches, TIMER)
    return [parameter.detach().float() for parameter in engine.model.parameters()]


def _largest_difference(*case: Any) -> float:
    overlapped, plain = (_weights_after_four_steps(sync, *case) for sync in ("overlapped", "deepspeed"))
    return max(float((a - b).abs().max()) for a, b in zip(overlapped, plain, strict=True))


@pytest.mark.parametrize(
    ("precision", "accumulation", "changes"),
    [
        ("bf16", 1, {"gradient_clipping": 0.01}),
        ("fp32", 2, {"gradient_clipping": 0.01}),
        ("autocast", 1, {"communication_data_type": "bf16"}),
        ("bf16", 1, {"communication_data_type": "fp32"}),
    ],
)
def test_same_weights_as_deepspeeds_own_reduction(
    two_ranks: RankPool, precision: str, accumulation: int, changes: dict[str, Any]
) -> None:
    # Exactly: the engine is the same otherwise, a sum of two has one order, and its half is exact.
    assert two_ranks.run(_largest_difference, precision, accumulation, changes) == [0.0, 0.0]


def _refusal(changes: dict[str, Any]) -> str:
    run = settings("fp32", 1, **changes)
    with pytest.raises(ValueError, match="needs clap") as refused:
        ClapEngine(run, model_of(run), DEVICE)
    return str(refused.value).split(":")[0]


@pytest.mark.parametrize(
    "changes", [{"prescale_gradients": True}, {"gradient_predivide_factor": 4.0}, {"gradient_allreduce_op": "sum"}]
)
def test_other_averages_are_deepspeeds_alone(two_ranks: RankPool, changes: dict[str, Any]) -> None:
    assert two_ranks.run(_refusal, changes) == [*changes] * 2


def _order_of_events(sync: str) -> list[str]:
    """What happens in a step after the first two: gradients getting ready ("ready"), all-reduces ("send")."""
    run = settings("fp32", 1, sync)
    engine, batches = ClapEngine(run, model_of(run), DEVICE), batches_of(run)
    for _ in range(2):
        engine.step(batches, TIMER)
    events: list[str] = []
    for parameter in engine.model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: events.append("ready"))
    all_reduce = dist.all_reduce

    def noted(*args: Any, **kwargs: Any) -> Any:
        events.append("send")
        return all_reduce(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", noted)
        engine.step(batches, TIMER)
    return events


def test_gradients_are_sent_while_others_are_still_being_computed(two_ranks: RankPool) -> None:
    for events in two_ranks.run(_order_of_events, "overlapped"):
        first_send, last_ready = events.index("send"), len(events) - 1 - events[::-1].index("ready")
        assert events.count("send") > 3
        assert first_send < last_ready / 3
    for events in two_ranks.run(_order_of_events, "deepspeed"):
        assert "ready" not in events[events.index("send") :]


def _sent(sync: str, accumulation: str) -> list[float]:
    """How often every gradient is reduced, as torch's profiler sees all-reduces of the process group, by what is called."""
    run = settings("fp32", 1, clap={"gradient_sync": sync, "train": {"accumulation": accumulation}})
    engine, batches = ClapEngine(run, model_of(run), DEVICE), batches_of(run)
    found = []

    def note(action: Callable[..., object], *arguments: Any, off: bool) -> None:
        with (
            profile(activities=[ProfilerActivity.CPU], record_shapes=True) as seen,
            engine.sync.off() if off else nullcontext(),
        ):
            action(*arguments, TIMER)
        events = [event for event in seen.profiler.kineto_results.events() if event.name() == "gloo:all_reduce"]
        elements = sum(torch.Size(event.shapes()[0]).numel() for event in events)
        found.append(elements / sum(parameter.numel() for parameter in engine.model.parameters()))

    for number in (1, 3):
        engine.set_accumulation_steps(number)
        note(engine.step, batches, off=True)
        note(engine.step, batches, off=False)
        note(engine.accumulate, batches, off=True)
        engine.deepspeed.zero_grad()
        note(engine.step, batches, off=False)
    return found


@pytest.mark.parametrize("accumulation", ["independent", "cached"])
@pytest.mark.parametrize("sync", ["overlapped", "deepspeed"])
def test_gradients_travel_once_a_step_and_never_where_they_are_off(
    two_ranks: RankPool, sync: str, accumulation: str
) -> None:
    assert two_ranks.run(_sent, sync, accumulation) == [[0, 1, 0, 1] * 2] * 2
