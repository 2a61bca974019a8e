"""How ranks find each other: places from SLURM where no launcher gives them, and a first meeting that has a limit and
names who is missing.

torch waits 30 minutes for a peer that will never come, and says only that it timed out. Leaves ranks of other launchers
to `clap_ds.dist.distributed`. Top-level imports stay light.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import random
import socket
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from clap_ds.config.errors import UserError
from clap_ds.dist.hostfile import expand, master_port, parse_tasks
from clap_ds.dist.limits import within

if TYPE_CHECKING:
    import torch

START_LIMIT_S = 300.0
"""For all ranks to meet, where CLAP_START_LIMIT_S doesn't say: some import from a disk that others have in memory."""
SAY_S = 10.0  # between two lines on who is missing
LOOK_S = 0.1  # between rank 0's looks who is there
LONGEST_WAIT_S = 2.0  # between attempts to reach rank 0
_ARRIVED = "clap/arrived"  # numbers of the ranks that are there, each followed by a space


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


def meet(
    rank: int, world_size: int, backend: str, hosts: Sequence[str] = (), device: torch.device | None = None
) -> None:
    """Make the default process group once every rank has said that it is there.

    Args:
        hosts: of every rank, where that is known, to be named with those that are missing.
        device: this rank's GPU, to which NCCL is bound and connects at once, not in the first collective.

    Raises:
        UnreachableError: on every rank that is there, when another doesn't come in time.
        PortTakenError: something else listens at the address; on the ranks that notice.
        UserError: CLAP_START_LIMIT_S isn't a number of seconds.
    """
    import torch.distributed as dist

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    limit_s = start_limit_s()
    limit = timedelta(seconds=limit_s)
    here = f"{socket.gethostname()}: rank {rank}"
    if rank != 0 and (reason := _unreachable(address, port, limit_s)):
        raise UnreachableError(f"{here} can't reach rank 0 at {address}:{port} within {limit_s:.0f} s: {reason}")

    def connect() -> Any:
        return dist.TCPStore(
            address, port, world_size, is_master=rank == 0, timeout=limit, wait_for_workers=False, multi_tenant=True
        )

    try:
        # Another program that listens there and says nothing would keep torch for ever.
        store = connect() if rank == 0 else within(limit_s, connect)
        if not _is_of_this_job(store, rank, limit):
            raise PortTakenError(_taken(address, port))
        store.append(_ARRIVED, f"{rank} ")
        problem = _gather(store, world_size, limit_s, hosts) if rank == 0 else ""
        if rank == 0:
            store.set("clap/problem", problem)
        else:
            store.wait(["clap/problem"], limit * 1.2)
            problem = store.get("clap/problem").decode()
    except (RuntimeError, TimeoutError) as error:
        is_others = isinstance(error, TimeoutError) or "EADDRINUSE" in str(error) or "Ping failed" in str(error)
        if is_others:
            raise PortTakenError(_taken(address, port)) from None
        reason = str(error).splitlines()[0]
        raise UnreachableError(f"{here} has lost rank 0 at {address}:{port} before all ranks met: {reason}") from None
    if problem:
        raise UnreachableError(problem)
    try:
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=limit, device_id=device)
    except RuntimeError as error:
        raise UnreachableError(f"{here} can't reach a peer: {str(error).splitlines()[0]}") from None


def start_limit_s() -> float:
    """Seconds that all ranks have to meet; a UserError where the environment's isn't a number above 0."""
    given = os.environ.get("CLAP_START_LIMIT_S") or START_LIMIT_S
    with contextlib.suppress(ValueError):
        if 0 < (seconds := float(given)) < math.inf:
            return seconds
    raise UserError(f"CLAP_START_LIMIT_S={given!r} in the environment: expected seconds, more than 0")


def _unreachable(address: str, port: int, limit_s: float) -> str:
    """Why nothing can be reached there within the limit, or nothing. torch, left alone, gives up at once for some reasons, and
    for others writes a stack to standard error at every attempt."""
    begun, wait_s = time.monotonic(), 0.05
    deadline, said = begun + limit_s, os.environ.get("LOCAL_RANK", "0") != "0"  # a host says it once
    while True:
        try:
            socket.create_connection((address, port), timeout=max(0.1, deadline - time.monotonic())).close()
            return ""
        except OSError as error:
            reason = error.strerror or str(error)
        now = time.monotonic()
        if now >= deadline:
            return reason
        if not said and now - begun >= SAY_S:
            said = True
            unreached = f"{socket.gethostname()}: rank 0 at {address}:{port} can't be reached yet: {reason}"
            print(f"{unreached}; trying for {limit_s:.0f} s", file=sys.stderr, flush=True)
        # There may be thousands of ranks, and they began together.
        time.sleep(min(wait_s * random.uniform(0.5, 1.0), deadline - now))
        wait_s = min(2 * wait_s, LONGEST_WAIT_S)


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


def _gather(store: Any, world_size: int, limit_s: float, hosts: Sequence[str]) -> str:
    """Rank 0 waits for every rank, and says now and then who is missing; what to say where one stays away."""
    begun = said = time.monotonic()
    while True:
        # One question to the store, however many ranks there are. (`wait` warns by itself whenever its time is over.)
        missing = sorted(set(range(world_size)) - set(map(int, store.get(_ARRIVED).split())))
        if not missing:
            return ""
        now = time.monotonic()
        if now - begun >= limit_s or now - said >= SAY_S:
            where = _hosts_of(missing, hosts or _slurm_hosts(world_size))
            if now - begun >= limit_s:
                return f"{_shown(missing)} of {world_size}{where} didn't connect within {limit_s:.0f} s"
            there, said = f"{world_size - len(missing)} of {world_size} ranks after {now - begun:.0f} s", now
            print(f"{there}, missing: {_shown(missing)}{where}", file=sys.stderr, flush=True)
        time.sleep(LOOK_S)


def _shown(ranks: list[int]) -> str:
    some = ", ".join(map(str, ranks[:8])) + (", …" if len(ranks) > 8 else "")
    return f"rank {some}" if len(ranks) == 1 else f"ranks {some}"


def _hosts_of(ranks: list[int], hosts: Sequence[str]) -> str:
    names = list(dict.fromkeys(hosts[rank] for rank in ranks)) if hosts else []
    return f" ({', '.join(names[:8])}{', …' if len(names) > 8 else ''})" if names else ""


def _slurm_hosts(world_size: int) -> list[str]:
    """Every rank's host, as far as SLURM's environment tells."""
    try:
        hosts = expand(os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_JOB_NODELIST") or "")
    except ValueError:
        return []
    per_host, odd = divmod(world_size, len(hosts))
    return [] if odd else [host for host in hosts for _ in range(per_host)]
