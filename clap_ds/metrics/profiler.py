"""Profile some steps of a run (`clap.profile`) with torch.profiler or, if Nsight Systems runs it,
mark them for Nsight Systems.

Profiling slows steps down, so the loops don't count profiled steps in their throughput. CUPTI may
slow down later steps of the process, too: a benchmark profiles last.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Self

import torch
from torch.profiler import profile, record_function, schedule

from clap_ds.config.schema import ProfileSettings
from clap_ds.distributed.watchdog import activity
from clap_ds.metrics.timers import StepTimer, synchronize
from clap_ds.run_records.run_dir import warn_on_disk_full
from clap_ds.utils.errors import warn

# Rows of the printed table; the file has all.
PRINTED_ROWS = 15
# Allocations and frees in a memory snapshot; the last ones are kept.
MAX_MEMORY_EVENTS = 200_000
# Variables that `nsys profile` sets in the processes that it starts.
NSIGHT_VARIABLES = {"NSYS_PROFILING_SESSION_ID", "NVTX_INJECTION64_PATH"}


class StepProfiler:
    """Profiler of a run's steps on the ranks of `clap.profile`. On other ranks, and without that
    section, its methods do nothing.

    The profiler warms up in the first of the steps, and records the others. As a context manager it
    also writes what it has if the run ends before the last one.

    Args:
        timer: the engine's; it labels the steps' phases in the profile.
        folder: the run directory.
        steps: numbers of the steps (`ProfileSettings.steps_from`).
    """

    def __init__(
        self,
        settings: ProfileSettings | None,
        timer: StepTimer,
        folder: Path,
        rank: int,
        steps: range,
    ) -> None:
        self._settings = settings or ProfileSettings()
        self._timer = timer
        self._is_cuda = timer.device.type == "cuda"
        self._rank = rank
        # Paths of all files begin with it.
        self._prefix = folder / "profile" / f"rank{rank}"
        is_profiled = settings is not None and rank in settings.ranks
        self._steps = steps if is_profiled else range(0)
        # Ends what has been started.
        self._running = contextlib.ExitStack()
        self._profile: profile | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._steps:
            self._stop()
            print(f"clap.profile: the run ended before step {self._steps[-1]}", flush=True)

    def begin_step(self, step: int) -> None:
        """Start with the warm-up step."""
        if step in self._steps[:1]:
            self._start()

    def end_step(self, step: int) -> None:
        """Mark the end of a step. After the last one, write the files and print the table."""
        if step not in self._steps:
            return
        if self._profile is not None:
            self._profile.step()
        if step == self._steps[-1]:
            self._stop()
            self._steps = range(0)

    def _start(self) -> None:
        with warn_on_disk_full(self._prefix):
            self._prefix.parent.mkdir(exist_ok=True)
        if self._settings.memory and self._is_cuda:
            torch.cuda.memory._record_memory_history(max_entries=MAX_MEMORY_EVENTS)
            self._running.callback(self._write_memory)
        self._running.callback(setattr, self._timer, "label", self._timer.label)
        # CUPTI serves one profiler at a time.
        if self._is_cuda and NSIGHT_VARIABLES & os.environ.keys():
            self._timer.label = torch.cuda.nvtx.range
            torch.cuda.profiler.start()
            self._running.callback(torch.cuda.profiler.stop)
            self._running.callback(synchronize, self._timer.device)
            return
        self._timer.label = record_function
        if self._settings.memory and not self._is_cuda:
            warn("clap.profile.memory: a CPU has no memory snapshot; allocations are in the trace")
        self._profile = profile(
            schedule=schedule(wait=0, warmup=1, active=self._settings.steps, repeat=1),
            on_trace_ready=self._write_trace,
            record_shapes=True,
            # A snapshot shows more of the CUDA allocator.
            profile_memory=self._settings.memory and not self._is_cuda,
        )
        self._profile.start()
        # Before the last step, this writes the files.
        self._running.callback(self._profile.stop)

    # Writing may take longer than many steps.
    @activity("writing a profile")
    def _stop(self) -> None:
        self._running.close()

    def _write_trace(self, profiled: profile) -> None:
        """Write the trace and a table of all operators and kernels; the lowest rank prints the top
        of the table."""
        averages = profiled.key_averages()
        order = "self_cuda_time_total" if self._is_cuda else "self_cpu_time_total"
        trace = f"{self._prefix}_trace.json.gz"
        with warn_on_disk_full(self._prefix):
            table = averages.table(sort_by=order, row_limit=-1)
            Path(f"{self._prefix}_table.txt").write_text(table)
            profiled.export_chrome_trace(trace)
        if self._rank == min(self._settings.ranks):
            title = f"profile of steps {self._steps[1]} to {self._steps[-1]} on rank {self._rank}"
            top = averages.table(sort_by=order, row_limit=PRINTED_ROWS, max_name_column_width=40)
            print(f"{title}: {trace} (open it at https://ui.perfetto.dev)\n{top}", flush=True)

    def _write_memory(self) -> None:
        snapshot = f"{self._prefix}_memory.pickle"
        with warn_on_disk_full(self._prefix):
            torch.cuda.memory._dump_snapshot(snapshot)
        torch.cuda.memory._record_memory_history(enabled=None)
        page = "https://pytorch.org/memory_viz"
        print(f"memory of rank {self._rank}: {snapshot} (open it at {page})", flush=True)
