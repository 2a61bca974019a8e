"""Build and step the engine, including DeepSpeed, on fake tensors as one rank of any number."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.comm import comm
from deepspeed.utils import groups
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from clap_ds.distributed import collectives
from clap_ds.engine import grad_cache
from clap_ds.run_records.run_dir import quiet_deepspeed


@contextmanager
def fake_rank(world_size: int, fakes: FakeTensorMode) -> Iterator[None]:
    """Fake a process group in which all ranks have this rank's data, make tensors fake, and `ClapEngine` accept them."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    quiet_deepspeed()
    try:
        with (
            mock.patch.object(collectives, "gather", lambda own: [own] * world_size),
            mock.patch.object(collectives, "hosts", return_value=dist.group.WORLD),
            mock.patch.dict(vars(groups), _WORLD_GROUP=None),  # refers to destroyed groups; restored on exit
            mock.patch.dict(vars(comm), cdb=None),
            mock.patch.dict(os.environ, LOCAL_RANK="0"),
            mock.patch.dict(deepspeed.ops.__compatible_ops__, deepspeed_shm_comm=False),
            # Modules change dtype with it, but it fails if anything refers to a parameter.
            mock.patch.object(torch.utils, "swap_tensors", lambda own, new: setattr(own, "data", new.data)),
            mock.patch.object(grad_cache, "restore_random_state"),
            fakes,
        ):
            yield
    finally:
        dist.destroy_process_group()
