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

# packages whose versions a record has
PACKAGES = ("torch", "deepspeed", "transformers", "torchaudio", "triton", "webdataset", "numpy")


def device_name(device: torch.device) -> str:
    """Return the driver's name of the GPU, or the CPU model."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    with suppress(OSError):
        model = re.search(r"^model name.*?: *(.+)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        if model:
            return model[1].strip()
    return platform.processor() or platform.machine()


def peak_memory_bytes(device: torch.device) -> int:
    """Return peak memory: tensors on a GPU, the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # `ru_maxrss` would include memory before an exec.
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def peak_memory(device: torch.device) -> list[int]:
    """Return `peak_memory_bytes` and, on a GPU, the allocator's peak reserved bytes and those used
    outside it now."""
    if device.type != "cuda":
        return [peak_memory_bytes(device)]
    free, total = torch.cuda.mem_get_info(device)
    # CUDA's context, kernels, libraries, NCCL, and other processes
    outside = total - free - torch.cuda.memory_reserved(device)
    return [peak_memory_bytes(device), torch.cuda.max_memory_reserved(device), outside]


def read_energy_joules(device: torch.device) -> float:
    """Return what a GPU has used since its driver was loaded, by NVML's counter; NaN without
    one."""
    if device.type != "cuda":
        return math.nan
    # A broken driver may raise anything.
    with suppress(Exception):
        # an optional package
        import pynvml

        handle = torch.cuda._get_pynvml_handler(device)
        millijoules = float(pynvml.nvmlDeviceGetTotalEnergyConsumption(handle))
        return millijoules / 1000
    return math.nan


def summarize_energy(joules: float, samples: int) -> Summary:
    """Return a summary's fields of energy; none if it is unknown."""
    # NaN isn't positive, either.
    if not joules > 0 or not samples:
        return Summary()
    # 1 kWh = 3.6e6 J
    return Summary(energy_kwh=joules / 3.6e6, joules_per_sample=joules / samples)


def summarize_memory(ranks: Iterable[Sequence[float]]) -> Summary:
    """Return a summary's fields of memory, given `peak_memory` of all ranks."""
    names = ("memory_peak_bytes", "memory_reserved_peak_bytes", "memory_context_bytes")
    largest = [int(max(values)) for values in zip(*ranks, strict=True)]
    # On CPUs there is only the first.
    return cast(Summary, dict(zip(names, largest, strict=False)))


# controllers of a hierarchy → files of its cgroups, and the prefix of totals in `memory.stat`
CGROUP_FILES = {
    # version 2
    "": ("memory.max", "memory.current", ""),
    # version 1
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
}


class MemoryLimit(NamedTuple):
    """Memory that is still free under a limit."""

    # All processes of a host that are under a limit of this name share it.
    name: str
    free: int


def memory_limits(device: torch.device) -> list[MemoryLimit]:
    """Return what limits this process's memory: its GPU, or the host's available memory and
    cgroups, both with swap, and `ulimit -v`."""
    if device.type == "cuda":
        gpu = torch.cuda.get_device_properties(device)
        # All memory counts: an earlier run's may not have been freed yet.
        return [MemoryLimit(f"memory of {gpu.name} of process {os.getpid()}", gpu.total_memory)]
    swap = psutil.swap_memory().free
    limits = [MemoryLimit("available memory", psutil.virtual_memory().available + swap)]
    limits += [MemoryLimit(name, free + swap) for name, free in cgroup_limits()]
    address_space, _ = resource.getrlimit(resource.RLIMIT_AS)
    if address_space != resource.RLIM_INFINITY:
        free = address_space - psutil.Process().memory_info().vms
        limits.append(MemoryLimit(f"ulimit -v of process {os.getpid()}", free))
    return limits


def cgroup_limits(root: Path = Path("/")) -> Iterator[MemoryLimit]:
    """Yield the limits of this process's cgroup and its ancestors, such as those of containers and
    SLURM."""
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        # hierarchy:controllers:path
        _, controllers, path = line.split(":", 2)
        if controllers not in CGROUP_FILES:
            continue
        top = root / "sys/fs/cgroup" / controllers
        group = top / path.strip("/")
        for folder in (group, *group.parents):
            # not limited or, in a container, not visible
            with suppress(OSError, ValueError, KeyError):
                free = _free_in_cgroup(folder, *CGROUP_FILES[controllers])
                name = f"memory limit of cgroup /{folder.relative_to(top)}"
                yield MemoryLimit(name, free)


def _free_in_cgroup(folder: Path, limit_file: str, usage_file: str, prefix: str) -> int:
    limit = int((folder / limit_file).read_text())
    usage = int((folder / usage_file).read_text())
    lines = (folder / "memory.stat").read_text().splitlines()
    statistics = dict(line.split() for line in lines)
    # The kernel drops file caches if memory is short.
    cached = sum(int(statistics[f"{prefix}{kind}_file"]) for kind in ("active", "inactive"))
    return limit - (usage - cached)


def describe_environment(device: torch.device, cpu_kernels: str | None = None) -> dict[str, Any]:
    """Return the content of `environment.json`."""
    nccl = driver = device_memory_bytes = None
    if device.type == "cuda":
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        driver = _read_driver_version()
        device_memory_bytes = torch.cuda.get_device_properties(device).total_memory
    software = {
        "python": platform.python_version(),
        "versions": {"clap_ds": paths.VERSION, **{name: paths.version(name) for name in PACKAGES}},
        "cuda": torch.version.cuda,
        "nccl": nccl,
        "driver": driver,
        "git_commit": paths.commit(),
        "command": [sys.executable, *sys.argv],
        "process": identify_process(),
    }
    hardware = {
        "device_name": device_name(device),
        "device_memory_bytes": device_memory_bytes,
        "host": socket.gethostname(),
        "host_memory_bytes": psutil.virtual_memory().total,
        "infiniband": read_infiniband_rates(),
        "cpu_count": os.cpu_count(),
        "threads_per_rank": torch.get_num_threads(),
        "cpu_kernels": cpu_kernels,
    }
    return software | hardware


def read_infiniband_rates(devices: Path = Path("/sys/class/infiniband")) -> dict[str, str]:
    """Return the rate of each InfiniBand or RoCE port that is up.

    An example is {"mlx5_0/1": "400 Gb/sec (4X NDR)"}.
    """
    rates = {}
    # mlx5_0/ports/1
    for port in sorted(devices.glob("*/ports/*")):
        if "ACTIVE" in (port / "state").read_text():
            rates[f"{port.parents[1].name}/{port.name}"] = (port / "rate").read_text().strip()
    return rates


def _read_driver_version() -> str | None:
    with suppress(OSError):
        text = Path("/proc/driver/nvidia/version").read_text()
        if version := re.search(r"Module\s+([\d.]+)", text):
            return version[1]
    return None
