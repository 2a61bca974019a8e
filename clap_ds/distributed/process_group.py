"""Choose this rank's device and join the process group: what needs torch and DeepSpeed."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import deepspeed
import torch

from clap_ds.distributed.device import choose_device
from clap_ds.distributed.hostfile import free_port
from clap_ds.distributed.init import Ranks, keep_freed_memory
from clap_ds.distributed.rendezvous import join_process_group
from clap_ds.distributed.root_cause import prepare_flight_recorder
from clap_ds.utils.paths import describe_software

COLLECTIVE_TIMEOUT_S = 1800.0  # must cover one rank's slow start (compiling, downloading)


def initialize(
    ranks: Ranks,
    *,
    collective_timeout_s: float = COLLECTIVE_TIMEOUT_S,
    allow_mixed_code: bool = False,
) -> torch.device:
    """Choose this rank's device and join the process group. Raises UserError if there is none, the
    port is in use, or hosts have different software and that isn't allowed."""
    software = None
    if ranks.local_rank == 0:
        # One rank of each host reads files and asks git, while it sets up its device.
        software = ThreadPoolExecutor(1).submit(describe_software)
    device = choose_device(ranks.rank, ranks.local_rank)

    _complete_address(ranks)
    if "OMP_NUM_THREADS" not in os.environ:
        # Oversubscribed cores slow the optimizer on CPUs by up to 80 times.
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks.local_world_size))
    if device.type == "cpu":
        keep_freed_memory()
        deepspeed.ops.__compatible_ops__ = {}  # reading it would try to compile every operation
    # Otherwise each gloo group connects all pairs of ranks: sockets grow with the square of the
    # ranks.
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    backend = "gloo" if device.type == "cpu" else "nccl"
    prepare_flight_recorder()
    if not torch.distributed.is_initialized():
        # As DeepSpeed does when it creates the group.
        binds_device = backend == "nccl" and ranks.world_size > 1
        join_process_group(
            ranks,
            backend,
            device if binds_device else None,
            software.result() if software else None,
            allow_mixed_code=allow_mixed_code,
        )
    deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False, verbose=False)
    torch.distributed.distributed_c10d._set_pg_timeout(timedelta(seconds=collective_timeout_s))
    # DeepSpeed would clone the group, which on GPUs is a second NCCL communicator with buffers of
    # its own.
    deepspeed.utils.groups._WORLD_GROUP = torch.distributed.group.WORLD
    return device


def _complete_address(ranks: Ranks) -> None:
    """Set what DeepSpeed reads, if a single rank was started without a launcher."""
    # A job's script may have set an address for other steps, but no rank.
    has_address = all(map(os.environ.get, ("RANK", "MASTER_ADDR", "MASTER_PORT")))
    if ranks.world_size == 1 and not has_address:
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
