"""Rendezvous of ranks with a timeout that names missing ranks. Top-level imports are light."""

from __future__ import annotations

import errno
import ipaddress
import itertools
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from clap_ds.config.errors import CollectiveUserError
from clap_ds.distributed.error_file import some, this_rank
from clap_ds.distributed.timeout import within

if TYPE_CHECKING:
    import torch

    from clap_ds.distributed.init import Ranks

START_LIMIT_S = 300.0
"""For all ranks to connect, and for one that no longer responds: some import from disk what others have cached."""
SAY_S = 10.0  # between reports of missing ranks
BEAT_S = 1.0  # between a rank's signs of life
LOOK_S = 0.1  # between rank 0's checks


class UnreachableError(RuntimeError):
    """A rank or host, named in the message, is unreachable; `hosts` are those of the missing ranks."""

    def __init__(self, message: str, hosts: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.hosts = list(hosts)


class RollCall(threading.Thread):
    """While ranks start, reports those that haven't connected or don't respond: rank 0 all others, and others rank 0."""

    def __init__(self, ranks: Ranks, give_up: Callable[[UnreachableError], object]) -> None:
        super().__init__(daemon=True, name="clap.roll_call")
        self._ranks, self._give_up = ranks, give_up
        self.store: Any = None  # once connected
        self.is_complete = False  # whether the process group exists
        self._began = self._said = time.monotonic()
        self._beats: dict[int, bytes] = {}
        self._heard = dict.fromkeys(range(1, ranks.world_size) if ranks.rank == 0 else [0], self._began)

    def run(self) -> None:
        for beat in itertools.count():
            if this_rank.started.wait(BEAT_S):
                return
            if self.store is not None:
                with suppress(RuntimeError, TimeoutError):  # rank 0 is gone or doesn't respond
                    within(SAY_S, partial(self._exchange, str(beat)))
            now = time.monotonic()
            if missing := [rank for rank, at in self._heard.items() if rank not in self._beats or now - at > SAY_S]:
                self._report(missing, now)

    def _exchange(self, beat: str) -> None:
        self.store.set(f"here/{self._ranks.rank}", beat)
        there = [rank for rank in self._heard if rank in self._beats or self.store.check([f"here/{rank}"])]
        for rank, value in zip(there, self.store.multi_get([f"here/{rank}" for rank in there]), strict=True):
            if self._beats.get(rank) != value:
                self._beats[rank], self._heard[rank] = value, time.monotonic()

    def _report(self, missing: list[int], now: float) -> None:
        own, size, names = self._ranks.rank, self._ranks.world_size, self._ranks.hosts
        hosts = list(dict.fromkeys(names[rank] for rank in missing)) if names else []
        who = f"rank{'s' * (len(missing) > 1)} {some(missing)}" + f" ({some(hosts)})" * bool(hosts)
        if now - self._said >= SAY_S and (own <= 1 or self._ranks.local_rank == 0):
            self._said = now
            here = f"{size - len(missing)} of {size} ranks" if own == 0 else f"{socket.gethostname()}: rank {own}"
            print(f"{here} after {now - self._began:.0f} s, missing: {who}", file=sys.stderr, flush=True)
        silent_s = now - min(self._heard[rank] for rank in missing)
        if own == 0 and not self.is_complete and silent_s >= START_LIMIT_S:
            self._give_up(UnreachableError(f"{who} didn't connect within {START_LIMIT_S:.0f} s", hosts))


def meet(
    ranks: Ranks, backend: str, device: torch.device | None, give_up: Callable[[UnreachableError], object]
) -> None:
    """Create the default process group once every rank has connected.

    Args:
        device: this rank's GPU, which makes NCCL connect now instead of in the first collective.
        give_up: called in a thread of rank 0, with what to report, if a rank doesn't connect in time.

    Raises:
        UnreachableError: if this rank can't connect.
        CollectiveUserError: on rank 0, if the address is another host's or the port is in use.
    """
    import torch.distributed as dist

    rank, world_size = ranks.rank, ranks.world_size
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    limit = timedelta(seconds=1.2 * START_LIMIT_S)  # longer than the roll call's, which names who is missing
    here, what = f"{socket.gethostname()}: rank {rank}", f"rank 0 at {address}:{port}"
    roll_call = RollCall(ranks, give_up)
    if world_size > 1:
        roll_call.start()
    try:
        listens = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"  # else torchrun does
        fd = _listener(address, port, world_size) if listens else None
        tcp = dist.TCPStore(address, port, world_size, listens, limit, False, True, fd)
        store, own = dist.PrefixStore(ranks.run, tcp), tcp.clone()  # type: ignore[attr-defined]
        roll_call.store = dist.PrefixStore(ranks.run, own)
        store.set(f"here/{rank}", "")
        if rank == 0:
            while not store.check([f"here/{each}" for each in range(world_size)]):
                time.sleep(LOOK_S)
            store.set("complete", "")
        store.get("complete")
        what = "a peer"
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=limit, device_id=device)
        roll_call.is_complete = True
    except (OSError, RuntimeError) as error:
        if "EADDRINUSE" in str(error) or getattr(error, "errno", None) == errno.EADDRINUSE:
            why = "is already in use: pass a free one to the launcher with --master_port"
            raise CollectiveUserError(f"rendezvous port {port} of {address} {why}") from None
        raise UnreachableError(f"{here} can't reach {what}: {str(error).splitlines()[0]}") from None


def _listener(address: str, port: int, world_size: int) -> int | None:
    """Open a socket that listens only at the rendezvous address. OSError, or CollectiveUserError if it is another host's.
    Returns None if torch must listen on all addresses: the name is loopback here, but not on other hosts."""
    of_this_host = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE")
    for family, _, _, _, place in socket.getaddrinfo(address, port, type=socket.SOCK_STREAM):
        if ipaddress.ip_address(place[0]).is_loopback and of_this_host != str(world_size):
            return None
        try:
            return socket.create_server((place[0], port), family=family, backlog=max(128, world_size)).detach()
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
    raise CollectiveUserError(
        f"rank 0 runs on {socket.gethostname()}, but the rendezvous address {address} is another host's:"
        " for a hostfile with one host, deepspeed starts ranks locally unless you pass --force_multi"
    )
