"""Two hosts on one machine with a link of a chosen speed between them: network namespaces, shaped by `tc`.

For measuring communication where there is no cluster. Needs root and iproute2; standard library only. Nothing leaves the
machine: the namespaces have no uplink.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from clap_ds.config.errors import UserError
from clap_ds.config.places import PACKAGE

SUBNET = "10.98.0"
VARIABLES = {
    **{"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"},
    **{"MASTER_ADDR": f"{SUBNET}.1", "MASTER_PORT": "29555", "GLOO_SOCKET_IFNAME": "eth0"},
    "PYTHONPATH": str(PACKAGE.parent),
}
"""What a launcher sets, but for the rank."""


@contextmanager
def shaped_hosts() -> Iterator[list[str]]:
    """Names of two namespaces, each with one interface `eth0`, for the length of a `with` block.

    Raises:
        UserError: no root, no iproute2, or the kernel refuses.
    """
    if os.geteuid() != 0:
        raise UserError("network namespaces need root: run this command as root, for example under sudo")
    for program in ("ip", "tc"):
        if shutil.which(program) is None:
            raise UserError(f"{program} is missing: install the package iproute2")
    hosts = [f"clap{os.getpid()}-{number}" for number in (1, 2)]
    try:
        for host in hosts:
            _run(f"ip netns add {host}")
        _run(f"ip link add eth0 netns {hosts[0]} type veth peer name eth0 netns {hosts[1]}")
        for number, host in enumerate(hosts, start=1):
            _run(f"ip -n {host} addr add {SUBNET}.{number}/24 dev eth0")
            _run(f"ip -n {host} link set eth0 up")
            _run(f"ip -n {host} link set lo up")
        yield hosts
    finally:
        for host in hosts:
            subprocess.run(["ip", "netns", "del", host], capture_output=True)


def shape(hosts: Sequence[str], rate_mbit: float) -> None:
    """Let every host send at `rate_mbit`."""
    for host in hosts:
        _run(f"tc -n {host} qdisc replace dev eth0 root tbf rate {rate_mbit}mbit burst 512kbit latency 200ms")


def run_ranks(hosts: Sequence[str], command: Sequence[str]) -> str:
    """Run a rank on each host, pinned to a core, with the launcher's variables set; rank 0's standard output.

    Raises:
        UserError: a rank failed.
    """
    processes = []
    for rank, host in enumerate(hosts):
        words = ["ip", "netns", "exec", host, "taskset", "-c", str(rank % (os.cpu_count() or 1)), *command]
        environment = {**os.environ, **VARIABLES, "RANK": str(rank)}
        processes.append(subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True))
    try:
        outputs = [process.communicate()[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for rank, process in enumerate(processes):
        if process.returncode:
            raise UserError(f"rank {rank} ended with exit code {process.returncode}")
    return outputs[0]


def _run(command: str) -> None:
    done = subprocess.run(command.split(), capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"{command}: {done.stderr.strip()}")
