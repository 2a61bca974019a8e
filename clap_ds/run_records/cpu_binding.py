"""The cores and memory (NUMA) nodes of each rank, and ranks that are bound to too few cores.

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

# cores of this process, read before OpenMP binds the main thread to one of them
CORES = sorted(os.sched_getaffinity(0))


class RankPlace(TypedDict):
    """Where a rank runs. It can be sent as JSON."""

    host: str
    device_name: str
    cores: list[int]
    host_cores: int
    # of the cores
    numa_nodes: list[int]
    # that a GPU is attached to; None if unknown
    device_numa_node: int | None


def describe_place(host: str, device_name: str, gpu: Any = None) -> RankPlace:
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
    nodes: set[int] = set()
    for core in cores:
        folders = system.glob(f"devices/system/cpu/cpu{core}/node[0-9]*")
        nodes.update(int(folder.name.removeprefix("node")) for folder in folders)
    return sorted(nodes)


def numa_node_of_gpu(gpu: Any, system: Path = Path("/sys")) -> int | None:
    """Return the node that a GPU is attached to, given torch's properties; None if unknown."""
    # AMD's GPUs lack some of these.
    with suppress(OSError, ValueError, AttributeError):
        address = f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
        node = int((system / "bus/pci/devices" / address / "numa_node").read_text())
        # -1 means that the machine has only one.
        return node if node >= 0 else None
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
    """Describe the first host with ranks that are bound wrongly.

    Ranks are bound wrongly if they share some of their cores. They are, too, if they have fewer
    cores than processes: the ranks and their data workers. Ranks that aren't bound are right: each
    has all cores of the host.
    """
    num_processes = num_workers + 1
    ranks_with_core: Counter[tuple[str, int]] = Counter()
    ranks_with_cores: Counter[tuple[str, ...]] = Counter()
    for place in places:
        ranks_with_core.update((place["host"], core) for core in place["cores"])
        ranks_with_cores[place["host"], format_ranges(place["cores"])] += 1
    problems: dict[str, str] = {}
    for rank, place in enumerate(places):
        host = place["host"]
        cores = place["cores"]
        if host in problems or len(cores) == place["host_cores"]:
            continue
        ranges = format_ranges(cores)
        num_ranks = max(ranks_with_core[host, core] for core in cores)
        if num_ranks > ranks_with_cores[host, ranges]:
            problem = "and shares some of them with a rank that has others"
        elif len(cores) < num_ranks * num_processes:
            expected = f"{num_processes} per rank, for itself and its data workers"
            problem = f"which {num_ranks} rank(s) share; expected {expected}"
        else:
            continue
        allowed = f"{len(cores)} of {place['host_cores']} cores ({ranges})"
        problems[host] = f"{host}: rank {rank} may use {allowed}, {problem}"
    if not problems:
        return None
    message = next(iter(problems.values()))
    if len(problems) > 1:
        message += f" (and on {len(problems) - 1:,} other host(s))"
    return f"{message}. Bind each rank to cores of its own: “Core binding” in docs/gpus.md"
