"""Check that the host reads nothing from the device in a step: gradients, clipping and update.

After an engine's first step every tensor it holds is replaced by a fake one, and reading its value
raises. The group has two ranks, of which only this one exists, and collectives do nothing.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from clap_ds.data.dataloader import build_batches
from clap_ds.engine import grad_cache
from clap_ds.engine.factory import build_model
from tests.engine.test_engine import settings
from tests.rank_pool import RankPool
from tests.training.reference_steps import engine_of

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def lone_rank() -> Iterator[RankPool]:
    """Start a process without a process group."""
    with contextlib.closing(RankPool(1, grouped=False)) as pool:
        yield pool


def faked(value: Any, mode: FakeTensorMode, seen: dict[int, Any]) -> Any:
    """Replace the tensors in `value` by fake ones, in place except in tuples."""
    if isinstance(value, Tensor):
        return mode.from_tensor(value)
    if id(value) in seen:
        return value
    seen[id(value)] = value
    ours = ("clap_ds", "deepspeed", "torch.nn", "torch.optim", "transformers")
    if isinstance(value, dict):
        items = [(faked(key, mode, seen), faked(each, mode, seen)) for key, each in value.items()]
        value.clear()
        value.update(items)
    elif isinstance(value, list):
        value[:] = [faked(each, mode, seen) for each in value]
    elif type(value) is tuple:
        return tuple(faked(each, mode, seen) for each in value)
    elif (
        hasattr(value, "__dict__")
        and not isinstance(value, type)
        and type(value).__module__.startswith(ours)
    ):
        faked(vars(value), mode, seen)
    return value


def _fake_steps(precision: str, changes: dict[str, Any]) -> None:
    """Take a step with fake tensors, then check its loss, which reads."""
    if not dist.is_initialized():
        import deepspeed
        from torch.testing._internal.distributed.fake_pg import FakeStore

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # don't compile it
        dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
        deepspeed.init_distributed(verbose=False)
    clap = {"cpu_kernels": "off", "gradient_sync": "deepspeed", **changes.pop("clap", {})}
    run = settings(
        precision, changes.pop("accumulation", 1), gradient_clipping=1.0, clap=clap, **changes
    )
    engine = engine_of(run, build_model(run.clap.model, run.clap.loss, CPU))
    engine.norm_wanted = True
    source = build_batches(
        run.clap.data.model_copy(update={"num_batches": 2, "caption_lengths": {"5": 1.0, "16": 1.0}}),
        model=run.clap.preset(), context_length=run.clap.context_length, micro_batch=run.micro_batch,
        rank=0, world_size=2, seed=7, device=CPU,
    )  # fmt: skip
    mode = FakeTensorMode()
    engine.step(source)
    batches = iter(
        [next(source).map(mode.from_tensor) for _ in range(run.gradient_accumulation_steps)]
    )
    faked(engine, mode, {})
    with pytest.MonkeyPatch.context() as patch, mode:
        # Generator states are on the host, and couldn't be restored from fake tensors.
        patch.setattr(grad_cache, "random_state", lambda device: {})
        patch.setattr(grad_cache, "restore_random_state", lambda state, device: None)
        engine.step(batches)
        with pytest.raises(DataDependentOutputException):
            engine.check_loss()


STEPS: list[tuple[str, dict[str, Any]]] = [
    ("bf16", {"accumulation": 2}),
    ("bf16", {"accumulation": 2, "clap": {"train": {"accumulation": "gradcache"}}}),
    ("autocast", {}),
]


@pytest.mark.parametrize(("precision", "changes"), STEPS)
def test_no_step_reads_on_the_host(
    lone_rank: RankPool, precision: str, changes: dict[str, Any]
) -> None:
    lone_rank.run(_fake_steps, precision, changes)
