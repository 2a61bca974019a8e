"""Hosts on one machine with links of a chosen speed: network namespaces joined by a bridge, shaped by `tc`.

For measuring communication where there is no cluster. Needs root and iproute2; standard library only. Nothing leaves the
machine: the namespaces have no uplink.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from clap_ds.config.places import PACKAGE

SUBNET = "10.98.0"


class ShapedHostsError(RuntimeError):
    """Namespaces can't be made here."""


class ShapedHosts:
    """Hosts 1 … `num_hosts`, each with one interface `eth0`, whose sending rate is `rate_mbit`."""

    def __init__(self, num_hosts: int) -> None:
        """Raises ShapedHostsError without root or iproute2."""
        if os.geteuid() != 0:
            raise ShapedHostsError("network namespaces need root: run this command as root, for example under sudo")
        for program in ("ip", "tc"):
            if shutil.which(program) is None:
                raise ShapedHostsError(f"{program} is missing: install the package iproute2")
        self._prefix = f"clap{os.getpid()}"
        self.num_hosts = num_hosts

    def address(self, host: int) -> str:
        return f"{SUBNET}.{host}"

    def up(self) -> None:
        """Make bridge and hosts."""
        bridge = self._name(0)
        _run("ip", "netns", "add", bridge)
        _run("ip", "-n", bridge, "link", "add", "br0", "type", "bridge")
        _run("ip", "-n", bridge, "link", "set", "br0", "up")
        for host in range(1, self.num_hosts + 1):
            name, port = self._name(host), f"port{host}"
            _run("ip", "netns", "add", name)
            _run("ip", "link", "add", port, "netns", bridge, "type", "veth", "peer", "name", "eth0", "netns", name)
            _run("ip", "-n", bridge, "link", "set", port, "master", "br0", "up")
            _run("ip", "-n", name, "addr", "add", f"{self.address(host)}/24", "dev", "eth0")
            _run("ip", "-n", name, "link", "set", "eth0", "up")
            _run("ip", "-n", name, "link", "set", "lo", "up")

    def shape(self, rate_mbit: float | None) -> None:
        """Let every host send at `rate_mbit`; None takes the limit away."""
        for host in range(1, self.num_hosts + 1):
            command = ("tc", "-n", self._name(host), "qdisc")
            subprocess.run([*command, "del", "dev", "eth0", "root"], capture_output=True)
            if rate_mbit is not None:
                limits = ("rate", f"{rate_mbit}mbit", "burst", "512kbit", "latency", "200ms")
                _run(*command, "add", "dev", "eth0", "root", "tbf", *limits)

    def start(self, host: int, command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[str]:
        """Start a command on a host, pinned to one core, its standard output captured."""
        core = str((host - 1) % (os.cpu_count() or 1))
        whole = ["ip", "netns", "exec", self._name(host), "taskset", "-c", core, *command]
        return subprocess.Popen(whole, env={**os.environ, **environment}, stdout=subprocess.PIPE, text=True)

    def down(self) -> None:
        """Remove everything `up` made; also after a half-done `up`."""
        for host in range(self.num_hosts, -1, -1):
            subprocess.run(["ip", "netns", "del", self._name(host)], capture_output=True)

    def _name(self, host: int) -> str:
        return f"{self._prefix}-{host}"


@contextmanager
def shaped_hosts(num_hosts: int) -> Iterator[ShapedHosts]:
    """Hosts for the length of a `with` block.

    Raises:
        ShapedHostsError: no root, no iproute2, or the kernel refuses.
    """
    hosts = ShapedHosts(num_hosts)
    try:
        hosts.up()
        yield hosts
    finally:
        hosts.down()


def run_on_all(
    hosts: ShapedHosts, num_ranks: int, command: Sequence[str], environment: Mapping[str, str], port: int = 29555
) -> list[str]:
    """Run one rank on each of the first `num_ranks` hosts with the launcher's variables set; standard output by rank.

    Raises:
        ShapedHostsError: a rank failed.
    """
    processes = []
    for rank in range(num_ranks):
        variables = {
            "RANK": str(rank),
            "WORLD_SIZE": str(num_ranks),
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": hosts.address(1),
            "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": "eth0",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(PACKAGE.parent),
        }
        processes.append(hosts.start(rank + 1, command, {**variables, **environment}))
    try:
        outputs = [process.communicate()[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for rank, process in enumerate(processes):
        if process.returncode:
            raise ShapedHostsError(
                f"rank {rank} on {hosts.address(rank + 1)} ended with exit code {process.returncode}"
            )
    return outputs


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise ShapedHostsError(f"{' '.join(command)}: {done.stderr.strip()}")
