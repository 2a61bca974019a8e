"""How ranks meet: within a limit, and with the names of those that are missing.

torch waits 30 minutes for a peer that will never come, and says only that it timed out. Leaves ranks of other launchers
to `clap_ds.ranks.distributed`. Top-level imports stay light.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from clap_ds.ranks.failure import some
from clap_ds.ranks.hostfile import expand
from clap_ds.ranks.limits import within

if TYPE_CHECKING:
    import torch

START_LIMIT_S = 300.0
"""For all ranks to meet: some import from a disk that others have in memory."""
SAY_S = 10.0  # between two lines on who is missing
LOOK_S = 0.1  # between rank 0's looks who is there
LONGEST_WAIT_S = 2.0  # between attempts to reach rank 0
_ARRIVED = "clap/arrived"  # numbers of the ranks that are there, each followed by a space


class UnreachableError(RuntimeError):
    """A rank or its host can't be reached; the message names it, `hosts` are those of the ranks that are missing."""

    def __init__(self, message: str, hosts: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.hosts = list(hosts)


class PortTakenError(Exception):
    """Something else, perhaps another run, listens where this run's ranks were to meet."""


def meet(
    rank: int,
    world_size: int,
    backend: str,
    hosts: Sequence[str] = (),
    device: torch.device | None = None,
    run: str = "",
) -> None:
    """Make the default process group once every rank has said that it is there.

    Args:
        hosts: of every rank, where that is known, to be named with those that are missing.
        device: this rank's GPU, to which NCCL is bound and connects at once, not in the first collective.
        run: the same on all ranks, and another one in other runs: of two that start at once on one port, the later one's ranks
            would meet the earlier one's rank 0, and break both.

    Raises:
        UnreachableError: on every rank that is there, when another doesn't come in time.
        PortTakenError: something else listens at the address; on the ranks that notice.
    """
    import torch.distributed as dist

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    limit, hosts = timedelta(seconds=START_LIMIT_S), hosts or _slurm_hosts(world_size)
    here, there = f"{socket.gethostname()}: rank {rank}", f"rank 0 at {address}:{port}"
    taken = f"port {port} of {address}, where the ranks are to meet, is taken, perhaps by another run"
    taken += ": give the launcher a free one by --master_port"
    if rank != 0 and (reason := _unreachable(address, port)):
        raise UnreachableError(f"{here} can't reach {there} within {START_LIMIT_S:.0f} s: {reason}")
    how: dict[str, Any] = {"is_master": rank == 0, "timeout": limit, "wait_for_workers": False, "multi_tenant": True}
    missing: list[int] = []
    try:
        # Another program that listens there and says nothing would keep torch for ever.
        store: Any = within(START_LIMIT_S, lambda: dist.TCPStore(address, port, world_size, **how))
        if rank == 0:
            store.set("clap/run", run)
        store.wait(["clap/run"], limit)
        if store.get("clap/run").decode() != run:
            raise PortTakenError(taken)
        store.append(_ARRIVED, f"{rank} ")
        if rank == 0:
            missing = _gather(store, world_size, hosts)
            late = f"{_shown(missing, hosts)} didn't connect within {START_LIMIT_S:.0f} s" if missing else ""
            store.set("clap/problem", late)
        store.wait(["clap/problem"], limit * 1.2)
        problem = store.get("clap/problem").decode()
    except (RuntimeError, TimeoutError) as error:
        if isinstance(error, TimeoutError) or "EADDRINUSE" in str(error) or "Ping failed" in str(error):
            raise PortTakenError(taken) from None
        reason = str(error).splitlines()[0]
        raise UnreachableError(f"{here} has lost {there} before all ranks met: {reason}") from None
    if problem:
        raise UnreachableError(problem, _hosts_of(missing, hosts))
    try:
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=limit, device_id=device)
    except RuntimeError as error:
        raise UnreachableError(f"{here} can't reach a peer: {str(error).splitlines()[0]}") from None


def _unreachable(address: str, port: int) -> str:
    """Why nothing can be reached there within the limit, or nothing. torch, left alone, gives up at once for some reasons, and
    for others writes a stack to standard error at every attempt."""
    deadline, wait_s = time.monotonic() + START_LIMIT_S, 0.05
    while True:
        try:
            socket.create_connection((address, port), timeout=max(0.1, deadline - time.monotonic())).close()
            return ""
        except OSError as error:
            reason = error.strerror or str(error)
        if (left_s := deadline - time.monotonic()) <= 0:
            return reason
        # There may be thousands of ranks, and they began together.
        time.sleep(min(wait_s * random.uniform(0.5, 1.0), left_s))
        wait_s = min(2 * wait_s, LONGEST_WAIT_S)


def _gather(store: Any, world_size: int, hosts: Sequence[str]) -> list[int]:
    """Rank 0 waits for every rank, and says now and then who is missing; those that stay away."""
    begun = said = time.monotonic()
    while True:
        # One question to the store, however many ranks there are. (`wait` warns by itself whenever its time is over.)
        missing = sorted(set(range(world_size)) - set(map(int, store.get(_ARRIVED).split())))
        now = time.monotonic()
        if not missing or now - begun >= START_LIMIT_S:
            return missing
        if now - said >= SAY_S:
            said, here = now, world_size - len(missing)
            who = f"{here} of {world_size} ranks after {now - begun:.0f} s, missing: {_shown(missing, hosts)}"
            print(who, file=sys.stderr, flush=True)
        time.sleep(LOOK_S)


def _shown(ranks: list[int], hosts: Sequence[str]) -> str:
    where = f" ({some(_hosts_of(ranks, hosts))})" if hosts else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {some(ranks)}{where}"


def _hosts_of(ranks: list[int], hosts: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(hosts[rank] for rank in ranks)) if hosts else []


def _slurm_hosts(world_size: int) -> list[str]:
    """Every rank's host, as far as SLURM tells."""
    with contextlib.suppress(ValueError):
        hosts = expand(os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_JOB_NODELIST") or "")
        per_host, odd = divmod(world_size, len(hosts))
        return [] if odd else [host for host in hosts for _ in range(per_host)]
    return []
