"""The host reads nothing from the device in a step: gradients, clipping and update.

After an engine's first step every tensor it holds is replaced by a fake one, and reading its value
raises. The group has two ranks, of which only this one exists, and collectives do nothing.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from clap_ds.engine import grad_cache
from clap_ds.engine.factory import build_model
from tests.engine.test_engine import settings
from tests.rank_pool import RankPool
from tests.training.reference_steps import batch_source, engine_of

CPU = torch.device("cpu")
# Modules whose objects may hold tensors of the engine.
OWNERS = ("clap_ds", "deepspeed", "torch.nn", "torch.optim", "transformers")


@pytest.fixture(scope="module")
def lone_rank() -> Iterator[RankPool]:
    """Start a process without a process group."""
    with contextlib.closing(RankPool(1, grouped=False)) as pool:
        yield pool


def fake(value: Any, mode: FakeTensorMode, visited: dict[int, Any]) -> Any:
    """Replace the tensors in `value` by fake ones, in place except in tuples."""
    if isinstance(value, Tensor):
        return mode.from_tensor(value)
    if type(value) is tuple:
        return tuple(fake(member, mode, visited) for member in value)
    if id(value) in visited:
        return value
    visited[id(value)] = value
    if isinstance(value, dict):
        items = [*value.items()]
        value.clear()
        for key, member in items:
            value[fake(key, mode, visited)] = fake(member, mode, visited)
    elif isinstance(value, list):
        value[:] = [fake(member, mode, visited) for member in value]
    elif type(value).__module__.startswith(OWNERS) and hasattr(value, "__dict__"):
        fake(vars(value), mode, visited)
    return value


def _join_fake_group() -> None:
    # Don't compile DeepSpeed's all-reduce in shared memory.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    deepspeed.init_distributed(verbose=False)


def _step_with_fake_tensors(precision: str, accumulation: str, num_micro_batches: int) -> None:
    """Take a step with fake tensors, then check its loss, which reads."""
    if not dist.is_initialized():
        _join_fake_group()
    train = {"accumulation": accumulation}
    clap = {"cpu_kernels": "off", "gradient_sync": "deepspeed", "train": train}
    run = settings(precision, num_micro_batches, gradient_clipping=1.0, clap=clap)
    engine = engine_of(run, build_model(run.clap.model, run.clap.loss, CPU))
    engine.log_gradient_norm = True
    source = batch_source(run, 0, 2, 2)
    engine.step(source)
    mode = FakeTensorMode()
    batches = iter([next(source).map(mode.from_tensor) for _ in range(num_micro_batches)])
    fake(engine, mode, {})
    with pytest.MonkeyPatch.context() as patch, mode:
        # Generator states are on the host, and couldn't be restored from fake tensors.
        patch.setattr(grad_cache, "random_state", lambda device: {})
        patch.setattr(grad_cache, "restore_random_state", lambda state, device: None)
        engine.step(batches)
        with pytest.raises(DataDependentOutputException):
            engine.check_loss()


@pytest.mark.parametrize(
    ("precision", "accumulation", "num_micro_batches"),
    [("bf16", "gradcache", 2), ("autocast", "plain", 1)],
)
def test_step_reads_nothing_on_the_host(
    lone_rank: RankPool, precision: str, accumulation: str, num_micro_batches: int
) -> None:
    lone_rank.run(_step_with_fake_tensors, precision, accumulation, num_micro_batches)
