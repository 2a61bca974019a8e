"""Build and step the engine, including DeepSpeed and torch's reducer, on fake tensors as one rank of any number."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.comm import comm
from deepspeed.utils import groups
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._composable.replicate import _ReplicateState
from torch.nn.parallel import distributed as ddp
from torch.testing._internal.distributed.fake_pg import FakeStore

from clap_ds.distributed import collectives
from clap_ds.engine import grad_cache
from clap_ds.run_records.run_dir import quiet_deepspeed


@contextmanager
def rank_of(world_size: int) -> Iterator[None]:
    """Fake a process group in which all ranks have this rank's data."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    all_reduce = dist.all_reduce

    def reduced(tensor: Tensor, *args: Any, async_op: bool = False, **kwargs: Any) -> Any:
        all_reduce(tensor, *args, **kwargs)
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        future.set_result([tensor])
        return SimpleNamespace(get_future=lambda: future, wait=future.wait)

    try:
        with (
            mock.patch.object(collectives, "gather", lambda own: [own] * world_size),
            mock.patch.object(collectives, "hosts", return_value=dist.group.WORLD),
            mock.patch.object(dist, "all_reduce", reduced),
        ):
            yield
    finally:
        dist.destroy_process_group()


@contextmanager
def faked_by(fakes: FakeTensorMode) -> Iterator[None]:
    """Make tensors fake and `ClapEngine` accept them. Use within `rank_of`."""
    quiet_deepspeed()
    with (
        mock.patch.dict(vars(groups), _WORLD_GROUP=None),  # refers to destroyed groups; restored on exit
        mock.patch.dict(vars(comm), cdb=None),
        mock.patch.dict(os.environ, LOCAL_RANK="0"),
        mock.patch.dict(deepspeed.ops.__compatible_ops__, deepspeed_shm_comm=False),
        # Modules change dtype with it, but it fails if anything refers to a parameter.
        mock.patch.object(torch.utils, "swap_tensors", lambda own, new: setattr(own, "data", new.data)),
        mock.patch.object(grad_cache, "restore_random_state"),
        mock.patch.object(ddp, "_verify_param_shape_across_processes"),
        mock.patch.object(ddp, "_sync_module_states"),
        mock.patch.object(_ReplicateState, "register_comm_hook", _register_hooks),
        fakes,
    ):
        yield


def _register_hooks(state: Any) -> None:
    """Register `replicate`'s hooks, or an all-reduce hook, because the reducer's own one has no result in this group."""

    def send(gradients: Tensor) -> torch.futures.Future[Tensor]:
        return dist.all_reduce(gradients, async_op=True).get_future().then(lambda future: future.value()[0])

    for hook, _ in state._comm_hook_args or [((None, lambda _, bucket: send(bucket.buffer())), {})]:
        state._ddp.register_comm_hook(*hook)
