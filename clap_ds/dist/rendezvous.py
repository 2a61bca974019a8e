"""How ranks find each other: places from SLURM where no launcher gives them, and a first meeting that fails soon and
names who is missing.

torch waits 30 minutes for a peer that will never come, and says only that it timed out. Leaves ranks of other launchers
to `clap_ds.dist.distributed`. Top-level imports stay light.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import socket
from datetime import timedelta
from typing import Any

from clap_ds.dist.hostfile import expand, master_port, parse_tasks

CONNECT_S = 45.0  # for all ranks to meet, which start within seconds of each other


class UnreachableError(RuntimeError):
    """A rank or its host can't be reached; the message names it."""


class PortTakenError(Exception):
    """Something else, perhaps another run, listens where this run's ranks were to meet."""


def free_port() -> int:
    """A port for rank 0 to listen on, later. Not one of the kernel's choosing, which it could give to others until then."""
    draw = random.SystemRandom()
    for _ in range(100):
        with contextlib.suppress(OSError), socket.socket() as listener:
            port = draw.randrange(20000, 32000)  # by default the kernel's own begin at 32768
            listener.bind(("127.0.0.1", port))
            return port
    raise OSError(errno.EADDRINUSE, "no free port among a hundred between 20000 and 32000")


def adopt_slurm_step() -> None:
    """Set RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT from the SLURM step this
    process is a task of.

    Does nothing when a launcher has set RANK, or outside a step of several tasks: a batch script's own process has
    SLURM_PROCID, too, but is no rank.
    """
    tasks = os.environ.get("SLURM_STEP_NUM_TASKS", "")
    if os.environ.get("RANK") or not tasks.isdecimal() or int(tasks) < 2 or "SLURM_PROCID" not in os.environ:
        return
    hosts = expand(os.environ["SLURM_STEP_NODELIST"])
    local_tasks = parse_tasks(os.environ["SLURM_STEP_TASKS_PER_NODE"])[int(os.environ["SLURM_NODEID"])]
    os.environ.update(RANK=os.environ["SLURM_PROCID"], WORLD_SIZE=tasks)
    os.environ.update(LOCAL_RANK=os.environ["SLURM_LOCALID"], LOCAL_WORLD_SIZE=str(local_tasks))
    os.environ.setdefault("MASTER_ADDR", hosts[0])
    port = master_port(f"{os.environ['SLURM_JOB_ID']}.{os.environ['SLURM_STEP_ID']}")
    os.environ.setdefault("MASTER_PORT", str(port))


def meet(rank: int, world_size: int, backend: str) -> None:
    """Make the default process group once every rank has said where it is.

    Raises:
        UnreachableError: on every rank that is there, when another doesn't come in time.
        PortTakenError: something else listens at the address; on the ranks that notice.
    """
    import torch.distributed as dist

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    limit = timedelta(seconds=CONNECT_S)
    here = f"{socket.gethostname()}: rank {rank}"
    try:
        store = dist.TCPStore(
            address, port, world_size, is_master=rank == 0, timeout=limit, wait_for_workers=False, multi_tenant=True
        )
        if not _is_of_this_job(store, rank, limit):
            raise PortTakenError(_taken(address, port))
        store.set(f"clap/host/{rank}", socket.gethostname())
        problem = _gather(store, world_size, limit) if rank == 0 else ""
        if rank == 0:
            store.set("clap/problem", problem)
        else:
            store.wait(["clap/problem"], limit * 1.2)
            problem = store.get("clap/problem").decode()
    except RuntimeError as error:
        if rank == 0 and "EADDRINUSE" in str(error):
            raise PortTakenError(_taken(address, port)) from None
        reason = str(error).splitlines()[0]
        raise UnreachableError(
            f"{here} can't reach rank 0 at {address}:{port} within {CONNECT_S:.0f} s: {reason}"
        ) from None
    if problem:
        raise UnreachableError(problem)
    try:
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=limit)
    except RuntimeError as error:
        raise UnreachableError(f"{here} can't reach a peer: {str(error).splitlines()[0]}") from None


def _taken(address: str, port: int) -> str:
    where = f"port {port} of {address}, where the ranks are to meet"
    return f"{where}, is taken, perhaps by another run: give the launcher a free one by --master_port"


def _is_of_this_job(store: Any, rank: int, limit: timedelta) -> bool:
    """Whether rank 0 is one of ours, as far as jobs can be told apart: of two runs that start at once on one port, the later
    one's ranks would meet the earlier one's rank 0, and break both."""
    job = os.environ.get("CLAP_JOB", "")
    if not job and os.environ.get("CROSS_SIZE") == "1":
        job = str(os.getppid())  # DeepSpeed's launcher on a single host is the parent of all ranks
    if rank == 0:
        store.set("clap/job", job)
        return True
    store.wait(["clap/job"], limit)
    return bool(store.get("clap/job").decode() == job)


def _gather(store: Any, world_size: int, limit: timedelta) -> str:
    """Rank 0 waits for every rank's greeting; says who is missing."""
    keys = [f"clap/host/{rank}" for rank in range(world_size)]
    try:
        store.wait(keys, limit)
    except RuntimeError:
        missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
        if missing:
            return f"{_shown(missing)} of {world_size}{_hosts_of(missing, world_size)} didn't connect within {CONNECT_S:.0f} s"
    return ""


def _shown(ranks: list[int]) -> str:
    some = ", ".join(map(str, ranks[:8])) + (", …" if len(ranks) > 8 else "")
    return f"rank {some}" if len(ranks) == 1 else f"ranks {some}"


def _hosts_of(ranks: list[int], world_size: int) -> str:
    """Hosts of ranks that never spoke, as far as SLURM's environment tells."""
    try:
        hosts = expand(os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_JOB_NODELIST") or "")
    except ValueError:
        return ""
    if world_size % len(hosts):
        return ""
    names = dict.fromkeys(hosts[rank // (world_size // len(hosts))] for rank in ranks)
    return f" ({', '.join(names)})"
