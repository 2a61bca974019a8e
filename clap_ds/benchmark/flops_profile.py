"""Count a benchmark's FLOPs in closed form and, with a `flops_profiler` section, with DeepSpeed's profiler.

The profiler would synchronize every step. It profiles one forward pass after timing instead: a few clips, uncompiled, with
torch's operations only.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from deepspeed.profiling.config import DeepSpeedFlopsProfilerConfig
from deepspeed.profiling.flops_profiler import FlopsProfiler
from deepspeed.runtime.torch_autocast import autocast_if_enabled

from clap_ds.config.schema import ModelSettings
from clap_ds.cpu_kernels.patch_model import reverted
from clap_ds.data.batch import Batch
from clap_ds.data.dataloader import BatchSource
from clap_ds.distributed.collectives import gather_tensor, rank
from clap_ds.distributed.watchdog import activity
from clap_ds.engine.engine import ClapEngine
from clap_ds.engine.factory import trained_towers
from clap_ds.flop_count.analytic import TextLengths, backward_flops, forward_flops, published_flops, recomputed_flops
from clap_ds.flop_count.counters import Count, unseen_by_deepspeed
from clap_ds.model.clap import ClapModel
from clap_ds.model.kernels import torch_kernels

REPORT = "flops_profile.txt"
LARGEST_DISAGREEMENT_PERCENT = 0.5
LENGTH_BATCHES = 4
PROFILED_CLIPS = 16


@activity("profiling")
def measure_flops(
    engine: ClapEngine, loader: BatchSource, model: ModelSettings, profiler: dict[str, Any], folder: Path
) -> tuple[dict[str, Any], list[str]]:
    """Compute the summary's `flops` section in GFLOPs per sample, and warnings. A collective.

    Args:
        profiler: DeepSpeed's section `flops_profiler`; its report is written to `folder`.
    """
    config, batch = engine.model.config, next(loader)
    lengths = _lengths(batch)
    if batch.packed:  # as executed, over more micro-batches of all ranks
        own = torch.cat([next(loader).attention_mask.sum(dim=1) for _ in range(LENGTH_BATCHES)])
        lengths = TextLengths.of(gather_tensor(own).flatten().tolist())
    front_end = batch.audio.ndim == 2  # mel shards skip it
    trained = trained_towers(engine.model)
    forward = forward_flops(config, lengths, "model", front_end=front_end)
    checkpointed = [tower for tower in model.activation_checkpointing if tower in trained]
    recomputed = recomputed_flops(config, lengths, checkpointed, drop_path=model.drop_path)
    recomputed += forward if engine.cached else 0.0
    found: dict[str, Any] = {
        "published_gflops": published_flops(config, front_end=front_end) / 1e9,
        "model_gflops": forward / 1e9,
        "training_gflops": (forward + backward_flops(config, lengths, trained=trained)) / 1e9,
        "recomputed_gflops": recomputed / 1e9,
        "mean_text_tokens": lengths.mean,
        "deepspeed_gflops": None,
    }
    section = DeepSpeedFlopsProfilerConfig({"flops_profiler": profiler})
    if not section.enabled:
        return found, []
    few = batch.rows(0, PROFILED_CLIPS)
    if batch.packed and engine.device.type == "cpu":  # on a GPU in a kernel that isn't counted
        few.pack()
    count = _profile(engine, few, section, folder / REPORT)
    gflops = count.total / len(few) / 1e9
    unseen = {name: flops / len(few) / 1e9 for name, flops in count.unseen.items()}
    found |= {"deepspeed_gflops": gflops, "deepspeed_unseen_gflops": unseen, "report": REPORT}
    executed = forward_flops(config, _lengths(few), "model", front_end=front_end) / 1e9
    if rank() == 0:
        published = f"published convention {found['published_gflops']:.2f}"
        print(f"forward GFLOPs per sample: profiled {gflops:.2f}, closed form {executed:.2f}, {published}", flush=True)
    apart = 100 * abs(gflops / executed - 1)
    doubt = f"DeepSpeed's profiler and the closed form differ by {apart:.2f}%: MFU (executed FLOPs) is doubtful"
    return found, [doubt] * (apart > LARGEST_DISAGREEMENT_PERCENT)


def _lengths(batch: Batch) -> TextLengths:
    mask = batch.attention_mask
    return TextLengths.of(mask.sum(dim=1).tolist()) if batch.packed else TextLengths.fixed(mask.shape[1])


@torch.no_grad()
def _profile(engine: ClapEngine, batch: Batch, section: DeepSpeedFlopsProfilerConfig, path: Path) -> Count:
    """Count a forward pass; on rank 0 also write and print the profiler's report."""
    profiler, model = FlopsProfiler(engine.model), engine.model
    with _by_torchs_operations(model, engine.device), autocast_if_enabled(engine.deepspeed):
        with unseen_by_deepspeed() as unseen:
            profiler.start_profile()
            model(*batch.model_inputs())
            profiler.stop_profile()
        count = Count(2.0 * profiler.get_total_macs(), dict(unseen))
        if rank() == 0:
            path.unlink(missing_ok=True)  # DeepSpeed would follow a link
            depth = section.module_depth, section.top_modules, section.detailed
            profiler.print_model_profile(engine.steps, *depth, output_file=str(path))
            print(path.read_text(), flush=True)
        profiler.end_profile()
    return count


@contextmanager
def _by_torchs_operations(model: ClapModel, device: torch.device) -> Iterator[None]:
    """Run a model uncompiled and without this project's kernels, which the profiler can't count."""
    with reverted(model), torch.compiler.set_stance("force_eager"), ExitStack() as stack:
        for block in model.audio.blocks():
            for part, kernel in torch_kernels(device)._asdict().items():
                if (module := getattr(block, part)).kernel == "triton":
                    stack.enter_context(mock.patch.object(module, "kernel", kernel))
        yield
