"""Command: how long logs of a given size take to read, and how much memory that needs, whatever their size.

    python -m benchmarks.log_speed [--gigabytes 1] [--output results/cpu/log_speed/log_speed.md]

Writes logs of each kind as DeepSpeed prints them, a small one and a large one, and reads each in a process of its own.
"""

from __future__ import annotations

import gzip
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from benchmarks.common import make_parser, show, table
from clap_ds.analysis.log_scan import scan_log
from clap_ds.config.arguments import positive
from clap_ds.config.errors import run_alone

STAMP = "[2026-11-20 17:47:15,917] [INFO] "
STEPS_AT_A_TIME = 1000


def throughput(step: int) -> str:
    """Every step printed, as `"steps_per_print": 1` does; the seconds differ."""
    elapsed = 1.01 * (step - 2) + 0.001 * (step * 7919 % 101)
    return (
        f"{STAMP}[logging.py:123:log_dist] [Rank 0] step={step}, skipped=0, lr=[0.001, 0.001], mom=[(0.9, 0.999)]\n"
        f"{STAMP}[timer.py:264:stop] epoch=0/micro_step={step}/global_step={step}, RunningAvgSamplesPerSec="
        f"{64 * (step - 2) / elapsed}, CurrSamplesPerSec=63.12345678901, MemAllocated=0.35GB, MaxMemAllocated=1.5GB\n"
    )


def breakdown(step: int) -> str:
    """With `"wall_clock_breakdown": true`."""
    parts = "fwd: 1.00 | bwd: 2.00 | bwd_inner: 3.00 | bwd_allreduce: 1.00 | step: 1.00\n"
    micro = parts.replace(":", "_microstep:")
    line = f"{STAMP}[logging.py:123:log_dist] [Rank 0] time (ms) | "
    return f"{throughput(step)}{line}{micro}{line}{parts}"


def progress_bars(step: int) -> str:
    """Fifty states of a coloured bar for each step."""
    bars = (f"\x1b[32mEpoch 1: {at:3d}%|████      | {step}/100000 [00:10<00:20, 3.2it/s]\x1b[0m\r" for at in range(50))
    return "".join(bars) + throughput(step)


def four_ranks(step: int) -> str:
    """As `srun --label` shows them, where every rank prints."""
    return "".join(f"{rank}: {line}\n" for line in throughput(step).splitlines() for rank in range(4))


KINDS: dict[str, Callable[[int], str]] = {
    "throughput of every step": throughput, "with the breakdown": breakdown, "progress bars": progress_bars,
    "four ranks": four_ranks, "throughput, gzip": throughput,
}  # fmt: skip


def pieces(lines_of: Callable[[int], str]) -> Iterator[bytes]:
    step = 3
    while True:
        yield "".join(map(lines_of, range(step, step + STEPS_AT_A_TIME))).encode()
        step += STEPS_AT_A_TIME


def write_log(file: IO[bytes] | gzip.GzipFile, kind: str, num_bytes: float) -> None:
    written = 0
    for piece in pieces(KINDS[kind]):
        file.write(piece)
        written += len(piece)
        if written >= num_bytes:
            return


def read(path: str) -> dict[str, Any]:
    """Seconds (as a clock shows, and of the processor) and the most memory of this process, that reads a log."""
    begun, begun_cpu = time.perf_counter(), time.process_time()
    scan = scan_log(Path(path))
    assert scan.starts[-1].windows(10).rates, f"{path}: no rate"
    return {
        "gb": scan.num_bytes / 1e9, "seconds": time.perf_counter() - begun, "cpu_s": time.process_time() - begun_cpu,
        "memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6,
    }  # fmt: skip


def measure(kind: str, num_bytes: float, folder: Path) -> dict[str, Any]:
    """`read` in a process of its own, of a log that is gone after it."""
    path = folder / "run.log"
    with gzip.open(path, "wb", 1) if "gzip" in kind else path.open("wb") as file:
        write_log(file, kind, num_bytes)
    code = "import json, sys; from benchmarks.log_speed import read; print(json.dumps(read(sys.argv[1])))"
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    path.unlink()
    return {"kind": kind, **json.loads(done.stdout)}


def main() -> None:
    import torch

    from clap_ds.record.hardware import device_name

    parser = make_parser("log_speed", __doc__)
    parser.add_argument("--gigabytes", type=positive, default=1.0, help="of the large logs (default 1)")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for kind in KINDS:
            small, large = (
                measure(kind, 1e9 * size, Path(folder)) for size in (options.gigabytes / 10, options.gigabytes)
            )
            rows.append({**large, "small_memory_mb": small["memory_mb"]})
    columns = ("log {kind} | GB {gb:.2f} | s {seconds:.1f} | s of the processor {cpu_s:.1f} | MB of memory {memory_mb:.0f}"
               " | for a tenth of it {small_memory_mb:.0f}")  # fmt: skip
    cpu = device_name(torch.device("cpu"))
    text = (
        f"{cpu}, {os.cpu_count()} cores, of which one reads; memory is the whole process's.\n\n{table(columns, rows)}"
    )
    show(options.output, text, {"cpu": cpu, "logs": rows})


if __name__ == "__main__":
    run_alone(main)
