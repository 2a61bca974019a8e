"""Test a recorded step for settings: resident memory, recomputation, packing and accumulation.

Test the search for a micro-batch with known memory functions, and the sum of memory parts.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from clap_ds.config.model import load_preset
from clap_ds.config.settings import RunSettings, load_run
from clap_ds.flop_count.analytic import TextLengths, forward_components, recomputed_flops
from clap_ds.planning.step import GIB, Step, largest_micro_batch, memory_parts, trace_step
from clap_ds.planning.tracing import Operation, Recorded
from clap_ds.utils.errors import UserError
from tests.planning.test_tracing import flops

WriteRun = Callable[..., Path]
_traced: dict[str, Step] = {}


@pytest.fixture
def traced(write_run: WriteRun) -> Callable[..., Step]:
    """Return a function that records a step of the micro preset with changes, cached."""

    def trace(world_size: int = 1, **changes: Any) -> Step:
        key = json.dumps([world_size, changes])
        if key not in _traced:
            _traced[key] = trace_step(load_run(write_run(**changes)), 8, world_size=world_size)
        return _traced[key]

    return trace


def _at_peak(step: Step, part: str) -> int:
    return step.recorded.at_peak.get(part, 0)


def test_what_is_resident_in_each_precision(traced: Callable[..., Step]) -> None:
    step = traced()
    number = step.num_parameters
    # bf16: 2 bytes per weight; master and two moments of 4.
    full_weights = _at_peak(traced(bf16={"enabled": False}), "weights")
    assert full_weights - _at_peak(step, "weights") == pytest.approx(2 * number, rel=0.01)
    assert _at_peak(step, "optimizer state") == pytest.approx(12 * number, rel=0.001)
    full = traced(bf16={"enabled": False}, torch_autocast={"enabled": True, "dtype": "bfloat16"})
    assert _at_peak(full, "optimizer state") == pytest.approx(8 * number, rel=0.001)
    averaged = traced(clap={"train": {"ema_decay": 0.9}})
    assert _at_peak(averaged, "optimizer state") == pytest.approx(16 * number, rel=0.001)
    samples = 8 * 48000
    ids_and_mask = 2 * 8 * 16 * 8
    # One in use and one ahead, as int16.
    assert _at_peak(step, "batches") == samples * (2 + 2) + 2 * ids_and_mask


def test_recomputation_trades_memory_for_the_closed_forms_flops(
    traced: Callable[..., Step],
) -> None:
    config = load_preset("demo")
    model: dict[str, Any] = {
        "preset": "demo",
        "mlp_impl": "torch",
    }  # its last product isn't recomputed
    plain, again = (
        traced(clap={"model": {**model, "activation_checkpointing": towers}})
        for towers in ([], ["audio", "text"])
    )
    more = flops(again.recorded) - flops(plain.recorded)
    assert more == pytest.approx(
        8 * recomputed_flops(config, TextLengths.fixed(16), ("audio", "text"), drop_path=0.1)
    )
    assert _at_peak(again, "audio") < 0.7 * _at_peak(plain, "audio")


@pytest.mark.parametrize(("compiled", "stored"), [("auto", 0), ("off", 5)])
def test_compiled_towers_store_no_dropout_masks(
    traced: Callable[..., Step], compiled: str, stored: int
) -> None:
    """Check the embeddings' mask and two of each layer."""
    step = traced(clap={"compile": compiled, "model": {"preset": "micro"}})
    assert sum(each.name == "aten.native_dropout" for each in step.recorded.operations) == stored


def test_packed_captions_cost_their_mean_length(traced: Callable[..., Step]) -> None:
    lengths: dict[str, Any] = {"source": "synthetic", "caption_lengths": {"4": 3, "16": 1}}
    for packed, length in ((True, 7), (False, 16)):
        step = traced(clap={"text_packing": packed, "data": lengths})
        forward = forward_components(load_preset("micro"), TextLengths.fixed(length), "model")
        assert flops(step.recorded, part="text", backward=False) == 8 * forward["text_tower"]


def test_cached_accumulation_holds_its_batches_and_goes_forward_twice(
    traced: Callable[..., Step],
) -> None:
    plain = traced(gradient_accumulation_steps=3)
    cached = traced(gradient_accumulation_steps=3, clap={"train": {"accumulation": "gradcache"}})
    assert (plain.num_samples, cached.num_samples) == (24, 24)
    assert _at_peak(cached, "batches") - _at_peak(plain, "batches") == 2 * (
        8 * 48000 * 2 + 2 * 8 * 16 * 8
    )

    def forward_flops(step: Step) -> float:
        work = step.work()
        return sum(times * op.flops for op, times in work if op.part == "audio" and not op.backward)

    assert forward_flops(cached) == 2 * forward_flops(plain) == 2 * 3 * forward_flops(traced())
    loss = next(op for op in cached.recorded.operations if op.part == "loss" and op.flops)
    assert loss.flops == 2 * 24 * 24 * 32  # over the whole batch
    times = [{op.part: times for op, times in step.work()} for step in (plain, cached)]
    assert (times[1]["loss"], times[0]["loss"], times[0]["optimizer"]) == (
        1,
        1.5,
        1,
    )  # two were recorded of three
    fused = [Operation("fused", "audio", backward, 0, 1) for backward in (False, True)]
    repetitions = [
        [times for op, times in step.work(fused) if op in fused] for step in (plain, cached)
    ]
    assert repetitions == [[3, 3], [6, 3]]


def test_a_loss_of_more_ranks_takes_more(traced: Callable[..., Step]) -> None:
    alone = traced()
    among = traced(world_size=64)
    buckets = _at_peak(among, "gradients") - _at_peak(alone, "gradients")
    assert buckets == pytest.approx(2 * alone.num_parameters, rel=0.01)
    many = among.recorded.operations
    # Log-sum-exps, recomputed similarities and gradients: three products with all features per
    # tower.
    products = [op for op in many if op.part == "loss" and op.flops]
    assert sum(op.flops for op in products) == 6 * 2 * 8 * 64 * 8 * 32
    assert {(op.name, op.dtype) for op in products} == {
        ("aten.mm", torch.bfloat16)
    }  # the inputs' dtype
    assert not torch.distributed.is_initialized()  # the group is destroyed
    assert not torch.empty(1).is_cuda


def test_another_optimizer_is_refused(write_run: WriteRun) -> None:
    run = load_run(write_run())
    with pytest.raises(UserError, match="'Lion'"):
        trace_step(
            RunSettings(run.path, run.clap, run.deepspeed | {"optimizer": {"type": "Lion"}}), 8
        )


@pytest.mark.parametrize(
    ("peak_gib", "start", "limit", "expected"),
    [(lambda size: 2 + size * 0.1015625, start, 80, 768) for start in (616, 8, 771, 2000)]
    + [
        (lambda size: 2 + size * 0.1015625, 616, limit, found)
        for limit, found in ((3, 8), (2.5, None))
    ]
    + [
        (lambda size: max(40.0, 0.1 * size), start, 60, 600) for start in (256, 8)
    ]  # below 400 something else is larger
    + [(lambda size: 0.1 * size + 1e-5 * size**2, 64, 80, 744)],
)
def test_largest_micro_batch(
    peak_gib: Callable[[int], float], start: int, limit: float, expected: int | None
) -> None:
    tried: list[int] = []
    assert (
        largest_micro_batch(lambda size: tried.append(size) or peak_gib(size), start, limit)
        == expected
    )
    assert len(tried) <= 7  # each takes a while


def test_parts_of_memory_add_up() -> None:
    recorded = Recorded()
    recorded.at_peak.update({"audio": 4 * GIB, "weights": GIB})
    step = Step(recorded, 1, 1, (1, 1), 100)
    parts = memory_parts(step, 2)
    assert (parts["audio activations"], parts["weights"]) == (4, 1)
    assert sum(parts.values()) == pytest.approx(
        5 * 1.016 + 0.7 + 0.8
    )  # as docs/estimation.md has them
    assert list(parts.values()) == sorted(parts.values(), reverse=True)
    assert sum(memory_parts(step, 1).values()) == pytest.approx(
        5 * 1.016 + 0.7
    )  # one rank has no NCCL buffers
