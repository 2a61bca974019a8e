"""Sample a host's GPUs every 15 s with torch's NVML functions into `monitor/<host>.jsonl`, in a thread of its first rank.

A broken driver doesn't end the run.
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import torch

from clap_ds.config.files import own_folder
from clap_ds.run_records.jsonl import JsonlWriter

INTERVAL_S = 15.0
FIELDS: dict[str, Callable[[int], float]] = {
    "sm_percent": torch.cuda.utilization,
    "power_w": lambda gpu: torch.cuda.power_draw(gpu) / 1e3,
    "temperature_c": torch.cuda.temperature,
    "memory_bytes": torch.cuda.device_memory_used,
    "memory_total_bytes": lambda gpu: torch.cuda.get_device_properties(gpu).total_memory,
}


@contextmanager
def watching(run_directory: Path | None, num_gpus: int) -> Iterator[None]:
    """Sample in the background while the body runs, unless there is no folder; the run has `num_gpus` on this host."""
    over = threading.Event()
    if run_directory is not None and torch.cuda.is_available():
        threading.Thread(target=_watch, args=(run_directory / "monitor", num_gpus, over), daemon=True).start()
    try:
        yield
    finally:
        over.set()


def _watch(folder: Path, num_gpus: int, over: threading.Event) -> None:
    host = os.uname().nodename
    try:
        with own_folder(folder) as there, closing(JsonlWriter(there / f"{host}.jsonl")) as stream:
            while not over.wait(INTERVAL_S):
                for gpu in range(num_gpus):
                    values = {}
                    for name, read in FIELDS.items():
                        with suppress(Exception):  # unsupported by this GPU, or no NVML
                            values[name] = read(gpu)
                    stream.append({"time": time.time(), "gpu": gpu, **values})
    except Exception as error:
        print(f"warning: {host}: GPU monitoring stopped: {error!r}", file=sys.stderr, flush=True)
