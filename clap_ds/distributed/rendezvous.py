"""Rendezvous of ranks with a timeout that names missing ranks. Top-level imports are light."""

from __future__ import annotations

import errno
import itertools
import os
import socket
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, NoReturn

from clap_ds.config.errors import CollectiveUserError, first_line, printable, some
from clap_ds.distributed.error_file import UNREACHABLE, this_rank, write_error_file

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store

    from clap_ds.distributed.init import Ranks

START_LIMIT_S = 300.0
"""For all ranks to connect, and for one that no longer responds: some import from disk what others have cached."""
SAY_S = 10.0  # between reports of missing ranks
BEAT_S = 1.0  # between a rank's signs of life


class UnreachableError(RuntimeError):
    """A rank or host, named in the message, is unreachable; `hosts` are those of the missing ranks."""

    def __init__(self, message: str, hosts: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.hosts = list(hosts)


def give_up(error: UnreachableError) -> NoReturn:
    """Record and print the error, and exit at once."""
    write_error_file(UNREACHABLE, str(error), 1, hosts=error.hosts)
    print("error:", printable(str(error)), file=sys.stderr, flush=True)
    os._exit(1)


def _send_beats(store: Store, rank: int) -> None:
    """Give signs of life until the first step."""
    with suppress(RuntimeError):  # rank 0 is gone
        for beat in itertools.count():
            store.set(f"beat/{rank}", str(beat))
            if this_rank.started.wait(BEAT_S):
                return


def _call_roll(store: Store, ranks: Ranks, joined: threading.Event) -> None:
    """Report ranks that haven't connected or don't respond, until the first step."""
    began = said = time.monotonic()
    heard, beats = dict.fromkeys(range(1, ranks.world_size), began), dict[int, bytes]()
    while not this_rank.started.wait(BEAT_S):
        now = time.monotonic()
        for rank in heard:
            if store.check([key := f"beat/{rank}"]) and beats.get(rank) != (beat := store.get(key)):
                beats[rank], heard[rank] = beat, now
        missing = [rank for rank, at in heard.items() if rank not in beats or now - at > SAY_S]
        hosts = list(dict.fromkeys(ranks.hosts[rank] for rank in missing)) if ranks.hosts else []
        who = f"rank{'s' * (len(missing) > 1)} {some(missing)}" + f" ({some(hosts)})" * bool(hosts)
        if missing and now - said >= SAY_S:
            said, size = now, ranks.world_size
            there = f"{size - len(missing)} of {size} ranks after {now - began:.0f} s"
            print(f"{there}, missing: {who}", file=sys.stderr, flush=True)
        if missing and not joined.is_set() and now - min(heard[rank] for rank in missing) >= START_LIMIT_S:
            give_up(UnreachableError(f"{who} didn't connect within {START_LIMIT_S:.0f} s", hosts))


def meet(ranks: Ranks, backend: str, device: torch.device | None) -> None:
    """Create the default process group once every rank has connected; exit on rank 0 if one doesn't in time.

    Args:
        device: this rank's GPU, which makes NCCL connect now instead of in the first collective.

    Raises:
        UnreachableError: if this rank can't connect.
        CollectiveUserError: on rank 0, if the address is another host's or the port is in use.
    """
    import torch.distributed as dist

    rank, world_size, joined = ranks.rank, ranks.world_size, threading.Event()
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    limit = timedelta(seconds=1.2 * START_LIMIT_S)  # longer than rank 0's, which names who is missing
    what = f"rank 0 at {address}:{port}"
    try:
        listens = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"  # else torchrun does
        if listens:
            _check_address(address, port)
        tcp = dist.TCPStore(address, port, world_size, listens, limit, wait_for_workers=False)
        own = dist.PrefixStore(ranks.run, tcp.clone())  # type: ignore[attr-defined]
        task = partial(_send_beats, own, rank) if rank else partial(_call_roll, own, ranks, joined)
        threading.Thread(target=task, daemon=True, name="clap.roll_call").start()
        store = dist.PrefixStore(ranks.run, tcp)
        if store.add("connected", 1) == world_size:
            store.set("complete", "")
        store.get("complete")
        what = "a peer"
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=limit, device_id=device)
        joined.set()
    except (OSError, RuntimeError) as error:
        said = f"{socket.gethostname()}: rank {rank} can't reach {what}: {first_line(error)}"
        raise UnreachableError(said) from None


def _check_address(address: str, port: int) -> None:
    """Raise CollectiveUserError if the address is another host's, or the port in use."""
    family = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0][0]
    try:
        socket.create_server((address, port), family=family).close()
    except OSError as error:
        problems = {
            errno.EADDRINUSE: f"rendezvous port {port} of {address} is already in use:"
            " pass a free one to the launcher with --master_port",
            errno.EADDRNOTAVAIL: f"rank 0 runs on {socket.gethostname()}, but the rendezvous address {address} is another"
            " host's: for a hostfile with one host, deepspeed starts ranks locally unless you pass --force_multi",
        }
        raise CollectiveUserError(problems.get(error.errno or 0, str(error))) from None
