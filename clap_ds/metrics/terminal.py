"""Print progress and the final table on rank 0's terminal."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from clap_ds.run_records.schema import Summary, current
from clap_ds.utils.errors import count_of, duration_of, printable


class Progress:
    """Prints a line per advance: steps done and time left. `first` steps were done before this
    start."""

    def __init__(self, num_steps: int, *, enabled: bool, first: int = 0) -> None:
        self._num_steps = num_steps
        self._enabled = enabled
        self._first = self._done = first
        self._started_s = time.monotonic()

    def advance(self, num_steps: int, text: str) -> None:
        self._done += num_steps
        if self._enabled:
            elapsed_s = time.monotonic() - self._started_s
            left_s = elapsed_s / max(self._done - self._first, 1) * (self._num_steps - self._done)
            print(
                f"step {self._done}/{self._num_steps}  {text}  {duration_of(left_s)} left",
                flush=True,
            )


def run_title(summary: Summary) -> str:
    """Return what a run computes, and where. `analysis/log_formats.py` reads it from logs; with
    packed captions it doesn't, as their number of tokens is unknown."""
    accumulation = summary.get("gradient_accumulation_steps", 1)
    parts = [
        f"{summary['preset']} on {summary['world_size']} × {summary['device_name']}",
        count_of(summary["num_nodes"], "node"),
        summary["precision"],
        f"micro-batch {summary['micro_batch_per_gpu']}",
    ]
    if accumulation > 1:
        parts.append(f"accumulation {accumulation}")
    packed = "packed captions of up to " if summary.get("text_packing") else ""
    parts.append(f"{packed}{summary['context_length']} text tokens")
    return printable(", ".join(parts))


def print_summary(summary: Summary) -> None:
    """Print the final table."""
    cells = [*rows(summary)]
    notes = (
        [summary["peak_source"]] if "flops" in summary and summary["peak_tflops"] is None else []
    )
    notes += [f"warning: {text}" for text in summary.get("warnings", [])]
    left, right = (max(map(len, column)) for column in zip(*cells, strict=True))
    lines = [
        run_title(summary),
        *(f"  {name:{left}}  {value:>{right}}" for name, value in cells),
        *notes,
    ]
    print(printable("\n".join(lines), "\n"), flush=True)


def rows(summary: Summary) -> Iterator[tuple[str, str]]:
    """Yield name and value of the final table's rows."""
    rate = current(summary)["samples_per_s_per_gpu"]
    step = summary["step_time_s"]
    unit = "GPU" if summary["device_type"] == "cuda" else "rank"
    yield f"samples/s/{unit}", f"{rate['mean']:,.2f}"
    yield f"  range of {len(rate['windows'])} windows", f"{rate['min']:,.2f} – {rate['max']:,.2f}"
    yield "samples/s (total)", f"{summary['samples_per_s']:,.2f}"
    yield "seconds per step", f"{summary['global_batch'] / summary['samples_per_s']:,.3f}"
    by_deepspeed = summary["deepspeed_samples_per_s"]
    reserved = summary.get("memory_reserved_peak_bytes")
    told = "–" if by_deepspeed is None else f"{by_deepspeed:,.2f}"
    yield "samples/s (total), DeepSpeed's timer", told
    yield "step time, median", f"{1000 * step['median']:,.1f} ms"
    yield "step time, 95th percentile", f"{1000 * step['p95']:,.1f} ms"
    yield "step time, slowest rank", f"{1000 * step['slowest_rank_median']:,.1f} ms"
    yield "data wait", f"{summary['data_wait_percent']:.2f}%"
    held = f" of tensors, {reserved / 2**30:,.2f} GiB reserved" if reserved else ""
    yield "peak memory per rank (largest)", f"{summary['memory_peak_bytes'] / 2**30:,.2f} GiB{held}"
    if "joules_per_sample" in summary:
        yield (
            "energy",
            f"{summary['joules_per_sample']:,.4g} J per sample, {summary['energy_kwh']:,.4g} kWh",
        )
    if "flops" in summary:
        yield from _utilization_rows(summary, summary["flops"], summary["peak_tflops"])
    breakdown = summary["breakdown_s"] or {}
    for phase, seconds in breakdown.items():
        share = 100 * seconds / sum(breakdown.values())
        yield f"  {phase.replace('_', ' ')}", f"{1000 * seconds:,.1f} ms  {share:5.1f}%"


def _utilization_rows(
    summary: Summary, flops: dict[str, Any], peak: float | None
) -> Iterator[tuple[str, str]]:
    yield "TFLOPS achieved per device, forward and backward", f"{summary['achieved_tflops']:,.3f}"
    yield "GFLOPs per sample, forward and backward", f"{flops['training_gflops']:,.4f}"
    if peak is None:
        yield "MFU", "– (unknown peak)"
        return
    if (published := summary["mfu_published_percent"]) is not None:
        name = f"MFU, published convention (3 × {flops['published_gflops']:.2f} GFLOPs)"
        yield name, f"{published:.2f}% of {peak:g} TFLOPS"
    yield "MFU (executed FLOPs)", f"{summary['mfu_model_percent']:.2f}% of {peak:g} TFLOPS"
    if flops["recomputed_gflops"]:
        yield "HFU (incl. recomputation)", f"{summary['hfu_percent']:.2f}% of {peak:g} TFLOPS"
