"""The configuration's own `flops_profiler` section in a bench run: DeepSpeed's profiler over one forward pass of the engine.

DeepSpeed would profile a step in the middle of the run and, for that, time every step's phases, synchronising each. So the
section is kept from the engine, and the same profiler runs here on a pass of its own, after everything timed. Its fields
mean what they mean to DeepSpeed; `profile_step` is the earliest step.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from deepspeed.profiling.config import DeepSpeedFlopsProfilerConfig
from deepspeed.profiling.flops_profiler import FlopsProfiler

from clap_ds.measure.clock import PhaseTimer
from clap_ds.measure.flops_analytic import TextLengths, forward_flops, published_flops
from clap_ds.measure.flops_counters import Count, profile_by_deepspeed
from clap_ds.session import Session
from clap_ds.settings import RunSettings

REPORT = "flops_profile.txt"
LARGEST_DISAGREEMENT_PERCENT = 0.5


def model_flops(run: RunSettings) -> float:
    """FLOPs of one sample's forward pass as this run executes it: captions are padded, so all `text_tokens` count."""
    return forward_flops(run.clap.preset(), TextLengths.fixed(run.clap.text_tokens), "model")


def measure_flops(session: Session) -> tuple[dict[str, Any], list[str]]:
    """The summary's `flops` section, in GFLOPs per sample, and warnings. A collective where the profiler is on.

    Writes DeepSpeed's report to `flops_profile.txt` in the run directory (and to `output_file`, if that is set).
    """
    found: dict[str, Any] = {
        "published_gflops": published_flops(session.run.clap.preset()) / 1e9,
        "model_gflops": model_flops(session.run) / 1e9,
        "deepspeed_gflops": None,
    }
    section = DeepSpeedFlopsProfilerConfig(session.run.deepspeed)
    if not section.enabled:
        return found, []
    if session.engine.steps < section.profile_step:
        steps = session.engine.steps
        return found, [
            f"flops_profiler.profile_step is {section.profile_step}, the run has {steps} steps: not profiled"
        ]
    count = _profile_one_forward(session, section)
    if count is None:
        return found, []
    num_samples = session.run.micro_batch
    found |= {
        "deepspeed_gflops": count.total / num_samples / 1e9,
        "deepspeed_unseen_gflops": {name: flops / num_samples / 1e9 for name, flops in count.unseen.items()},
        "report": REPORT,
    }
    return found, disagreement_warnings(found["deepspeed_gflops"], found["model_gflops"])


def disagreement_warnings(deepspeed_gflops: float, model_gflops: float) -> list[str]:
    """A warning if DeepSpeed's figure and the closed form are more than 0.5 % apart."""
    percent = 100 * abs(deepspeed_gflops / model_gflops - 1)
    if percent <= LARGEST_DISAGREEMENT_PERCENT:
        return []
    return [
        f"DeepSpeed's profiler counts {deepspeed_gflops:.4f} GFLOPs a sample, the closed form {model_gflops:.4f}:"
        f" {percent:.2f} % apart, so the MFU by the model's FLOPs is in doubt"
    ]


def _profile_one_forward(session: Session, section: DeepSpeedFlopsProfilerConfig) -> Count | None:
    """One micro-batch forward and backward on every rank, its gradients thrown away; profiled on rank 0."""
    engine = session.engine
    batch = next(session.batches)
    timer = PhaseTimer(session.device, instrumented=False)

    def forward() -> None:
        with engine.sync.off():
            engine.forward_backward(batch, timer)
        engine.deepspeed.zero_grad()

    if not session.ranks.is_first:
        forward()
        return None
    # With an engine whose phases are timed the report would divide by times of a whole step, which this pass isn't.
    shown = None if engine.deepspeed.wall_clock_breakdown() else engine.deepspeed
    profiler = FlopsProfiler(engine.model, shown, section.recompute_fwd_factor)

    def report() -> None:
        path = session.record.path / REPORT
        profiler.print_model_profile(
            profile_step=engine.steps,
            module_depth=section.module_depth,
            top_modules=section.top_modules,
            detailed=section.detailed,
            output_file=str(path),
        )
        if section.output_file:
            Path(section.output_file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, section.output_file)

    return profile_by_deepspeed(profiler, forward, report)
