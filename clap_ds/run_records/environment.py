"""What a run ran on: device, memory, software."""

from __future__ import annotations

import os
import platform
import socket
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import cast

import torch

from clap_ds.config import paths
from clap_ds.run_records.metrics_schema import Environment, Summary

PACKAGES = ("torch", "deepspeed", "transformers", "torchaudio", "triton", "webdataset", "numpy")


def device_name(device: torch.device) -> str:
    """Name the driver gives the GPU, or the model of the CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    with suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return platform.processor() or platform.machine()


def peak_memory_bytes(device: torch.device) -> int:
    """Most memory in use so far: by tensors on a GPU, by the process on a CPU (`ru_maxrss` counts what was before an exec)."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def peak_memory(device: torch.device) -> list[int]:
    """`peak_memory_bytes`, and of a GPU also what its allocator held at most."""
    reserved = [torch.cuda.max_memory_reserved(device)] if device.type == "cuda" else []
    return [peak_memory_bytes(device), *reserved]


def largest_memory(ranks: Iterable[Sequence[float]]) -> Summary:
    names = ("memory_peak_bytes", "memory_reserved_peak_bytes")
    return cast(Summary, {name: int(max(of)) for name, of in zip(names, zip(*ranks, strict=True), strict=False)})


def environment(device: torch.device, cpu_kernels: str | None = None) -> Environment:
    on_gpu = device.type == "cuda"
    return {
        "python": platform.python_version(),
        "versions": {"clap_ds": paths.VERSION, **{name: paths.version(name) for name in PACKAGES}},
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if on_gpu else None,
        "driver": _driver() if on_gpu else None,
        "device_name": device_name(device),
        "device_memory_bytes": torch.cuda.get_device_properties(device).total_memory if on_gpu else None,
        "host": socket.gethostname(),
        "cpu_count": os.cpu_count(),
        "threads_per_rank": torch.get_num_threads(),
        "cpu_kernels": cpu_kernels,
        "git_commit": paths.commit(),
        "command": [sys.executable, *sys.argv],
    }


def _driver() -> str | None:
    with suppress(Exception):  # whatever a broken driver makes of it
        import pynvml

        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    return None
