"""Rendezvous of ranks with a timeout that names missing ranks. Top-level imports are light."""

from __future__ import annotations

import errno
import ipaddress
import json
import os
import socket
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from clap_ds.config.errors import CollectiveUserError
from clap_ds.distributed.error_file import some

if TYPE_CHECKING:
    import torch

START_LIMIT_S = 300.0
"""For all ranks to connect: some import from disk what others have cached."""
SAY_S = 10.0  # between reports of missing ranks
LOOK_S = 0.1  # between rank 0's checks


class UnreachableError(RuntimeError):
    """A rank or host, named in the message, is unreachable; `hosts` are those of the missing ranks."""

    def __init__(self, message: str, hosts: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.hosts = list(hosts)


def meet(
    rank: int,
    world_size: int,
    backend: str,
    hosts: Sequence[str] = (),
    device: torch.device | None = None,
    run: str = "",
) -> None:
    """Create the default process group once every rank has connected.

    Args:
        hosts: of every rank, if known.
        device: this rank's GPU, which makes NCCL connect now instead of in the first collective.
        run: identifier, equal on all ranks and unique to the run.

    Raises:
        UnreachableError: on every connected rank, if another doesn't connect in time.
        CollectiveUserError: on rank 0, if the address is another host's or the port is in use.
    """
    import torch.distributed as dist

    address, port, limit = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timedelta(seconds=START_LIMIT_S)
    here, there = f"{socket.gethostname()}: rank {rank}", f"rank 0 at {address}:{port}"
    try:
        fd = _listener(address, port, world_size) if rank == 0 else None
        tcp = dist.TCPStore(address, port, world_size, rank == 0, limit, False, True, fd)
        store: Any = dist.PrefixStore(run, tcp)
        store.set_timeout(1.2 * limit)  # rank 0 answers after waiting for all others
        store.append("arrived", f"{rank} ")
        if rank == 0:
            store.set("missing", json.dumps(_wait_for_all(store, world_size, hosts)))
        who, of_hosts = json.loads(store.get("missing"))
    except (OSError, RuntimeError) as error:
        if "EADDRINUSE" in str(error) or getattr(error, "errno", None) == errno.EADDRINUSE:
            why = "is already in use: pass a free one to the launcher with --master_port"
            raise CollectiveUserError(f"rendezvous port {port} of {address} {why}") from None
        raise UnreachableError(f"{here} can't reach {there}: {str(error).splitlines()[0]}") from None
    if who:
        raise UnreachableError(f"{who} didn't connect within {START_LIMIT_S:.0f} s", of_hosts)
    try:
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=limit, device_id=device)
    except RuntimeError as error:
        raise UnreachableError(f"{here} can't reach a peer: {str(error).splitlines()[0]}") from None


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


def _wait_for_all(store: Any, world_size: int, hosts: Sequence[str]) -> tuple[str, list[str]]:
    """Wait on rank 0 and report missing ranks; return those missing at the end, as text, and their hosts."""
    begun = said = time.monotonic()
    while True:
        # One request for any number of ranks. (`wait` prints a warning at each timeout.)
        missing = sorted(set(range(world_size)) - set(map(int, store.get("arrived").split())))
        if not missing:
            return "", []
        of_hosts = list(dict.fromkeys(hosts[rank] for rank in missing)) if hosts else []
        who = f"rank{'s' if len(missing) > 1 else ''} {some(missing)}" + (f" ({some(of_hosts)})" if hosts else "")
        now = time.monotonic()
        if now - begun >= START_LIMIT_S:
            return who, of_hosts
        if now - said >= SAY_S:
            said, here = now, world_size - len(missing)
            print(
                f"{here} of {world_size} ranks after {now - begun:.0f} s, missing: {who}", file=sys.stderr, flush=True
            )
        time.sleep(LOOK_S)
