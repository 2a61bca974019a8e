"""Rendezvous of ranks with a timeout that names missing ranks. Top-level imports are light.

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
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from clap_ds.distributed.error_file import LINK, PROGRAM, UNREACHABLE, this_rank, write_error_file
from clap_ds.distributed.software import Versions, describe_differences
from clap_ds.utils.errors import CollectiveUserError, first_line, printable, some
from clap_ds.utils.files import read_bytes

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store

    from clap_ds.distributed.init import Ranks

START_LIMIT_S = 300.0
"""For all ranks to connect, and for one that no longer responds: some import from disk what others
have cached."""
RESOLVE_LIMIT_S = 20.0  # for a host to resolve rank 0's name
TELL_S = 1.0  # for other ranks to read the store, which ends with rank 0
SAY_S = 10.0  # between reports of missing ranks
BEAT_S = 1.0  # between a rank's signs of life
KEY_FILE = "rendezvous_key"  # in the folder of a job's attempt
SIGNATURE_DIGITS = 64


class UnreachableError(RuntimeError):
    """A rank or host, named in the message, is unreachable; `hosts` are those of the missing ranks.
    `fault` is LINK on a rank that can't reach another one, of which either may be broken."""

    def __init__(self, message: str, hosts: Sequence[str] = (), fault: str = PROGRAM) -> None:
        super().__init__(message)
        self.hosts = list(hosts)
        self.fault = fault


def give_up(error: UnreachableError) -> NoReturn:
    """Record and print the error, and exit at once."""
    write_error_file(UNREACHABLE, str(error), 1, hosts=error.hosts, fault=error.fault)
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
    heard = dict.fromkeys(range(1, ranks.world_size), began)
    beats = dict[int, bytes]()
    while not this_rank.started.wait(BEAT_S):
        now = time.monotonic()
        for rank in heard:
            if store.check([key := f"beat/{rank}"]) and beats.get(rank) != (beat := store.get(key)):
                beats[rank], heard[rank] = beat, now
        missing = [rank for rank, at in heard.items() if rank not in beats or now - at > SAY_S]
        hosts = list(dict.fromkeys(ranks.hosts[rank] for rank in missing)) if ranks.hosts else []
        who = f"rank{'s' * (len(missing) > 1)} {some(missing)}" + f" ({some(hosts)})" * bool(hosts)
        if missing and now - said >= SAY_S:
            said = now
            size = ranks.world_size
            there = f"{size - len(missing)} of {size} ranks after {now - began:.0f} s"
            print(f"{there}, missing: {who}", file=sys.stderr, flush=True)
        if (
            missing
            and not joined.is_set()
            and now - min(heard[rank] for rank in missing) >= START_LIMIT_S
        ):
            give_up(UnreachableError(f"{who} didn't connect within {START_LIMIT_S:.0f} s", hosts))


def create_key(folder: Path) -> None:
    """Create the key of a job's attempt in its folder. Only this user can read it."""
    with open(folder / KEY_FILE, "xb", opener=partial(os.open, mode=0o600)) as file:
        file.write(os.urandom(32))


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


def meet(
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
    import torch.distributed as dist

    rank = ranks.rank
    world_size = ranks.world_size
    joined = threading.Event()
    address = os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    limit = timedelta(
        seconds=1.2 * START_LIMIT_S
    )  # longer than rank 0's, which names who is missing
    what = f"rank 0 at {address}:{port}"

    def connect() -> tuple[Store, str]:
        """Return the store, and how hosts' software differs, once all ranks have connected."""
        _resolve(ranks.host, address, port)
        _choose_interface(ranks)
        listens = (
            rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        )  # else torchrun does
        if listens:
            _check_address(address, port)
        tcp = dist.TCPStore(address, port, world_size, listens, limit, wait_for_workers=False)
        own = dist.PrefixStore(ranks.run, tcp.clone())  # type: ignore[attr-defined]
        task = partial(_send_beats, own, rank) if rank else partial(_call_roll, own, ranks, joined)
        threading.Thread(target=task, daemon=True, name="clap.roll_call").start()
        store = dist.PrefixStore(ranks.run, tcp)
        signed = SignedStore(store, ranks.job_folder)
        signed.set(f"rank {rank}", [ranks.host, software])
        if rank == 0:
            everywhere = signed.get_all([f"rank {number}" for number in range(world_size)])
            signed.set("differences", describe_differences(everywhere))
        (differences,) = signed.get_all(["differences"])
        return store, differences

    try:
        # In a thread, since signal handlers don't run while the main thread is inside the store.
        store, differences = ThreadPoolExecutor(1).submit(connect).result()
        if differences:
            problem = f"the hosts of this run have different software: {differences}"
            if not allow_mixed_code:
                if rank == 0:
                    time.sleep(TELL_S)
                raise CollectiveUserError(
                    f"{problem}. Install the same, or set clap.debug.allow_mixed_code=true"
                )
            if rank == 0:
                print(f"warning: {problem}", file=sys.stderr, flush=True)
        what = "a peer"
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=world_size, timeout=limit, device_id=device
        )
        joined.set()
    except UnreachableError:
        raise
    except (OSError, RuntimeError) as error:
        message = f"{socket.gethostname()}: rank {rank} can't reach {what}: {first_line(error)}"
        raise UnreachableError(message, fault=LINK) from None


def _resolve(host: str, address: str, port: int) -> None:
    """Wait until this host can resolve an address. Raises UnreachableError, which torch would after
    minutes."""
    began = time.monotonic()
    while True:
        try:
            socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
            return
        except OSError as error:
            if time.monotonic() - began >= RESOLVE_LIMIT_S:
                raise UnreachableError(
                    f"{host} can't resolve {address}: {error.strerror}", [host]
                ) from None
        time.sleep(BEAT_S)


def _choose_interface(ranks: Ranks) -> None:
    """Give gloo the interface to other hosts if this host's name has no address that they can
    reach, but 127.0.1.1 or none."""
    import psutil  # not at the top: a supervisor outside of the ranks' container may lack it

    others = [host for host in ranks.hosts if host != ranks.host]
    with suppress(OSError):
        if socket.gethostbyname(socket.gethostname()).partition(".")[0] != "127":
            return
    if not others:
        return
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((others[0], 1))  # sends nothing
        own_address = probe.getsockname()[0]
        for interface, addresses in psutil.net_if_addrs().items():
            if own_address in {entry.address for entry in addresses}:
                os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


def _check_address(address: str, port: int) -> None:
    """Raise CollectiveUserError if the address is another host's, or the port in use."""
    family = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0][0]
    try:
        socket.create_server((address, port), family=family).close()
    except OSError as error:
        problems = {
            errno.EADDRINUSE: f"rendezvous port {port} of {address} is already in use:"
            " pass a free one to the launcher with --master_port, or submit the job again",
            errno.EADDRNOTAVAIL: f"rank 0 runs on {socket.gethostname()}, but the rendezvous address {address} is another"
            " host's: for a hostfile with one host, deepspeed starts ranks locally unless you pass --force_multi",
        }
        raise CollectiveUserError(problems.get(error.errno or 0, str(error))) from None
