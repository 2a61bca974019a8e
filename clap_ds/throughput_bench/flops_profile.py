"""Count a benchmark's FLOPs in closed form and, with a `flops_profiler` section, with DeepSpeed's
profiler.

The profiler would synchronize every step. It profiles one forward pass after timing instead: one
padded sample, uncompiled, with torch's operations only. Of a batch it would count the product with
a broadcast matrix once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from deepspeed.profiling.flops_profiler import get_model_profile
from deepspeed.runtime.torch_autocast import autocast_if_enabled
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from clap_ds.config.schema import ModelSettings
from clap_ds.cpu_kernels.patch_model import unpatched
from clap_ds.data.batch import Batch
from clap_ds.data.dataloader import BatchSource
from clap_ds.distributed.collectives import gather_tensor, rank
from clap_ds.distributed.watchdog import activity
from clap_ds.engine.engine import ClapEngine
from clap_ds.engine.factory import trained_towers
from clap_ds.flop_count.analytic import (
    TextLengths,
    backward_flops,
    forward_flops,
    published_flops,
    recomputed_flops,
)
from clap_ds.flop_count.counters import count_by_deepspeed, counted_ffts
from clap_ds.flop_count.published_model import published_model
from clap_ds.model.clap import ClapModel
from clap_ds.model.kernels import without_triton

REPORT = "flops_profile.txt"
LENGTH_BATCHES = 4
COUNTED_CLIPS = 16  # of an open_clip model


@activity("profiling")
def measure_flops(
    engine: ClapEngine,
    loader: BatchSource,
    model: ModelSettings,
    profiler: dict[str, Any],
    folder: Path,
) -> dict[str, Any]:
    """Compute the summary's `flops` section in GFLOPs per sample. A collective.

    Args:
        profiler: DeepSpeed's section `flops_profiler`; its report is written to `folder`.
    """
    config = engine.model.config
    batch = next(loader)
    if not isinstance(engine.model, ClapModel):
        return _count(engine, batch.rows(0, COUNTED_CLIPS))
    lengths = padded = TextLengths.fixed(batch.input_ids.shape[1])
    if batch.packed:  # as executed, over more micro-batches of all ranks
        of_rank = torch.cat([next(loader).attention_mask.sum(dim=1) for _ in range(LENGTH_BATCHES)])
        lengths = TextLengths.of(torch.cat(gather_tensor(of_rank.cpu())).tolist())
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
        "deepspeed_published_gflops": None,
    }
    if profiler.get("enabled"):
        sample = batch.rows(0, 1)
        found["deepspeed_gflops"] = _profile(engine, sample, profiler, folder / REPORT)
        executed = forward_flops(config, padded, "model", front_end=front_end) / 1e9
        if rank() == 0:
            # One fp32 sample on the CPU: 5 s and 0.3 GB for HTSAT-base on one core.
            count = count_by_deepspeed(
                published_model(config), config.text.max_positions, sample.audio.float().cpu()
            )
            found["deepspeed_published_gflops"] = sum(count) / 1e9
            text = (
                "forward GFLOPs per sample: profiled {deepspeed_gflops:.2f}, closed form {executed:.2f}; published convention:"
                " profiled {deepspeed_published_gflops:.2f}, closed form {published_gflops:.2f}"
            )
            print(text.format(executed=executed, **found), flush=True)
    return found


def _count(engine: ClapEngine, batch: Batch) -> dict[str, Any]:
    """Count an open_clip model's FLOPs with torch's counter; the backward pass has twice the
    forward pass's. No published convention counts them."""
    # With gradients: without them, the counter's hooks fail on expanded parameters.
    with (
        FlopCounterMode(display=False) as counter,
        sdpa_kernel(SDPBackend.MATH),
        autocast_if_enabled(engine.deepspeed),
    ):
        engine.model(*batch.model_inputs())
    forward = counter.get_total_flops() / len(batch) / 1e9
    found = {
        "training_gflops": 3 * forward,
        "recomputed_gflops": forward * engine.cached,
        "deepspeed_gflops": None,
    }
    return {
        "published_gflops": None,
        "model_gflops": forward,
        "mean_text_tokens": batch.input_ids.shape[1],
        **found,
    }


@torch.no_grad()
def _profile(engine: ClapEngine, sample: Batch, profiler: dict[str, Any], path: Path) -> float:
    """Count a forward pass's GFLOPs; on rank 0 also write and print the profiler's report."""
    is_first = rank() == 0
    shown: dict[str, Any] = {
        name: profiler[name]
        for name in ("module_depth", "top_modules", "detailed")
        if name in profiler
    }
    shown |= {"print_profile": is_first, "output_file": str(path)}
    if is_first:
        path.unlink(missing_ok=True)  # DeepSpeed would follow a link
    assert isinstance(engine.model, ClapModel)
    with (
        _torch_operations(engine.model, engine.device),
        autocast_if_enabled(engine.deepspeed),
        counted_ffts() as ffts,
    ):
        _, macs, _ = get_model_profile(
            engine.model, args=sample.model_inputs(), warm_up=0, as_string=False, **shown
        )
    engine.model.train()
    if is_first:
        print(path.read_text(), flush=True)
    return (2.0 * macs + sum(ffts)) / 1e9


@contextmanager
def _torch_operations(model: ClapModel, device: torch.device) -> Iterator[None]:
    """Run a model uncompiled and without this project's kernels, which the profiler can't count."""
    eager = torch.compiler.set_stance("force_eager")
    with unpatched(model), without_triton(model, device), eager:
        yield
