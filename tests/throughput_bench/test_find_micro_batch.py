"""The largest micro-batch that fits, from any start, and what a run then has."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from clap_ds.data.batch import Batch
from clap_ds.throughput_bench import find_micro_batch as module
from clap_ds.throughput_bench.find_micro_batch import find_micro_batch, largest_multiple
from clap_ds.utils.errors import UserError
from tests.engine.test_engine import model_of, settings
from tests.rank_pool import RankPool
from tests.training.reference_steps import engine_of


@pytest.mark.parametrize("start", [1, 8, 40, 616, 4096])
@pytest.mark.parametrize("memory", [8, 15, 16, 620, 5000])
def test_the_largest_multiple_of_8_that_fits(start: int, memory: int) -> None:
    tried: list[int] = []
    assert (
        largest_multiple(lambda size: (tried.append(size), size <= memory)[1], start)
        == memory // 8 * 8
    )
    assert len(tried) == len(set(tried)) <= 22
    with pytest.raises(ValueError, match="of 8 doesn't fit"):
        largest_multiple(lambda size: False, start)


def _found(fits: int) -> tuple[int, int, int]:
    """Find the micro-batch where batches of more than `fits` clips (on rank 1: two fewer) exhaust
    the memory."""

    def run_eager(_: Any, batch: Batch) -> None:
        if len(batch) > fits - 2 * dist.get_rank():
            raise torch.OutOfMemoryError("out of memory")

    run = settings("fp32", 2)
    engine = engine_of(run, model_of(run))
    before = [float(each.sum()) for each in engine.model.running_statistics()]
    with pytest.raises(UserError, match="needs a GPU"):
        find_micro_batch(engine, run)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "run_eager", run_eager)
        patch.setattr(module, "require_gpu", lambda device: None)
        find_micro_batch(engine, run)
    assert before == [float(each.sum()) for each in engine.model.running_statistics()]
    return (
        run.micro_batch,
        engine.deepspeed.train_micro_batch_size_per_gpu(),
        engine.deepspeed.train_batch_size(),
    )


def test_every_rank_has_the_micro_batch_that_fits_all(two_ranks: RankPool) -> None:
    for micro_batch, of_engine, whole in two_ranks.run(_found, 41):
        assert (micro_batch, of_engine) == (32, 32)
        assert whole % 64 == 0
