"""How ranks meet: within a limit, and with the names of those that are missing. Top-level imports stay light."""

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

from clap_ds.config.errors import AgreedError
from clap_ds.distributed.error_file import some

if TYPE_CHECKING:
    import torch

START_LIMIT_S = 300.0
"""For all ranks to meet: some import from a disk that others have in memory."""
SAY_S = 10.0  # between two lines on who is missing
LOOK_S = 0.1  # between rank 0's looks who is there


class UnreachableError(RuntimeError):
    """A rank or its host can't be reached; the message names it, `hosts` are those of the ranks that are missing."""

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
    """Make the default process group once every rank has said that it is there.

    Args:
        hosts: of every rank, where that is known.
        device: this rank's GPU, to which NCCL is bound and connects at once, not in the first collective.
        run: the same on all ranks, and another one in other runs.

    Raises:
        UnreachableError: on every rank that is there, when another doesn't come in time.
        AgreedError: on rank 0, the address is another host's, or something else listens there.
    """
    import torch.distributed as dist

    address, port, limit = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timedelta(seconds=START_LIMIT_S)
    here, there = f"{socket.gethostname()}: rank {rank}", f"rank 0 at {address}:{port}"
    try:
        fd = _listener(address, port, world_size) if rank == 0 else None
        tcp = dist.TCPStore(address, port, world_size, rank == 0, limit, False, True, fd)
        store: Any = dist.PrefixStore(run, tcp)
        store.set_timeout(1.2 * limit)  # rank 0 waits for all others before it answers
        store.append("arrived", f"{rank} ")
        if rank == 0:
            store.set("missing", json.dumps(_wait_for_all(store, world_size, hosts)))
        who, of_hosts = json.loads(store.get("missing"))
    except (OSError, RuntimeError) as error:
        if "EADDRINUSE" in str(error) or getattr(error, "errno", None) == errno.EADDRINUSE:
            why = "where the ranks are to meet, is taken: give the launcher a free one by --master_port"
            raise AgreedError(f"port {port} of {address}, {why}") from None
        raise UnreachableError(f"{here} can't reach {there}: {str(error).splitlines()[0]}") from None
    if who:
        raise UnreachableError(f"{who} didn't connect within {START_LIMIT_S:.0f} s", of_hosts)
    try:
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=limit, device_id=device)
    except RuntimeError as error:
        raise UnreachableError(f"{here} can't reach a peer: {str(error).splitlines()[0]}") from None


def _listener(address: str, port: int, world_size: int) -> int | None:
    """A socket that listens where the ranks are to meet, and nowhere else; None where torch is to listen on all addresses: the
    name may stand for another one here than it does for others. Raises AgreedError where it is another host's, or OSError."""
    of_this_host = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE")
    for family, _, _, _, place in socket.getaddrinfo(address, port, type=socket.SOCK_STREAM):
        if ipaddress.ip_address(place[0]).is_loopback and of_this_host != str(world_size):
            return None
        try:
            return socket.create_server((place[0], port), family=family, backlog=max(128, world_size)).detach()
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
    raise AgreedError(
        f"rank 0 runs on {socket.gethostname()}, and the ranks are to meet at {address}, which is another host:"
        " deepspeed starts the ranks of a hostfile with a single host where it runs itself, unless --force_multi is given"
    )


def _wait_for_all(store: Any, world_size: int, hosts: Sequence[str]) -> tuple[str, list[str]]:
    """On rank 0: those that stay away to the end, and their hosts; meanwhile it says who is missing."""
    begun = said = time.monotonic()
    while True:
        # One question to the store, however many ranks there are. (`wait` warns by itself whenever its time is over.)
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
