"""Synthetic DeepSpeed logs, runs, options and run directories for tests."""

import json
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

from clap_ds.analysis.published import PUBLISHED_DIR
from clap_ds.analysis.table import Run

ROOT = Path(__file__).resolve().parents[2]
DATA = Path(__file__).with_name("data")
TINY, BASE = (PUBLISHED_DIR / f"jupiter_htsat_{size}.csv" for size in ("tiny", "base"))
LAUNCHER = "[x] [INFO] [launch.py:158:main] nnodes={}, num_local_procs=4, node_rank=0\n[x] dist_world_size={}\n"


def throughput_line(step: int, average: float, current: float = 1.0) -> str:
    return (
        f"[2026-11-20 17:47:15,917] [INFO] [timer.py:264:stop] epoch=0/micro_step={step}/global_step={step}, "
        f"RunningAvgSamplesPerSec={average}, CurrSamplesPerSec={current}, MemAllocated=0.35GB, MaxMemAllocated=1.5GB\n"
    )


def running_log(step_times: list[float], batch: int = 64, every: int = 1) -> str:
    """Return DeepSpeed's log of steps with these times; the first two are not timed."""
    text = ""
    for step in range(3, len(step_times) + 1):
        if step % every == 0:
            average = batch / fmean(step_times[2:step])
            text += throughput_line(step, average, batch / step_times[step - 1])
    return text


def write(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def make_options(**changes: Any) -> Namespace:
    """Return options of `input_parser`."""
    names = ("nodes", "gpus", "gpus_per_node", "batch_per_gpu", "model", "peak_tflops")
    return Namespace(
        **{**dict.fromkeys(names), "context_length": 77, "rate": "measured", **changes}
    )


def run(nodes: int, rate: float | None, **changes: Any) -> Run:
    """Return a run, by default of HTSAT-tiny on 4 GPUs per node."""
    fields = {
        "source": "here",
        "state": "completed",
        "model": "htsat_tiny_roberta_base",
        "batch_per_gpu": 8,
    }
    fields |= {"gpus": 4 * nodes} | changes
    return Run(nodes=nodes, samples_per_s_per_gpu=rate, **fields)


def record(folder: Path, steps: list[dict[str, Any]], **summary: Any) -> Path:
    """Write a run directory with this summary (without None values) and these lines of metrics, the
    last one truncated."""
    folder.mkdir(exist_ok=True)
    (folder / "summary.json").write_text(
        json.dumps({name: value for name, value in summary.items() if value is not None})
    )
    (folder / "metrics.jsonl").write_text(
        "".join(json.dumps(step) + "\n" for step in steps) + '{"phase": "timed", "st'
    )
    return folder


def run_main(main: Callable[[list[str]], None], *arguments: object) -> None:
    """Run a command's `main` with these arguments."""
    main([str(argument) for argument in arguments])
