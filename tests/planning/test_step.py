"""A recorded step against the engine's settings: what is resident, what recomputation, packing and accumulation change."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from clap_ds.config.errors import UserError
from clap_ds.config.model import load_preset
from clap_ds.config.settings import RunSettings, load_run
from clap_ds.flop_count.analytic import TextLengths, forward_components, recomputed_flops
from clap_ds.planning.step import Step, caption_lengths, check_plannable, trace_loss, trace_step

WriteRun = Callable[..., Path]
_traced: dict[str, Step] = {}


@pytest.fixture
def traced(write_run: WriteRun) -> Callable[..., Step]:
    """A step of the micro preset with such changes, recorded once."""

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
    number, few = step.num_parameters, 400_000
    buffers = _at_peak(traced(bf16={"enabled": False}), "weights") - 4 * number
    assert 0 < buffers < few
    # bf16: 2 bytes a weight; master and two moments of 4.
    assert _at_peak(step, "weights") == pytest.approx(2 * number + buffers, rel=0.01)
    assert _at_peak(step, "optimizer state") == pytest.approx(12 * number, rel=0.001)
    full = traced(bf16={"enabled": False}, torch_autocast={"enabled": True, "dtype": "bfloat16"})
    assert _at_peak(full, "optimizer state") == pytest.approx(8 * number, rel=0.001)
    averaged = traced(clap={"train": {"ema": 0.9}})
    assert _at_peak(averaged, "optimizer state") == pytest.approx(16 * number, rel=0.001)
    samples, ids_and_mask = 8 * 48000, 2 * 8 * 16 * 8
    # One in use and one ahead in float32, and what another one comes in.
    assert _at_peak(step, "batches") == samples * (4 + 4 + 2) + 2 * ids_and_mask
    kept = traced(clap={"data": {"source": "synthetic", "placement": "device", "num_batches": 3}})
    assert _at_peak(kept, "batches") == samples * (3 * 2 + 4) + 3 * ids_and_mask


def test_several_ranks_keep_all_gradients_and_gather_features(traced: Callable[..., Step]) -> None:
    alone, among = traced(), traced(world_size=16)
    assert _at_peak(among, "gradients") == pytest.approx(2 * alone.num_parameters, rel=0.01)
    assert _at_peak(alone, "gradients") < _at_peak(among, "gradients")
    sent = [op.name for op in among.recorded.operations if op.is_collective]
    assert sent.count("c10d._allgather_base_") == 3  # features of both towers, and sums
    assert set(sent) == {"c10d._allgather_base_", "c10d.allreduce_"}
    assert not any(op.is_collective for op in alone.recorded.operations)


def test_recomputation_trades_memory_for_the_closed_forms_flops(traced: Callable[..., Step]) -> None:
    config = load_preset("demo")
    model: dict[str, Any] = {"preset": "demo", "mlp": "torch"}  # of which the last product isn't computed again
    plain, again = (
        traced(clap={"model": {**model, "checkpoint_activations": towers}}) for towers in ([], ["audio", "text"])
    )
    more = again.recorded.total("flops") - plain.recorded.total("flops")
    assert more == pytest.approx(8 * recomputed_flops(config, TextLengths.fixed(16), ("audio", "text"), drop_path=0.1))
    assert _at_peak(again, "audio") < 0.7 * _at_peak(plain, "audio")


def test_packed_captions_cost_their_own_lengths(traced: Callable[..., Step]) -> None:
    lengths: dict[str, Any] = {"source": "synthetic", "caption_lengths": {"4": 3, "16": 1}}
    padded, packed = (traced(clap={"text": text, "data": lengths}) for text in ("padded", "packed"))
    forward = forward_components(load_preset("micro"), TextLengths.of([4, 4, 4, 16]), "model")
    found = packed.recorded.total("flops", part="text", backward=False)
    assert found == pytest.approx(8 * forward["text_tower"], rel=0.02)  # rows are filled up
    assert any(op.name == "torch_attn._varlen_attn_backward" for op in packed.recorded.operations)
    assert found < padded.recorded.total("flops", part="text", backward=False) / 1.5


def test_captions_as_many_of_each_length_as_the_histogram_expects(write_run: WriteRun) -> None:
    data = {"source": "synthetic", "caption_lengths": {"16": 1, "4": 3}}
    assert caption_lengths(load_run(write_run(clap={"data": data})), 8) == [4] * 6 + [16] * 2
    assert caption_lengths(load_run(write_run()), 3) == [16] * 3


def test_cached_accumulation_holds_its_batches_and_goes_forward_twice(traced: Callable[..., Step]) -> None:
    plain = traced(gradient_accumulation_steps=3)
    cached = traced(gradient_accumulation_steps=3, clap={"train": {"accumulation": "cached"}})
    assert (plain.num_samples, cached.num_samples) == (24, 24)
    assert _at_peak(cached, "batches") - _at_peak(plain, "batches") == 2 * (8 * 48000 * 4 + 2 * 8 * 16 * 8)

    def forward_flops(step: Step) -> float:
        audio = (op for op in step.recorded.operations if op.part == "audio" and not op.backward)
        return sum(step.times(op) * op.flops for op in audio)

    assert forward_flops(cached) == 2 * forward_flops(plain) == 2 * 3 * forward_flops(traced())
    loss = next(op for op in cached.recorded.operations if op.part == "loss" and op.flops)
    assert loss.flops == 2 * 24 * 24 * 32  # over the whole batch
    update = next(op for op in plain.recorded.operations if op.part == "optimizer")
    assert (cached.times(loss), plain.times(loss), plain.times(update)) == (1, 1.5, 1)  # two were recorded of three


def test_a_loss_of_more_ranks_takes_more(write_run: WriteRun) -> None:
    run = load_run(write_run())
    few, many = (trace_loss(run, 8, ranks) for ranks in (2, 64))
    assert many.peak_bytes - few.peak_bytes >= 2 * 62 * 8 * 32 * 2  # features of both towers, in bf16
    gathered = [sum(size for _, size in op.written) for op in many.operations if op.is_collective]
    assert gathered == [64 * 8 * 32 * 2, 64 * 8 * 32 * 2, 64 * 8 * 2 * 4]
    # Log-sum-exps, similarities again and gradients: three products with all features for each tower.
    assert many.total("flops") == 6 * 2 * 8 * 64 * 8 * 32
    assert {(op.name, op.dtype) for op in many.operations if op.flops} == {("aten.mm", torch.bfloat16)}  # of the inputs
    sigmoid = trace_loss(load_run(write_run(clap={"loss": {"kind": "sigmoid"}})), 8, 4)
    assert sum(op.name == "c10d.send" for op in sigmoid.operations) == 3
    assert not torch.distributed.is_initialized()  # nothing of it stays
    assert not torch.empty(1).is_cuda


def test_another_optimizer_is_refused(write_run: WriteRun) -> None:
    run = load_run(write_run())
    with pytest.raises(UserError, match="'Lion'"):
        check_plannable(RunSettings(run.path, run.clap, run.deepspeed | {"optimizer": {"type": "Lion"}}))
