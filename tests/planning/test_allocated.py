"""Test a planned step's memory against the CPU allocator's in a real step, measured with torch's
profiler."""

import gc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from clap_ds.config.settings import ClapSettings, RunSettings
from clap_ds.data.dataloader import build_batches
from clap_ds.engine.factory import build_model
from clap_ds.planning.step import trace_step
from tests.training.reference_steps import engine_of

CPU = torch.device("cpu")
PRECISION = {
    "autocast": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
    "bf16": {"bf16": {"enabled": True}},
}


def make_run(precision: str) -> RunSettings:
    """Return a run with one batch on the device and dropout; with autocast, the towers are
    recomputed."""
    model: dict[str, Any] = {"preset": "demo", "attention_impl": "matmul"}
    if precision == "autocast":
        model["activation_checkpointing"] = ["audio", "text"]
    data = {"source": "synthetic", "placement": "device", "num_batches": 1}
    clap = {"context_length": 64, "cpu_kernels": "off", "data": data, "model": model}
    config = {
        "train_micro_batch_size_per_gpu": 16,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.1}},
        "log_level": "error",
        **PRECISION[precision],
    }
    return RunSettings(Path("run.json"), ClapSettings.model_validate(clap), config)


def second_step(run: RunSettings) -> Callable[[], object]:
    """Return the engine's step on one batch, after the first step."""
    engine = engine_of(run, build_model(run.clap.model, run.clap.loss, CPU))
    batches = build_batches(
        run.clap.data, model=run.clap.preset(), context_length=run.clap.context_length, micro_batch=run.micro_batch, rank=0,
        world_size=1, seed=0, device=CPU, pack_captions=run.clap.packs_captions,
    )  # fmt: skip
    step = partial(engine.step, batches)
    step()
    return step


def measure_peak(precision: str) -> int:
    """Return the CPU allocator's peak bytes during the step, including all memory of the engine."""
    gc.collect()  # else earlier tests' garbage would be freed, and counted, during the step
    # With AMX, oneDNN copies weights to its own layout, which plans don't include.
    with (
        torch.backends.mkldnn.flags(enabled=False),
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler,
    ):
        step = second_step(make_run(precision))
        gc.collect()
        with record_function("measured"):
            step()
    results: Any = profiler.profiler and profiler.profiler.kineto_results
    events = sorted(results.events(), key=lambda event: event.start_ns())
    (window,) = [event for event in events if event.name() == "measured"]
    live = 0
    peak = 0
    for event in events:
        if event.name() == "[memory]":
            live += event.nbytes()
        if window.start_ns() <= event.start_ns() <= window.end_ns():
            peak = max(peak, live)
    return peak


@pytest.mark.end_to_end  # takes half a minute
@pytest.mark.parametrize("precision", PRECISION)
def test_planned_memory_equals_the_allocators(one_rank, precision):
    (measured,) = one_rank.run(measure_peak, precision)
    planned = trace_step(make_run(precision), 16, cuda=False).recorder.at_peak.total()
    assert planned == pytest.approx(measured, rel=0.005)
