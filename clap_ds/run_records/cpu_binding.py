"""Record the cores and memory (NUMA) nodes of each rank, and find ranks that are bound to too few cores or to each other's.

Launchers bind ranks (srun's `--cpu-bind`, `numactl`, `deepspeed --bind_cores_to_rank`). A wrong binding only makes a run slow.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
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
    folders = system.glob("devices/system/node/node[0-9]*")
    wanted = {f"cpu{core}" for core in cores}
    return sorted(
        int(folder.name[4:]) for folder in folders if wanted & {path.name for path in folder.glob("cpu[0-9]*")}
    )


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
    """Describe the first host whose ranks share cores in part, or have fewer than one for each of their processes: the rank and
    its data workers. Ranks that aren't bound are right: each has all cores of the host."""
    by_host: dict[str, list[int]] = defaultdict(list)
    for rank, place in enumerate(places):
        by_host[place["host"]].append(rank)
    problems = [problem for ranks in by_host.values() if (problem := _problem_of(ranks, places, num_workers))]
    if not problems:
        return None
    others = f" (and on {len(problems) - 1:,} other host(s))" if len(problems) > 1 else ""
    return f"{problems[0]}{others}. Bind each rank to cores of its own: “Core binding” in docs/clusters.md"


def _problem_of(ranks: Sequence[int], places: Sequence[RankPlace], num_workers: int) -> str | None:
    users = Counter(core for rank in ranks for core in places[rank]["cores"])
    for rank in ranks:
        place = places[rank]
        cores = place["cores"]
        if len(cores) == place["host_cores"]:
            continue
        num_ranks = max(users[core] for core in cores)
        where = (
            f"{place['host']}: rank {rank} may use {len(cores)} of {place['host_cores']} cores ({format_ranges(cores)})"
        )
        if num_ranks > sum(places[other]["cores"] == cores for other in ranks):
            return f"{where}, and shares some of them with a rank that has others"
        if len(cores) < num_ranks * (num_workers + 1):
            shared = f", which {num_ranks} ranks share" if num_ranks > 1 else ""
            return f"{where}{shared}; expected {num_workers + 1} per rank, for itself and its data workers"
    return None
