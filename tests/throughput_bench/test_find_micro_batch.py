"""The largest micro-batch that fits, from any start and on every rank."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from clap_ds.data.batch import Batch
from clap_ds.throughput_bench import find_micro_batch as module
from clap_ds.throughput_bench.find_micro_batch import find_micro_batch, largest_multiple
from clap_ds.throughput_bench.loop import with_micro_batch
from clap_ds.utils.errors import UserError
from tests.engine.test_engine import model_of, settings
from tests.training.reference_steps import engine_of


@pytest.mark.parametrize(("start", "memory"), [(1, 620), (40, 15), (4096, 8)])
def test_largest_multiple_is_found_in_few_trials(start, memory):
    trials: list[int] = []

    def fits(size: int) -> bool:
        trials.append(size)
        return size <= memory

    assert largest_multiple(fits, start) == memory // 8 * 8
    assert len(trials) == len(set(trials)) <= 22
    with pytest.raises(ValueError, match="of 8 doesn't fit"):
        largest_multiple(lambda size: False, start)


def _find(largest: int) -> tuple[int, int, int]:
    """Find the micro-batch where batches of more than `largest` clips (on rank 1: two fewer)
    exhaust the memory. Return the run's, the engine's and the global batch."""

    def run_eager(_: Any, batch: Batch) -> None:
        if len(batch) > largest - 2 * dist.get_rank():
            raise torch.OutOfMemoryError("out of memory")

    run = settings("fp32", 2)
    engine = engine_of(run, model_of(run))
    with pytest.raises(UserError, match="needs a GPU"):
        find_micro_batch(engine, run.micro_batch, run.clap.context_length)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "run_eager", run_eager)
        patch.setattr(module, "require_gpu", lambda device: None)
        micro_batch = find_micro_batch(engine, run.micro_batch, run.clap.context_length)
    deepspeed = engine.deepspeed
    return (
        with_micro_batch(run, micro_batch).micro_batch,
        deepspeed.train_micro_batch_size_per_gpu(),
        deepspeed.train_batch_size(),
    )


def test_micro_batch_fits_the_smallest_rank_and_keeps_accumulation(two_ranks):
    # Two ranks and two micro-batches.
    assert two_ranks.run(_find, 41) == [(32, 32, 4 * 32)] * 2
