"""Count a benchmark's FLOPs in closed form and, with a `flops_profiler` section, with DeepSpeed's profiler.

The profiler would synchronize every step, so the engine enables it only for one extra step after timing. That step has
a few clips and runs uncompiled, with torch's operations only.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from deepspeed.profiling.config import DeepSpeedFlopsProfilerConfig
from deepspeed.profiling.flops_profiler import FlopsProfiler
from deepspeed.runtime.engine import EngineTimers

from clap_ds.cpu_kernels.patch_model import reverted
from clap_ds.data.batch import Batch
from clap_ds.distributed.collectives import gather_tensor
from clap_ds.engine.factory import trained_towers
from clap_ds.engine.session import Session
from clap_ds.flop_count.analytic import TextLengths, backward_flops, forward_flops, published_flops, recomputed_flops
from clap_ds.flop_count.counters import Count, unseen_by_deepspeed
from clap_ds.model.clap import ClapModel
from clap_ds.model.kernels import torch_kernels
from clap_ds.run_records.timers import PhaseTimer

REPORT = "flops_profile.txt"
LARGEST_DISAGREEMENT_PERCENT = 0.5
LENGTH_BATCHES = 4
PROFILED_CLIPS = 16


def measure_flops(session: Session) -> tuple[dict[str, Any], list[str]]:
    """Compute the summary's `flops` section in GFLOPs per sample, and warnings. Collective."""
    run, config, lengths = session.run, session.run.clap.preset(), _executed_lengths(session)
    batch = next(session.batches)
    front_end = batch.audio.ndim == 2  # mel shards skip it
    trained = trained_towers(session.engine.model)
    forward = forward_flops(config, lengths, "model", front_end=front_end)
    checkpointed = [tower for tower in run.clap.model.activation_checkpointing if tower in trained]
    recomputed = recomputed_flops(config, lengths, checkpointed, drop_path=run.clap.model.drop_path)
    recomputed += forward if run.clap.train.accumulation == "gradcache" else 0.0
    found: dict[str, Any] = {
        "published_gflops": published_flops(config, front_end=front_end) / 1e9,
        "model_gflops": forward / 1e9,
        "training_gflops": (forward + backward_flops(config, lengths, trained=trained)) / 1e9,
        "recomputed_gflops": recomputed / 1e9,
        "mean_text_tokens": lengths.mean,
        "deepspeed_gflops": None,
    }
    section = DeepSpeedFlopsProfilerConfig(run.deepspeed)
    if not section.enabled:
        return found, []
    count, batch = _profile(session, section)
    if count is None:
        return found, []
    mask = batch.attention_mask
    lengths = TextLengths.of(mask.sum(dim=1).tolist()) if batch.packed else TextLengths.fixed(mask.shape[1])
    unseen = {name: flops / len(batch) / 1e9 for name, flops in count.unseen.items()}
    gflops = count.total / len(batch) / 1e9
    executed = forward_flops(config, lengths, "model", front_end=front_end) / 1e9
    found |= {"deepspeed_gflops": gflops, "deepspeed_unseen_gflops": unseen, "report": REPORT}
    published = f"published convention {found['published_gflops']:.2f}"
    print(f"forward GFLOPs per sample: profiled {gflops:.2f}, closed form {executed:.2f}, {published}", flush=True)
    apart = 100 * abs(gflops / executed - 1)
    doubt = f"DeepSpeed's profiler and the closed form differ by {apart:.2f}%: MFU (executed FLOPs) is doubtful"
    return found, [doubt] * (apart > LARGEST_DISAGREEMENT_PERCENT)


def _executed_lengths(session: Session) -> TextLengths:
    """Return caption lengths as executed: `context_length` if padded, else the real ones of `LENGTH_BATCHES` more micro-batches
    per rank. Collective."""
    if not session.run.clap.text_packing:
        return TextLengths.fixed(session.run.clap.context_length)
    own = torch.cat([next(session.batches).attention_mask.sum(dim=1) for _ in range(LENGTH_BATCHES)])
    return TextLengths.of(gather_tensor(own).flatten().tolist())


class _Profiler(FlopsProfiler):
    """DeepSpeed's profiler, plus operations it misses; keeps its count, as the engine ends it with the step."""

    def start_profile(self, ignore_list: Any = None) -> None:
        self._beside = ExitStack()
        self._unseen = self._beside.enter_context(unseen_by_deepspeed())
        super().start_profile(ignore_list)

    def stop_profile(self) -> None:
        super().stop_profile()
        self._beside.close()

    def print_model_profile(self, *args: Any, **kwargs: Any) -> None:
        self.model.__duration__ = 0  # the engine starts inside the root's forward pass, whose start isn't recorded
        super().print_model_profile(*args, **kwargs)
        self.count = Count(2.0 * self.macs, dict(self._unseen))


@contextmanager
def _by_torchs_operations(model: ClapModel, device: torch.device) -> Iterator[None]:
    """Run a model uncompiled and without this project's kernels, which the profiler can't count."""
    with reverted(model), torch.compiler.set_stance("force_eager"), ExitStack() as stack:
        for block in model.audio.blocks():
            for part, kernel in torch_kernels(device)._asdict().items():
                if (module := getattr(block, part)).kernel == "triton":
                    stack.enter_context(mock.patch.object(module, "kernel", kernel))
        yield


def _profile(session: Session, section: DeepSpeedFlopsProfilerConfig) -> tuple[Count | None, Batch]:
    """Run one extra step, profiled on rank 0. Returns the count and its micro-batch, the last one."""
    engine, path = session.engine.deepspeed, session.record.path / REPORT
    batches = [next(session.batches).rows(0, PROFILED_CLIPS) for _ in range(session.run.gradient_accumulation_steps)]
    for batch in batches:
        if session.run.clap.text_packing and session.device.type == "cpu":  # else in an uncounted kernel
            batch.pack()
    if session.ranks.is_main_process:
        path.unlink(missing_ok=True)  # DeepSpeed would follow a link
    asked = session.run.deepspeed["flops_profiler"]
    wanted = DeepSpeedFlopsProfilerConfig(
        {"flops_profiler": {**asked, "profile_step": engine.global_steps, "output_file": str(path)}}
    )
    engine.flops_profiler = _Profiler(engine.module, engine, section.recompute_fwd_factor)
    changed = {"flops_profiler_config": wanted, "wall_clock_breakdown": True}  # as the section sets it
    changed |= {"train_micro_batch_size_per_gpu": len(batches[0])}  # for the report
    changed |= {"train_batch_size": len(batches[0]) * len(batches) * session.ranks.world_size}
    timers = EngineTimers(enable_micro_timers=True, enable_global_timers=True)
    with (
        mock.patch.multiple(engine._config, **changed),
        mock.patch.object(engine, "engine_timers", timers),
        _by_torchs_operations(session.engine.model, session.device),
    ):
        session.engine.step(iter(batches), PhaseTimer(session.device, instrumented=False))
    if not session.ranks.is_main_process:
        return None, batches[-1]
    print(path.read_text(), flush=True)
    return engine.flops_profiler.count, batches[-1]
