"""A planned step's memory against what the CPU's allocator holds in one of the engine, by torch's profiler."""

import gc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from clap_ds.config.settings import ClapSettings, RunSettings
from clap_ds.data.sources import build_batches
from clap_ds.engine.building import build_model
from clap_ds.engine.engine import ClapEngine
from clap_ds.planning.step import trace_step
from clap_ds.record.clock import PhaseTimer
from tests.rank_pool import RankPool

CPU = torch.device("cpu")
AUTOCAST = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
RECOMPUTED = {"model": {"preset": "demo", "attention": "matmul", "checkpoint_activations": ["audio", "text"]}}
CASES = {
    "recomputed": (16, 64, RECOMPUTED, AUTOCAST),
    "packed": (16, 64, {"model": {"preset": "demo", "attention": "matmul"}, "text": "packed"}, {"bf16": {"enabled": True}}),
}  # fmt: skip


def _run(case: str) -> RunSettings:
    """Of one batch that is on the device already, with all dropout as in training."""
    micro_batch, tokens, clap, precision = CASES[case]
    lengths = {str(tokens): 1.0, str(tokens // 4): 3.0} if clap.get("text") == "packed" else None
    data = {"source": "synthetic", "placement": "device", "num_batches": 1, "caption_lengths": lengths}
    settings = ClapSettings.model_validate({"text_tokens": tokens, "cpu_kernels": "off", "data": data, **clap})
    optimizer = {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.1}}
    config = {"train_micro_batch_size_per_gpu": micro_batch, "gradient_clipping": 0.0, "optimizer": optimizer}
    return RunSettings(Path("run.json"), settings, config | precision | {"log_level": "error"})


def _second_step(run: RunSettings) -> Callable[[], object]:
    """The engine's own step on one batch, once it has taken the first."""
    engine = ClapEngine(run, build_model(run, CPU), CPU)
    batches = build_batches(
        run.clap.data, model=run.clap.preset(), text_tokens=run.clap.text_tokens, micro_batch=run.micro_batch, rank=0,
        world_size=1, seed=0, device=CPU, pack_captions=run.clap.text == "packed",
    )  # fmt: skip
    step = partial(engine.step, batches, PhaseTimer(CPU, instrumented=False))
    step()
    return step


def _allocated(case: str) -> int:
    """Most bytes that the CPU's allocator holds while the step runs, of all allocated since before the engine was built."""
    gc.collect()  # what earlier ones left would be freed, and counted, in between
    # oneDNN's products with AMX copy weights to a layout of its own, in memory that a plan of another machine can't know.
    with (
        torch.backends.mkldnn.flags(enabled=False),
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler,
    ):
        step = _second_step(_run(case))
        gc.collect()
        with record_function("measured"):
            step()
    results: Any = profiler.profiler and profiler.profiler.kineto_results
    events = sorted(results.events(), key=lambda event: event.start_ns())
    (window,) = [event for event in events if event.name() == "measured"]
    live = peak = 0
    for event in events:
        live += event.nbytes() if event.name() == "[memory]" else 0
        if window.start_ns() <= event.start_ns() <= window.end_ns():
            peak = max(peak, live)
    return peak


@pytest.mark.parametrize("case", CASES)
def test_a_steps_planned_memory_is_the_allocators(one_rank: RankPool, case: str) -> None:
    (allocated,) = one_rank.run(_allocated, case)
    planned = trace_step(_run(case), CASES[case][0], cuda=False).recorded.peak_bytes
    assert planned == pytest.approx(allocated, rel=0.005)
