"""The configuration's own `flops_profiler` section in a bench run: DeepSpeed's profiler over one forward pass of the engine.

DeepSpeed would profile a step in the middle of the run and, for that, time every step's phases, synchronising each. So the
section is kept from the engine, and the same profiler runs here on a pass of its own, after everything timed. Its fields
mean what they mean to DeepSpeed; `profile_step` is the earliest step.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.profiling.config import DeepSpeedFlopsProfilerConfig
from deepspeed.profiling.flops_profiler import FlopsProfiler

from clap_ds.data.batch import Batch
from clap_ds.engine.session import Session
from clap_ds.flop_count.analytic import TextLengths, forward_flops, published_flops, recomputed_flops
from clap_ds.flop_count.counters import Count, profile_by_deepspeed
from clap_ds.native.convert import reverted
from clap_ds.record.clock import PhaseTimer

REPORT = "flops_profile.txt"
LARGEST_DISAGREEMENT_PERCENT = 0.5
LENGTH_BATCHES = 4


def executed_lengths(session: Session) -> TextLengths:
    """Caption lengths as the text tower works them off: all `text_tokens` where they are padded; where they are packed, the
    real ones of `LENGTH_BATCHES` more micro-batches of every rank. A collective."""
    if session.run.clap.text == "padded":
        return TextLengths.fixed(session.run.clap.text_tokens)
    own = torch.cat([next(session.batches).attention_mask.sum(dim=1) for _ in range(LENGTH_BATCHES)])
    everyone = [torch.empty_like(own) for _ in range(session.ranks.world_size)]
    dist.all_gather(everyone, own)
    return TextLengths.of(torch.cat(everyone).tolist())


def measure_flops(session: Session) -> tuple[dict[str, Any], list[str]]:
    """The summary's `flops` section, in GFLOPs per sample, and warnings. A collective where the profiler is on.

    Writes DeepSpeed's report to `flops_profile.txt` in the run directory (and to `output_file`, if that is set).
    """
    config, lengths = session.run.clap.preset(), executed_lengths(session)
    found: dict[str, Any] = {
        "published_gflops": published_flops(config) / 1e9,
        "model_gflops": forward_flops(config, lengths, "model") / 1e9,
        "recomputed_gflops": recomputed_flops(config, lengths, session.run.clap.model.checkpoint_activations) / 1e9,
        "mean_text_tokens": lengths.mean,
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
    batch = next(session.batches)
    count = _profile_one_forward(session, section, batch)
    if count is None:
        return found, []
    if session.run.clap.text == "packed":
        lengths = TextLengths.of(batch.attention_mask.sum(dim=1).tolist())
    num_samples = session.run.micro_batch
    found |= {
        "deepspeed_gflops": count.total / num_samples / 1e9,
        "deepspeed_unseen_gflops": {name: flops / num_samples / 1e9 for name, flops in count.unseen.items()},
        "report": REPORT,
    }
    return found, disagreement_warnings(found["deepspeed_gflops"], forward_flops(config, lengths, "model") / 1e9)


def disagreement_warnings(deepspeed_gflops: float, model_gflops: float) -> list[str]:
    """A warning if DeepSpeed's figure and the closed form are more than 0.5 % apart."""
    percent = 100 * abs(deepspeed_gflops / model_gflops - 1)
    if percent <= LARGEST_DISAGREEMENT_PERCENT:
        return []
    return [
        f"DeepSpeed's profiler counts {deepspeed_gflops:.4f} GFLOPs a sample, the closed form {model_gflops:.4f}:"
        f" {percent:.2f} % apart, so the MFU by the model's FLOPs is in doubt"
    ]


def _profile_one_forward(session: Session, section: DeepSpeedFlopsProfilerConfig, batch: Batch) -> Count | None:
    """One micro-batch forward and backward on every rank, its gradients thrown away; profiled on rank 0."""
    engine = session.engine
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

    with reverted(engine.model):  # DeepSpeed counts torch's operations
        return profile_by_deepspeed(profiler, forward, report)
