"""Open a run: its directory with the first files, its watchdog, and the record of how it ends."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from deepspeed.comm import log_summary

from clap_ds.config.files import write_atomically
from clap_ds.config.settings import RunSettings
from clap_ds.cpu_kernels.patch_model import report
from clap_ds.distributed import error_file, watchdog
from clap_ds.distributed.collectives import gather, raise_on_all_ranks, run_on_rank0
from clap_ds.distributed.init import Ranks
from clap_ds.engine.exit_handling import record_outcome
from clap_ds.run_records import cpu_binding, environment
from clap_ds.run_records.run_dir import RunDirectory, create_run_dir


@contextmanager
def open_run_dir(run: RunSettings, ranks: Ranks, device: torch.device) -> Iterator[RunDirectory]:
    """Open the run directory with its first files. In the body the watchdog runs, and the run's end
    is recorded. A collective."""
    kernels = report(run.clap.cpu_kernels) if device.type == "cpu" else None
    here = environment.environment(device, kernels)
    gpu = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    everywhere = gather(cpu_binding.place_of_rank(here["host"], here["device_name"], gpu))
    with raise_on_all_ranks():
        path = Path(run_on_rank0(partial(create_run_dir, run, here, everywhere)))
    record = RunDirectory(path)
    if ranks.is_main_process:
        if ranks.job_folder is not None:
            write_atomically(ranks.job_folder / "run_directory", f"{record.path}\n")
        nodes = len({place["host"] for place in everywhere})
        print(f"run directory: {path}\nranks: {ranks.world_size}, nodes: {nodes}", flush=True)
        problem = cpu_binding.find_wrong_binding(
            everywhere, getattr(run.clap.data, "num_workers", 0)
        )
        if problem:
            print(f"warning: {problem}", file=sys.stderr, flush=True)
        if device.type == "cpu" and run.precision == "bf16":
            print(f"CPU kernels: {kernels}", flush=True)
    error_file.set_error_dir(record.path, ranks.rank, ranks.host)
    if not run.clap.debug.enabled:  # a debugger may hold a rank for hours
        watchdog.start(record.path)
    what = lambda: f"micro-batch {run.micro_batch} on {environment.device_name(device)}"  # noqa: E731
    with record_outcome(record, ranks, what):
        yield record
        if run.deepspeed.get("comms_logger", {}).get("enabled"):
            log_summary()
    record.close()
