"""Find the largest micro-batch that fits this GPU (`clap.bench.find_micro_batch`)."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

import torch

from clap_ds.data.batch import Batch
from clap_ds.distributed.collectives import raise_on_all_ranks, rank, reduce_on_rank0
from clap_ds.distributed.watchdog import activity
from clap_ds.engine.compile import preserve_rng_and_bn, run_eager
from clap_ds.engine.engine import ClapEngine

MULTIPLE = 8
# The first step allocates so many per trained parameter: gradients in 16 bits and fp32, and two
# fp32 moments.
BYTES_PER_PARAMETER = 2 + 4 + 2 * 4


def largest_multiple(fits: Callable[[int], bool], start: int) -> int:
    """Return the largest multiple of 8 that fits. Doubles or halves from `start`, then bisects.
    ValueError if 8 doesn't fit."""
    # In multiples of 8: `low` fits, `high` doesn't.
    low = 0
    high = max(1, start // MULTIPLE)
    while fits(MULTIPLE * high):
        low = high
        high = 2 * high
    low += bisect_left(range(low + 1, high), True, key=lambda number: not fits(MULTIPLE * number))
    if low == 0:
        raise ValueError(f"a micro-batch of {MULTIPLE} doesn't fit in this GPU's memory")
    return MULTIPLE * low


def find_micro_batch(engine: ClapEngine, start: int, context_length: int) -> int:
    """Find the largest micro-batch whose towers run eager in every rank's memory, and set the
    engine's. A collective; raises UserError without a GPU.

    Args:
        start: the micro-batch that is tried first.
        context_length: text tokens of a caption.
    """
    with raise_on_all_ranks(), activity("finding the micro-batch"):
        require_gpu(engine.device)
        micro_batch = largest_multiple(lambda size: _fits(engine, context_length, size), start)
    # Free blocks of the sizes that were tried.
    torch.cuda.empty_cache()
    engine.deepspeed.set_train_micro_batch_size(micro_batch)
    engine.deepspeed.tput_timer.batch_size = engine.deepspeed.train_batch_size()
    return micro_batch


def require_gpu(device: torch.device) -> None:
    if device.type != "cuda":
        raise ValueError("clap.bench.find_micro_batch: needs a GPU; set it to false")


def _fits(engine: ClapEngine, context_length: int, size: int) -> bool:
    """Run both towers forward and backward beside what a step and the next batch occupy. A
    collective."""
    try:
        _run_towers(engine, context_length, size)
        fits = True
    except torch.OutOfMemoryError:
        fits = False
    fits = reduce_on_rank0(fits, all)
    if rank() == 0:
        print(f"micro-batch {size}: {'fits' if fits else 'out of memory'}", flush=True)
    return fits


def _run_towers(engine: ClapEngine, context_length: int, size: int) -> None:
    model = engine.model
    device = engine.device
    num_trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    # The step's and the next batch's memory is only held.
    _step = torch.empty(BYTES_PER_PARAMETER * num_trained, dtype=torch.uint8, device=device)
    dtype = torch.float32 if model.config.audio.fusion else torch.int16
    clips = torch.zeros(size, *model.config.audio.clip_shape, dtype=dtype, device=device)
    _next_clips = torch.zeros_like(clips)
    last_token = model.config.text.vocab_size - 1
    ids = torch.full((size, context_length), last_token, device=device)
    with preserve_rng_and_bn(model, device):
        run_eager(engine.deepspeed, Batch(clips, ids, torch.ones_like(ids)))
