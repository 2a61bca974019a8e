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
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from clap_ds.config.schema import ModelSettings
from clap_ds.cpu_kernels.patch_model import unpatched
from clap_ds.data.batch import Batch
from clap_ds.data.dataloader import BatchSource
from clap_ds.distributed.collectives import gather_tensor, rank
from clap_ds.distributed.watchdog import activity
from clap_ds.engine.deepspeed_compat import autocast_if_enabled
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
from clap_ds.flop_count.published_model import build_published_model
from clap_ds.model.clap import ClapModel
from clap_ds.model.kernels import without_triton

REPORT = "flops_profile.txt"
# Of all ranks, from which the mean length of packed captions is computed.
LENGTH_BATCHES = 4
# Of an open_clip model.
COUNTED_CLIPS = 16
# Fields of `flops_profiler` for the report.
REPORT_FIELDS = ("module_depth", "top_modules", "detailed")


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
    batch = next(loader)
    if not isinstance(engine.model, ClapModel):
        return _count(engine, batch.rows(0, COUNTED_CLIPS))
    # Mel shards skip the front end.
    front_end = batch.audio.ndim == 2
    flops = _closed_form(engine, _executed_lengths(loader, batch), model, front_end=front_end)
    if profiler.get("enabled"):
        sample = batch.rows(0, 1)
        flops["deepspeed_gflops"] = _profile(engine, sample, profiler, folder / REPORT)
        if rank() == 0:
            flops["deepspeed_published_gflops"] = _profile_published(engine, sample)
            padded = TextLengths.fixed(batch.input_ids.shape[1])
            executed = forward_flops(engine.model.config, padded, "model", front_end=front_end)
            print(
                f"forward GFLOPs per sample: profiled {flops['deepspeed_gflops']:.2f},"
                f" closed form {executed / 1e9:.2f}; published convention:"
                f" profiled {flops['deepspeed_published_gflops']:.2f},"
                f" closed form {flops['published_gflops']:.2f}",
                flush=True,
            )
    return flops


def _executed_lengths(loader: BatchSource, batch: Batch) -> TextLengths:
    """Return the captions' lengths as executed: padded ones have the batch's."""
    if not batch.packed:
        return TextLengths.fixed(batch.input_ids.shape[1])
    # More micro-batches than this one, and all ranks', as their means vary.
    lengths = [next(loader).attention_mask.sum(dim=1) for _ in range(LENGTH_BATCHES)]
    by_rank = gather_tensor(torch.cat(lengths).cpu())
    return TextLengths.from_lengths(torch.cat(by_rank).tolist())


def _closed_form(
    engine: ClapEngine, lengths: TextLengths, model: ModelSettings, *, front_end: bool
) -> dict[str, Any]:
    """Return the section without the profiler's figures."""
    config = engine.model.config
    trained = trained_towers(engine.model)
    forward = forward_flops(config, lengths, "model", front_end=front_end)
    backward = backward_flops(config, lengths, trained=trained)
    # A frozen tower has no backward pass that recomputes.
    checkpointed = [tower for tower in model.activation_checkpointing if tower in trained]
    recomputed = recomputed_flops(config, lengths, checkpointed, drop_path=model.drop_path)
    # GradCache runs each micro-batch forward twice.
    if engine.uses_gradcache:
        recomputed += forward
    return {
        "published_gflops": published_flops(config, front_end=front_end) / 1e9,
        "model_gflops": forward / 1e9,
        "training_gflops": (forward + backward) / 1e9,
        "recomputed_gflops": recomputed / 1e9,
        "mean_text_tokens": lengths.mean,
        "deepspeed_gflops": None,
        "deepspeed_published_gflops": None,
    }


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
    return {
        "published_gflops": None,
        "model_gflops": forward,
        "training_gflops": 3 * forward,
        "recomputed_gflops": forward if engine.uses_gradcache else 0.0,
        "mean_text_tokens": batch.input_ids.shape[1],
        "deepspeed_gflops": None,
    }


def _profile_published(engine: ClapEngine, sample: Batch) -> float:
    """Count the published model's GFLOPs for an fp32 sample on the CPU: 5 s and 0.3 GB for
    HTSAT-base on one core."""
    config = engine.model.config
    audio = sample.audio.float().cpu()
    counts = count_by_deepspeed(build_published_model(config), config.text.max_positions, audio)
    return sum(counts) / 1e9


@torch.no_grad()
def _profile(engine: ClapEngine, sample: Batch, profiler: dict[str, Any], path: Path) -> float:
    """Count a forward pass's GFLOPs; on rank 0 also write and print the profiler's report."""
    assert isinstance(engine.model, ClapModel)
    options = {name: profiler[name] for name in REPORT_FIELDS if name in profiler}
    if rank() == 0:
        # DeepSpeed would follow a link.
        path.unlink(missing_ok=True)
    with (
        _torch_operations(engine.model, engine.device),
        autocast_if_enabled(engine.deepspeed),
        counted_ffts() as ffts,
    ):
        _, macs, _ = get_model_profile(
            engine.model,
            args=sample.model_inputs(),
            warm_up=0,
            as_string=False,
            print_profile=rank() == 0,
            output_file=str(path),
            **options,
        )
    engine.model.train()
    if rank() == 0:
        print(path.read_text(), flush=True)
    # The profiler doesn't count FFTs.
    return (2.0 * macs + sum(ffts)) / 1e9


@contextmanager
def _torch_operations(model: ClapModel, device: torch.device) -> Iterator[None]:
    """Run a model uncompiled and without this project's kernels, which the profiler can't count."""
    eager = torch.compiler.set_stance("force_eager")
    with unpatched(model), without_triton(model, device), eager:
        yield
