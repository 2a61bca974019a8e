"""What a bench run says of its FLOPs: the closed form and, with a `flops_profiler` section, DeepSpeed's profiler.

DeepSpeed would profile a step in the middle of the run and, for that, time every step's phases, synchronising each. So the
engine is built without the section, and given it for one more step after everything timed: its own profiler on its own module,
in training, which prints and keeps its report. The section's fields mean what they mean to DeepSpeed, but for `output_file`;
`profile_step` is the earliest step. What stands in the way are kernels that the profiler doesn't know: this project's for CPUs
make way for torch's in that step; Triton's stay, as torch's would take memory that there may not be, and are named; compiled
towers aren't profiled.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from deepspeed.profiling.config import DeepSpeedFlopsProfilerConfig
from deepspeed.profiling.flops_profiler import FlopsProfiler
from deepspeed.runtime.engine import EngineTimers
from torch import nn

from clap_ds.data.batch import Batch
from clap_ds.engine.compiled import what_to_compile
from clap_ds.engine.session import Session
from clap_ds.flop_count.analytic import TextLengths, backward_flops, forward_flops, published_flops, recomputed_flops
from clap_ds.flop_count.counters import Count, unseen_by_deepspeed
from clap_ds.model.swin import Mlp, WindowAttention
from clap_ds.native.convert import reverted
from clap_ds.ranks.agreement import gather_tensor
from clap_ds.record.clock import PhaseTimer

REPORT = "flops_profile.txt"
LARGEST_DISAGREEMENT_PERCENT = 0.5
LENGTH_BATCHES = 4


def measure_flops(session: Session) -> tuple[dict[str, Any], list[str]]:
    """The summary's `flops` section, in GFLOPs per sample, and warnings. A collective.

    DeepSpeed's report is `flops_profile.txt` in the run directory.
    """
    run, config, lengths = session.run, session.run.clap.preset(), _executed_lengths(session)
    batch = next(session.batches)
    front_end = batch.audio.ndim == 2  # features of mel shards have been through it
    model, last = session.engine.model, run.clap.train.train_last
    trained = [name for name in ("audio", "text") if _is_trained(model.get_submodule(f"{name}_projection"))]
    forward = forward_flops(config, lengths, "model", front_end=front_end)
    checkpointed = [tower for tower in run.clap.model.checkpoint_activations if tower in trained]
    recomputed = recomputed_flops(config, lengths, checkpointed, drop_path=run.clap.model.drop_path, last=last)
    recomputed += forward if run.clap.train.accumulation == "cached" else 0.0
    found: dict[str, Any] = {
        "published_gflops": published_flops(config, front_end=front_end) / 1e9,
        "model_gflops": forward / 1e9,
        "training_gflops": (forward + backward_flops(config, lengths, trained=trained, last=last)) / 1e9,
        "recomputed_gflops": recomputed / 1e9,
        "mean_text_tokens": lengths.mean,
        "deepspeed_gflops": None,
    }
    section = DeepSpeedFlopsProfilerConfig(run.deepspeed)
    if not section.enabled:
        return found, []
    if session.engine.steps < section.profile_step:
        late = f"flops_profiler.profile_step is {section.profile_step}, the run has {session.engine.steps} steps"
        return found, [f"{late}: not profiled"]
    if (what := what_to_compile(run.clap.compile, session.device)) != "off":
        return found, [f"flops_profiler: clap.compile {what!r} hides operations from it: not profiled"]
    count, batch = _profile(session, section)
    if count is None:
        return found, []
    if run.clap.text == "packed":
        lengths = TextLengths.of(batch.attention_mask.sum(dim=1).tolist())
    unseen = {name: flops / len(batch) / 1e9 for name, flops in count.unseen.items()}
    gflops = count.total / len(batch) / 1e9
    found |= {"deepspeed_gflops": gflops, "deepspeed_unseen_gflops": unseen, "report": REPORT}
    if kernels := unknown_kernels(session.engine.model):
        unknown = f"DeepSpeed's profiler doesn't know these kernels and leaves them out: {', '.join(kernels)}"
        return found, [unknown]
    return found, disagreement_warnings(gflops, forward_flops(config, lengths, "model", front_end=front_end) / 1e9)


def unknown_kernels(model: nn.Module) -> list[str]:
    """Triton kernels that a model runs by, as settings name them."""
    fields = {WindowAttention: "clap.model.attention", Mlp: "clap.model.mlp"}
    parts = ((fields.get(type(part)), getattr(part, "kernel", None)) for part in model.modules())
    return sorted({f"{field} 'triton'" for field, kernel in parts if field and kernel == "triton"})


def _is_trained(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


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


class _Profiler(FlopsProfiler):
    """DeepSpeed's, with what it can't see counted beside it, and what it told kept: the engine ends it with the step."""

    def start_profile(self, ignore_list: Any = None) -> None:
        self._beside = ExitStack()
        self._unseen = self._beside.enter_context(unseen_by_deepspeed())
        super().start_profile(ignore_list)

    def stop_profile(self) -> None:
        super().stop_profile()
        self._beside.close()

    def print_model_profile(self, *args: Any, **kwargs: Any) -> None:
        self.model.__duration__ = 0  # the engine begins inside the root's forward pass: its own start wasn't noted
        super().print_model_profile(*args, **kwargs)
        self.count = Count(2.0 * self.macs, dict(self._unseen))


def _profile(session: Session, section: DeepSpeedFlopsProfilerConfig) -> tuple[Count | None, Batch]:
    """One more step, by the engine's own profiler on rank 0; and the last micro-batch, which is what was counted."""
    engine, path = session.engine.deepspeed, session.record.path / REPORT
    asked = session.run.deepspeed["flops_profiler"]
    wanted = DeepSpeedFlopsProfilerConfig(
        {"flops_profiler": {**asked, "profile_step": engine.global_steps, "output_file": str(path)}}
    )
    engine.flops_profiler = _Profiler(engine.module, engine, section.recompute_fwd_factor)
    before = engine._config.flops_profiler_config, engine._config.wall_clock_breakdown, engine.engine_timers
    engine._config.flops_profiler_config = wanted
    engine._config.wall_clock_breakdown = True  # as the section has it
    engine.engine_timers = EngineTimers(enable_micro_timers=True, enable_global_timers=True)
    batches = [next(session.batches) for _ in range(session.run.gradient_accumulation_steps)]
    with reverted(session.engine.model):
        session.engine.step(iter(batches), PhaseTimer(session.device, instrumented=False))
    engine._config.flops_profiler_config, engine._config.wall_clock_breakdown, engine.engine_timers = before
    if not session.ranks.is_first:
        return None, batches[-1]
    print(path.read_text(), flush=True)
    return engine.flops_profiler.count, batches[-1]
