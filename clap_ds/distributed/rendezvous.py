"""Rendezvous of ranks with a timeout that names missing ranks.

torch's store is neither encrypted nor authenticated. What the ranks of a job say about themselves
is signed with a key in the job's folder, so that another program that reaches the port can't take a
rank's place.
"""

from __future__ import annotations

import errno
import hmac
import itertools
import json
import os
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch.distributed import Store

from clap_ds.distributed.error_file import LINK, UnreachableError, exit_unreachable, this_rank
from clap_ds.distributed.hostfile import KEY_FILE
from clap_ds.distributed.init import Ranks
from clap_ds.distributed.software import Versions, describe_differences
from clap_ds.utils.errors import CollectiveUserError, first_line, some, warn
from clap_ds.utils.files import read_bytes

# For all ranks to connect, and for one that no longer responds: some import from disk what others
# have cached.
START_LIMIT_S = 300.0
# Other ranks wait longer than rank 0, which names those that are missing.
JOIN_LIMIT_FACTOR = 1.2
RESOLVE_LIMIT_S = 20.0  # for a host to resolve rank 0's name
READ_GRACE_S = 1.0  # for other ranks to read the store, which ends with rank 0
REPORT_INTERVAL_S = 10.0
HEARTBEAT_INTERVAL_S = 1.0
SIGNATURE_DIGITS = 64


def _send_heartbeats(store: Store, rank: int) -> None:
    """Give signs of life until the first step. The main function of a thread of other ranks."""
    with suppress(RuntimeError):  # rank 0 is gone
        for beat in itertools.count():
            store.set(f"beat/{rank}", str(beat))
            if this_rank.started.wait(HEARTBEAT_INTERVAL_S):
                return


def _report_missing_ranks(store: Store, ranks: Ranks, joined: threading.Event) -> None:
    """Report ranks that haven't connected or don't respond, until the first step. Exit if one
    doesn't connect in time. The main function of rank 0's thread."""
    # torch's barrier of the elastic store names missing ranks only once its time is over.
    began = time.monotonic()
    reported_at = began
    heard_at = dict.fromkeys(range(1, ranks.world_size), began)
    beats: dict[int, bytes] = {}
    while not this_rank.started.wait(HEARTBEAT_INTERVAL_S):
        now = time.monotonic()
        missing = []
        for rank in heard_at:
            beat = store.get(f"beat/{rank}") if store.check([f"beat/{rank}"]) else None
            if beat is not None and beat != beats.get(rank):
                beats[rank] = beat
                heard_at[rank] = now
            if beat is None or now - heard_at[rank] > REPORT_INTERVAL_S:
                missing.append(rank)
        if not missing:
            continue
        hosts = [*dict.fromkeys(ranks.hosts[rank] for rank in missing)] if ranks.hosts else []
        names = f"rank{'s' if len(missing) > 1 else ''} {some(missing)}"
        if hosts:
            names = f"{names} ({some(hosts)})"
        if now - reported_at >= REPORT_INTERVAL_S:
            reported_at = now
            num_present = ranks.world_size - len(missing)
            progress = f"{num_present} of {ranks.world_size} ranks after {now - began:.0f} s"
            print(f"{progress}, missing: {names}", file=sys.stderr, flush=True)
        silent_s = now - min(heard_at[rank] for rank in missing)
        if silent_s >= START_LIMIT_S and not joined.is_set():
            message = f"{names} didn't connect within {START_LIMIT_S:.0f} s"
            exit_unreachable(UnreachableError(message, hosts))


class SignedStore:
    """Values in torch's store that programs without the job's key can delete, but not forge.
    Without a job there is no key."""

    def __init__(self, store: Store, job_folder: Path | None) -> None:
        self.store = store
        self._key = b""
        if job_folder is not None:
            with suppress(FileNotFoundError):
                self._key = read_bytes(job_folder / KEY_FILE)

    def _sign(self, name: str, content: str) -> str:
        return hmac.new(self._key, f"{name}\n{content}".encode(), "sha256").hexdigest() + content

    def set(self, name: str, value: Any) -> None:
        self.store.set(name, self._sign(name, json.dumps(value)))

    def get_all(self, names: list[str]) -> list[Any]:
        """Wait for values and return them. Raises UnreachableError if one isn't signed with this
        job's key."""
        values = []
        for name, text in zip(names, self.store.multi_get(names), strict=True):
            content = text.decode(errors="replace")[SIGNATURE_DIGITS:]
            if not hmac.compare_digest(text, self._sign(name, content).encode()):
                raise UnreachableError(
                    f"{name} isn't signed with this job's key: another program uses the job's port"
                )
            values.append(json.loads(content))
        return values


def join_process_group(
    ranks: Ranks,
    backend: str,
    device: torch.device | None,
    software: Versions | None,
    *,
    allow_mixed_code: bool = False,
) -> None:
    """Create the default process group once every rank has connected; exit on rank 0 if one doesn't
    in time.

    Args:
        device: this rank's GPU, which makes NCCL connect now instead of in the first collective.
        software: of one rank of each host, `describe_software`. It must be the same unless
            `allow_mixed_code`.

    Raises:
        UnreachableError: if this rank can't connect.
        CollectiveUserError: on rank 0, if the address is another host's or the port is in use; on
            all, if software differs.
    """
    joined = threading.Event()
    address = os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    limit = timedelta(seconds=JOIN_LIMIT_FACTOR * START_LIMIT_S)
    peer = f"rank 0 at {address}:{port}"
    connect = partial(_connect, ranks, address, port, limit, software, joined)
    try:
        # In a thread, since signal handlers don't run while the main thread is inside the store.
        store, differences = ThreadPoolExecutor(1).submit(connect).result()
        if differences:
            _reject_differences(differences, ranks, allow_mixed_code=allow_mixed_code)
        peer = "a peer"
        dist.init_process_group(
            backend,
            store=store,
            rank=ranks.rank,
            world_size=ranks.world_size,
            timeout=limit,
            device_id=device,
        )
        joined.set()
    except UnreachableError:
        raise
    except (OSError, RuntimeError) as error:
        this_end = f"{socket.gethostname()}: rank {ranks.rank}"
        message = f"{this_end} can't reach {peer}: {first_line(error)}"
        raise UnreachableError(message, fault=LINK) from None


def _connect(
    ranks: Ranks,
    address: str,
    port: int,
    limit: timedelta,
    software: Versions | None,
    joined: threading.Event,
) -> tuple[Store, str]:
    """Return the store, and how hosts' software differs, once all ranks have connected."""
    _wait_until_resolved(ranks.host, address, port)
    _choose_interface(ranks)
    # Under torchrun, its agent listens.
    listens = ranks.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    if listens:
        _check_address(address, port)
    tcp_store = dist.TCPStore(
        address, port, ranks.world_size, listens, limit, wait_for_workers=False
    )
    # A connection of its own: on one, requests wait for each other.
    thread_store = dist.PrefixStore(ranks.run, tcp_store.clone())  # type: ignore[attr-defined]
    if ranks.rank == 0:
        task = partial(_report_missing_ranks, thread_store, ranks, joined)
    else:
        task = partial(_send_heartbeats, thread_store, ranks.rank)
    threading.Thread(target=task, daemon=True, name="clap.rendezvous").start()
    store = dist.PrefixStore(ranks.run, tcp_store)
    signed_store = SignedStore(store, ranks.job_folder)
    signed_store.set(f"rank {ranks.rank}", [ranks.host, software])
    if ranks.rank == 0:
        by_rank = signed_store.get_all([f"rank {rank}" for rank in range(ranks.world_size)])
        signed_store.set("differences", describe_differences(by_rank))
    (differences,) = signed_store.get_all(["differences"])
    return store, differences


def _reject_differences(differences: str, ranks: Ranks, *, allow_mixed_code: bool) -> None:
    """Raise CollectiveUserError as hosts' software differs, or let rank 0 warn if that is
    allowed."""
    problem = f"the hosts of this run have different software: {differences}"
    if allow_mixed_code:
        if ranks.rank == 0:
            warn(problem)
        return
    if ranks.rank == 0:
        time.sleep(READ_GRACE_S)
    remedy = "Install the same, or set clap.debug.allow_mixed_code=true"
    raise CollectiveUserError(f"{problem}. {remedy}")


def _wait_until_resolved(host: str, address: str, port: int) -> None:
    """Wait until this host can resolve an address. Raises UnreachableError, which torch would after
    minutes."""
    began = time.monotonic()
    while True:
        try:
            socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
            return
        except OSError as error:
            if time.monotonic() - began >= RESOLVE_LIMIT_S:
                message = f"{host} can't resolve {address}: {error.strerror}"
                raise UnreachableError(message, [host]) from None
        time.sleep(HEARTBEAT_INTERVAL_S)


def _choose_interface(ranks: Ranks) -> None:
    """Give gloo the interface to other hosts if this host's name has no address that they can
    reach, but 127.0.1.1 or none."""
    with suppress(OSError):
        if not socket.gethostbyname(socket.gethostname()).startswith("127."):
            return
    other_host = next((host for host in ranks.hosts if host != ranks.host), None)
    if other_host is None:
        return
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((other_host, 1))  # sends nothing
        own_address = probe.getsockname()[0]
        for interface, entries in psutil.net_if_addrs().items():
            if own_address in [entry.address for entry in entries]:
                os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


def _check_address(address: str, port: int) -> None:
    """Raise CollectiveUserError if the address is another host's, or the port in use."""
    family = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0][0]
    try:
        socket.create_server((address, port), family=family).close()
    except OSError as error:
        problem = str(error)
        if error.errno == errno.EADDRINUSE:
            problem = (
                f"rendezvous port {port} of {address} is already in use:"
                " pass a free one to the launcher with --master_port, or submit the job again"
            )
        elif error.errno == errno.EADDRNOTAVAIL:
            problem = (
                f"rank 0 runs on {socket.gethostname()}, but the rendezvous address {address} is"
                " another host's: for a hostfile with one host, deepspeed starts ranks locally"
                " unless you pass --force_multi"
            )
        raise CollectiveUserError(problem) from None
