"""Record the cores and memory (NUMA) nodes of each rank, and find ranks that are bound to too few
cores or to each other's.

Launchers bind ranks (srun's `--cpu-bind`, `numactl`, `deepspeed --bind_cores_to_rank`). A wrong
binding only makes a run slow.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypedDict

CORES = sorted(os.sched_getaffinity(0))
"""Cores of this process, read before OpenMP binds the main thread to one of them."""


class RankPlace(TypedDict):
    """Where a rank runs. It can be sent as JSON."""

    host: str
    device_name: str
    cores: list[int]
    host_cores: int
    numa_nodes: list[int]  # of the cores
    device_numa_node: int | None  # that a GPU is attached to; None if unknown


def place_of_rank(host: str, device_name: str, gpu: Any = None) -> RankPlace:
    """Describe this rank's place, given torch's properties of its GPU, if it has one."""
    return RankPlace(
        host=host,
        device_name=device_name,
        cores=CORES,
        host_cores=os.cpu_count() or 1,
        numa_nodes=numa_nodes(CORES),
        device_numa_node=None if gpu is None else numa_node_of_gpu(gpu),
    )


def numa_nodes(cores: Iterable[int], system: Path = Path("/sys")) -> list[int]:
    """Return the nodes with any of these cores; none if the kernel doesn't list nodes."""
    nodes = (
        node.name
        for core in cores
        for node in system.glob(f"devices/system/cpu/cpu{core}/node[0-9]*")
    )
    return sorted({int(name.removeprefix("node")) for name in nodes})


def numa_node_of_gpu(properties: Any, system: Path = Path("/sys")) -> int | None:
    with suppress(OSError, ValueError, AttributeError):  # as of AMD's GPUs
        address = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
        node = int((system / "bus/pci/devices" / address / "numa_node").read_text())
        return node if node >= 0 else None  # -1: the machine has only one
    return None


def format_ranges(numbers: Iterable[int]) -> str:
    """Return rising numbers as in the kernel's lists: `0-3,8`."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ",".join(f"{first}-{last}" if last > first else str(first) for first, last in ranges)


def describe_places(places: Sequence[RankPlace]) -> list[dict[str, Any]]:
    """Return each rank's entry in `environment.json`."""
    return [
        {
            "host": place["host"],
            "cores": format_ranges(place["cores"]),
            "numa_nodes": format_ranges(place["numa_nodes"]),
            "device_numa_node": place["device_numa_node"],
        }
        for place in places
    ]


def find_wrong_binding(places: Sequence[RankPlace], num_workers: int) -> str | None:
    """Describe the first host whose ranks share cores in part, or have fewer than one for each of
    their processes: the rank and its data workers. Ranks that aren't bound are right: each has all
    cores of the host."""
    ranks_with_core = Counter((place["host"], core) for place in places for core in place["cores"])
    ranks_with_cores = Counter((place["host"], *place["cores"]) for place in places)
    problems: dict[str, str] = {}  # by host
    for rank, place in enumerate(places):
        host = place["host"]
        cores = place["cores"]
        if host in problems or len(cores) == place["host_cores"]:
            continue
        num_ranks = max(ranks_with_core[host, core] for core in cores)
        if num_ranks > ranks_with_cores[host, *cores]:
            problem = "and shares some of them with a rank that has others"
        elif len(cores) < num_ranks * (num_workers + 1):
            problem = f"which {num_ranks} rank(s) share; expected {num_workers + 1} per rank, for itself and its data workers"
        else:
            continue
        allowed = f"{len(cores)} of {place['host_cores']} cores ({format_ranges(cores)})"
        problems[host] = f"{host}: rank {rank} may use {allowed}, {problem}"
    if not problems:
        return None
    first, *others = problems.values()
    elsewhere = f" (and on {len(others):,} other host(s))" if others else ""
    return f"{first}{elsewhere}. Bind each rank to cores of its own: “Core binding” in docs/clusters.md"
