"""Find the largest micro-batch that fits this GPU (`clap.bench.find_micro_batch`)."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

import torch

from clap_ds.config.batch_sizes import ACCUMULATION, GLOBAL_BATCH, MICRO_BATCH
from clap_ds.config.settings import RunSettings
from clap_ds.data.batch import Batch
from clap_ds.distributed.collectives import raise_on_all_ranks, rank, reduce_on_rank0
from clap_ds.distributed.watchdog import activity
from clap_ds.engine.compile import preserve_rng_and_bn, run_eager
from clap_ds.engine.engine import ClapEngine

MULTIPLE = 8
BYTES_PER_PARAMETER = 14
"""Allocated by the first step per trained parameter: gradients in 16 bits and fp32, and two fp32
moments."""


def largest_multiple(fits: Callable[[int], bool], start: int) -> int:
    """Return the largest multiple of 8 that fits. Doubles or halves from `start`, then bisects.
    ValueError if 8 doesn't fit."""
    low = 0
    high = max(1, start // MULTIPLE)
    while fits(MULTIPLE * high):
        low = high
        high = 2 * high
    low += bisect_left(range(low + 1, high), True, key=lambda number: not fits(MULTIPLE * number))
    if not low:
        raise ValueError(f"a micro-batch of {MULTIPLE} doesn't fit in this GPU's memory")
    return MULTIPLE * low


def find_micro_batch(engine: ClapEngine, run: RunSettings) -> None:
    """Set the engine's and the run's micro-batch to the largest whose towers run eager in every
    rank's memory. A collective; raises UserError without a GPU."""
    with raise_on_all_ranks(), activity("finding the micro-batch"):
        require_gpu(engine.device)
        found = largest_multiple(
            lambda size: _fits(engine, run.clap.context_length, size), run.micro_batch
        )
    torch.cuda.empty_cache()  # blocks of the sizes that were tried
    engine.deepspeed.set_train_micro_batch_size(found)
    engine.deepspeed.tput_timer.batch_size = engine.deepspeed.train_batch_size()
    run.deepspeed |= {MICRO_BATCH: found, ACCUMULATION: run.gradient_accumulation_steps}
    run.deepspeed.pop(GLOBAL_BATCH, None)


def require_gpu(device: torch.device) -> None:
    if device.type != "cuda":
        raise ValueError("clap.bench.find_micro_batch: needs a GPU; set it to false")


def _fits(engine: ClapEngine, context_length: int, size: int) -> bool:
    """Run both towers forward and backward beside what a step and the next batch occupy. A
    collective."""
    audio = engine.model.config.audio
    device = engine.device
    fits = True
    try:
        trained = sum(each.numel() for each in engine.model.parameters() if each.requires_grad)
        _step = torch.empty(BYTES_PER_PARAMETER * trained, dtype=torch.uint8, device=device)
        dtype = torch.float32 if audio.fusion else torch.int16
        clips, _next = (
            torch.zeros(size, *audio.clip_shape, dtype=dtype, device=device) for _ in range(2)
        )
        ids = torch.full(
            (size, context_length), engine.model.config.text.vocab_size - 1, device=device
        )
        with preserve_rng_and_bn(engine.model, device):
            run_eager(engine.deepspeed, Batch(clips, ids, torch.ones_like(ids)))
    except torch.OutOfMemoryError:
        fits = False
    fits = reduce_on_rank0(fits, all)
    if rank() == 0:
        print(f"micro-batch {size}: {'fits' if fits else 'out of memory'}", flush=True)
    return fits
