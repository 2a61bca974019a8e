"""The overlapped all-reduce does what DeepSpeed's own does, whatever the configuration, and does it under the backward pass."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from clap_ds.engine.engine import ClapEngine
from clap_ds.model.clap import ClapModel
from clap_ds.record.clock import PhaseTimer
from tests.engine.test_engine import DEVICE, _batches, _model, _settings
from tests.rank_pool import RankPool

TIMER = PhaseTimer(DEVICE, instrumented=False)


def _add_unused(model: ClapModel, *, on_rank: int | None = None) -> None:
    """A parameter that gets no gradient: on no rank, or on one rank alone."""
    extra = torch.nn.Parameter(torch.ones(3, 4))
    model.audio.extra = extra  # type: ignore[assignment]
    model.audio.norm.register_forward_hook(
        lambda module, inputs, output: output + 0 * extra.sum() if on_rank not in (None, dist.get_rank()) else output
    )


def _weights_after(
    num_steps: int, sync: str, precision: str, accumulation: int, changes: dict[str, Any], twist: str
) -> list[Tensor]:
    run = _settings(precision, accumulation, sync, **changes)
    model = _model(run)
    if twist.startswith("unused"):
        _add_unused(model, on_rank=1 if twist == "unused on one rank" else None)
    if twist == "frozen":
        model.text.requires_grad_(False)
    engine = ClapEngine(run, model, DEVICE)
    batches = _batches(run)
    for _ in range(num_steps):
        engine.step(batches, TIMER)
    return [parameter.detach().float() for parameter in engine.model.parameters()]


def _largest_difference(precision: str, accumulation: int, changes: dict[str, Any], twist: str) -> float:
    overlapped, plain = (
        _weights_after(4, sync, precision, accumulation, changes, twist) for sync in ("overlapped", "deepspeed")
    )
    return max(float((a - b).abs().max()) for a, b in zip(overlapped, plain, strict=True))


CASES: dict[str, tuple[str, int, dict[str, Any], str]] = {
    "clipping": ("bf16", 1, {"gradient_clipping": 0.01}, ""),
    "clipping in fp32, accumulated": ("fp32", 2, {"gradient_clipping": 0.01}, ""),
    "bf16 on the wire of fp32 gradients": ("autocast", 1, {"communication_data_type": "bf16"}, ""),
    "fp32 on the wire of bf16 gradients": ("bf16", 1, {"communication_data_type": "fp32"}, ""),
    "divided before the sum": ("fp32", 2, {"prescale_gradients": True}, ""),
    "divided before and after": ("fp32", 1, {"gradient_predivide_factor": 4.0}, ""),
    "sum": ("fp32", 1, {"gradient_allreduce_op": "sum"}, ""),
    "unused parameter": ("bf16", 2, {}, "unused"),
    "parameter unused on one rank": ("fp32", 1, {}, "unused on one rank"),
    "frozen tower": ("bf16", 1, {}, "frozen"),
}


@pytest.mark.parametrize("name", CASES)
def test_same_weights_as_deepspeeds_own_reduction(two_ranks: RankPool, name: str) -> None:
    # Exactly: the engine is the same otherwise, a sum of two has one order, and every factor here is a power of two.
    assert two_ranks.run(_largest_difference, *CASES[name]) == [0.0, 0.0]


def _order_of_events(sync: str) -> list[str]:
    """What happens in one step after the first two: gradients getting ready ("ready"), all-reduces ("send")."""
    run = _settings("fp32", 1, sync)
    engine = ClapEngine(run, _model(run), DEVICE)
    batches = _batches(run)
    for _ in range(2):
        engine.step(batches, TIMER)
    events: list[str] = []
    hooks = [p.register_post_accumulate_grad_hook(lambda _: events.append("ready")) for p in engine.model.parameters()]
    all_reduce = dist.all_reduce

    def noted(*args: Any, **kwargs: Any) -> Any:
        events.append("send")
        return all_reduce(*args, **kwargs)

    dist.all_reduce = noted
    try:
        engine.step(batches, TIMER)
    finally:
        dist.all_reduce = all_reduce
        for hook in hooks:
            hook.remove()
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
    run = _settings("fp32", 1, clap={"gradient_sync": sync, "train": {"accumulation": accumulation}})
    engine = ClapEngine(run, _model(run), DEVICE)
    batches, found = _batches(run), []

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
        for off in (True, False, True):  # in the very first step, too, which attaches the reducer
            note(engine.step, batches, off=off)
        note(engine.accumulate, batches, off=True)
        note(engine.forward_backward, next(batches), off=True)
        engine.deepspeed.zero_grad()
        note(engine.step, batches, off=False)
    return found


@pytest.mark.parametrize("accumulation", ["independent", "cached"])
@pytest.mark.parametrize("sync", ["overlapped", "deepspeed"])
def test_gradients_travel_once_a_step_and_never_where_they_are_off(
    two_ranks: RankPool, sync: str, accumulation: str
) -> None:
    assert two_ranks.run(_sent, sync, accumulation) == [[0, 1, 0, 0, 0, 1] * 2] * 2
