"""What a bench run says of its FLOPs: the closed form and, with a `flops_profiler` section, DeepSpeed's profiler.

DeepSpeed would profile a step in the middle of the run and, for that, time every step's phases, synchronising each. So the
section is kept from the engine, and the same profiler watches one forward pass of a model of the same sizes, after everything
timed. (The engine's own may run by kernels that no counter knows.) The section's fields mean what they mean to DeepSpeed;
`profile_step` is the earliest step.
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
from clap_ds.dist.agreement import gather_tensor
from clap_ds.engine.session import Session
from clap_ds.flop_count.analytic import TextLengths, forward_flops, published_flops, recomputed_flops
from clap_ds.flop_count.counters import Count, profile_by_deepspeed
from clap_ds.model.clap import ClapModel

REPORT = "flops_profile.txt"
LARGEST_DISAGREEMENT_PERCENT = 0.5
LENGTH_BATCHES = 4


def measure_flops(session: Session) -> tuple[dict[str, Any], list[str]]:
    """The summary's `flops` section, in GFLOPs per sample, and warnings. A collective.

    Writes DeepSpeed's report to `flops_profile.txt` in the run directory (and to `output_file`, if that is set).
    """
    run, config, lengths = session.run, session.run.clap.preset(), _executed_lengths(session)
    batch = next(session.batches)
    front_end = batch.audio.ndim == 2  # features of mel shards have been through it
    found: dict[str, Any] = {
        "published_gflops": published_flops(config, front_end=front_end) / 1e9,
        "model_gflops": forward_flops(config, lengths, "model", front_end=front_end) / 1e9,
        "recomputed_gflops": recomputed_flops(config, lengths, run.clap.model.checkpoint_activations) / 1e9,
        "mean_text_tokens": lengths.mean,
        "deepspeed_gflops": None,
    }
    section = DeepSpeedFlopsProfilerConfig(run.deepspeed)
    if not section.enabled:
        return found, []
    if session.engine.steps < section.profile_step:
        late = f"flops_profiler.profile_step is {section.profile_step}, the run has {session.engine.steps} steps"
        return found, [f"{late}: not profiled"]
    warnings: list[str] = []
    if session.ranks.is_first:
        count = _profile(session, section, batch)
        if run.clap.text == "packed":
            lengths = TextLengths.of(batch.attention_mask.sum(dim=1).tolist())
        unseen = {name: flops / len(batch) / 1e9 for name, flops in count.unseen.items()}
        gflops = count.total / len(batch) / 1e9
        found |= {"deepspeed_gflops": gflops, "deepspeed_unseen_gflops": unseen, "report": REPORT}
        warnings = disagreement_warnings(gflops, forward_flops(config, lengths, "model", front_end=front_end) / 1e9)
    dist.barrier()
    return found, warnings


def disagreement_warnings(deepspeed_gflops: float, model_gflops: float) -> list[str]:
    """A warning if DeepSpeed's figure and the closed form are more than 0.5 % apart."""
    percent = 100 * abs(deepspeed_gflops / model_gflops - 1)
    if percent <= LARGEST_DISAGREEMENT_PERCENT:
        return []
    return [
        f"DeepSpeed's profiler counts {deepspeed_gflops:.4f} GFLOPs a sample, the closed form {model_gflops:.4f}:"
        f" {percent:.2f} % apart, so the MFU by the model's FLOPs is in doubt"
    ]


def _executed_lengths(session: Session) -> TextLengths:
    """Caption lengths as the text tower works them off: all `text_tokens` where they are padded; where they are packed, the
    real ones of `LENGTH_BATCHES` more micro-batches of every rank. A collective."""
    if session.run.clap.text == "padded":
        return TextLengths.fixed(session.run.clap.text_tokens)
    own = torch.cat([next(session.batches).attention_mask.sum(dim=1) for _ in range(LENGTH_BATCHES)])
    return TextLengths.of(gather_tensor(own).flatten().tolist())


def _profile(session: Session, section: DeepSpeedFlopsProfilerConfig, batch: Batch) -> Count:
    """One micro-batch through a fresh model, in the dtype of the engine's."""
    attention, device = session.run.clap.model.attention, session.device
    model = ClapModel(session.run.clap.preset(), attention=attention, device=device).eval()
    model.requires_grad_(False).to(device, session.engine.model.audio.norm.weight.dtype)
    # With an engine whose phases are timed the report would divide by times of a whole step, which this pass isn't.
    shown = None if session.engine.deepspeed.wall_clock_breakdown() else session.engine.deepspeed
    profiler = FlopsProfiler(model, shown, section.recompute_fwd_factor)

    def report() -> None:
        path = session.record.path / REPORT
        wanted = {name: getattr(section, name) for name in ("module_depth", "top_modules", "detailed")}
        profiler.print_model_profile(profile_step=session.engine.steps, output_file=str(path), **wanted)
        if section.output_file:
            Path(section.output_file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, section.output_file)

    return profile_by_deepspeed(profiler, lambda: model(*batch.model_inputs()), report)
