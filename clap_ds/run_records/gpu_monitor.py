"""Sample a host's GPUs every 15 s with NVML into `monitor/<host>.jsonl`, in a thread of the host's first rank.

A broken driver doesn't end the run.
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from clap_ds.config.files import own_folder
from clap_ds.run_records.jsonl import JsonlWriter

INTERVAL_S = 15.0
Sample = dict[str, Any]


@contextmanager
def watching(run_directory: Path | None, num_gpus: int) -> Iterator[None]:
    """Sample in the background while the body runs, unless there is no folder; the run has `num_gpus` on this host."""
    over = threading.Event()
    if run_directory is not None:
        threading.Thread(target=_watch, args=(run_directory / "monitor", num_gpus, over), daemon=True).start()
    try:
        yield
    finally:
        over.set()


def _watch(folder: Path, num_gpus: int, over: threading.Event) -> None:
    try:
        if (sample := _gpu_sampler(num_gpus)) is None:
            return
        with own_folder(folder) as there, closing(JsonlWriter(there / f"{os.uname().nodename}.jsonl")) as stream:
            while not over.wait(INTERVAL_S):
                for values in sample():
                    stream.append({"time": time.time(), **values})
    except Exception as error:
        print(f"warning: {os.uname().nodename}: GPU monitoring stopped: {error!r}", file=sys.stderr, flush=True)


def _gpu_sampler(num_gpus: int) -> Callable[[], list[Sample]] | None:
    """Return a function that reads this run's GPUs, or None if NVML is missing or finds none."""
    try:
        import pynvml as nvml

        nvml.nvmlInit()
        gpus = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    except Exception:  # a broken driver may raise anything
        return None
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    mine = [index for index in range(len(gpus)) if str(index) in visible]
    chosen = mine if len(mine) >= num_gpus else range(len(gpus))  # a rank may see only its own
    rx, tx = nvml.NVML_PCIE_UTIL_RX_BYTES, nvml.NVML_PCIE_UTIL_TX_BYTES  # in KB/s
    fields: dict[str, Callable[[Any], float]] = {
        "sm_percent": lambda gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu,
        "power_w": lambda gpu: nvml.nvmlDeviceGetPowerUsage(gpu) / 1e3,
        "power_limit_w": lambda gpu: nvml.nvmlDeviceGetPowerManagementLimit(gpu) / 1e3,
        "memory_bytes": lambda gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).used,
        "memory_total_bytes": lambda gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).total,
        "temperature_c": lambda gpu: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU),
        "pcie_rx_gb_per_s": lambda gpu: nvml.nvmlDeviceGetPcieThroughput(gpu, rx) / 1e6,
        "pcie_tx_gb_per_s": lambda gpu: nvml.nvmlDeviceGetPcieThroughput(gpu, tx) / 1e6,
    }

    def read(index: int) -> Sample:
        values: Sample = {"gpu": index}
        for name, field in fields.items():
            with suppress(nvml.NVMLError):  # unsupported by this GPU
                values[name] = field(gpus[index])
        return values

    return (lambda: [read(index) for index in chosen]) if chosen else None
