"""Describe a run's device, memory and software."""

from __future__ import annotations

import math
import os
import platform
import re
import resource
import socket
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, cast

import psutil
import torch

from clap_ds.run_records.lock import identify_process
from clap_ds.run_records.schema import Summary
from clap_ds.utils import paths

PACKAGES = ("torch", "deepspeed", "transformers", "torchaudio", "triton", "webdataset", "numpy")


def device_name(device: torch.device) -> str:
    """Return the driver's name of the GPU, or the CPU model."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    with suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(
            line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")
        )
    return platform.processor() or platform.machine()


def peak_memory_bytes(device: torch.device) -> int:
    """Return peak memory: tensors on a GPU, the process on a CPU (`ru_maxrss` would include memory
    before an exec)."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def peak_memory(device: torch.device) -> list[int]:
    """Return `peak_memory_bytes` and, on a GPU, the allocator's peak reserved bytes and those used
    outside it now."""
    if device.type != "cuda":
        return [peak_memory_bytes(device)]
    free, total = torch.cuda.mem_get_info(device)
    outside = total - free - torch.cuda.memory_reserved(device)
    return [peak_memory_bytes(device), torch.cuda.max_memory_reserved(device), outside]


def energy_joules(device: torch.device) -> float:
    """Return what a GPU has used since its driver was loaded, by NVML's counter; NaN without
    one."""
    if device.type == "cuda":
        with suppress(Exception):  # a broken driver may raise anything
            import pynvml

            return (
                float(
                    pynvml.nvmlDeviceGetTotalEnergyConsumption(
                        torch.cuda._get_pynvml_handler(device)
                    )
                )
                / 1000
            )
    return math.nan


def energy(joules: float, samples: int) -> Summary:
    """Return a summary's fields of energy; none if it is unknown."""
    return (
        Summary(energy_kwh=joules / 3.6e6, joules_per_sample=joules / samples)
        if joules > 0 and samples
        else Summary()
    )


def largest_memory(ranks: Iterable[Sequence[float]]) -> Summary:
    names = ("memory_peak_bytes", "memory_reserved_peak_bytes", "memory_context_bytes")
    return cast(
        Summary,
        {name: int(max(of)) for name, of in zip(names, zip(*ranks, strict=True), strict=False)},
    )


CGROUP_FILES = {
    "": ("memory.max", "memory.current", ""),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
}
"""Files of a cgroup by the controllers of its hierarchy, in version 2 and 1, and the prefix of
totals in `memory.stat`."""


class MemoryLimit(NamedTuple):
    """Memory that is still free under a limit. All processes of a host that are under a limit of
    this name share it."""

    name: str
    free: int


def memory_limits(device: torch.device) -> list[MemoryLimit]:
    """Return what limits this process's memory: its GPU, or the host's available memory and
    cgroups, both with swap, and `ulimit -v`. Of a GPU all memory counts, as an earlier run's may
    not have been freed yet."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return [
            MemoryLimit(
                f"memory of {properties.name} of process {os.getpid()}", properties.total_memory
            )
        ]
    swap = psutil.swap_memory().free
    limits = [MemoryLimit("available memory", psutil.virtual_memory().available + swap)]
    limits += [MemoryLimit(name, free + swap) for name, free in cgroup_limits()]
    address_space, _ = resource.getrlimit(resource.RLIMIT_AS)
    if address_space != resource.RLIM_INFINITY:
        free = address_space - psutil.Process().memory_info().vms
        limits.append(MemoryLimit(f"ulimit -v of process {os.getpid()}", free))
    return limits


def cgroup_limits(root: Path = Path("/")) -> Iterator[MemoryLimit]:
    """Yield the limits of this process's cgroup and its ancestors, of version 1 or 2, such as those
    of containers and SLURM. File caches count as free: the kernel drops them."""
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers not in CGROUP_FILES:
            continue
        limit_file, usage_file, prefix = CGROUP_FILES[controllers]
        top = root / "sys/fs/cgroup" / controllers
        group = top / path.strip("/")
        for folder in (group, *group.parents):
            with suppress(
                OSError, ValueError, KeyError
            ):  # not limited or, in a container, not visible
                limit = int((folder / limit_file).read_text())
                statistics = dict(
                    text.split() for text in (folder / "memory.stat").read_text().splitlines()
                )
                cached = sum(
                    int(statistics[f"{prefix}{kind}_file"]) for kind in ("active", "inactive")
                )
                used = int((folder / usage_file).read_text()) - cached
                yield MemoryLimit(
                    f"memory limit of cgroup /{folder.relative_to(top)}", limit - used
                )


def environment(device: torch.device, cpu_kernels: str | None = None) -> dict[str, Any]:
    """Return the content of `environment.json`."""
    on_gpu = device.type == "cuda"
    return {
        "python": platform.python_version(),
        "versions": {"clap_ds": paths.VERSION, **{name: paths.version(name) for name in PACKAGES}},
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if on_gpu else None,
        "driver": _driver() if on_gpu else None,
        "device_name": device_name(device),
        "device_memory_bytes": torch.cuda.get_device_properties(device).total_memory
        if on_gpu
        else None,
        "host": socket.gethostname(),
        "process": identify_process(),
        "host_memory_bytes": psutil.virtual_memory().total,
        "infiniband": infiniband_rates(),
        "cpu_count": os.cpu_count(),
        "threads_per_rank": torch.get_num_threads(),
        "cpu_kernels": cpu_kernels,
        "git_commit": paths.commit(),
        "command": [sys.executable, *sys.argv],
    }


def infiniband_rates(devices: Path = Path("/sys/class/infiniband")) -> dict[str, str]:
    """Return the rate of each port of InfiniBand or RoCE that is up, such as {"mlx5_0/1": "400
    Gb/sec (4X NDR)"}."""
    ports = {
        f"{port.parents[1].name}/{port.name}": port for port in sorted(devices.glob("*/ports/*"))
    }
    up = {name: port for name, port in ports.items() if "ACTIVE" in (port / "state").read_text()}
    return {name: (port / "rate").read_text().strip() for name, port in up.items()}


def _driver() -> str | None:
    with suppress(OSError):
        found = re.search(r"Module\s+([\d.]+)", Path("/proc/driver/nvidia/version").read_text())
        return found and found[1]
    return None
