"""Print progress and the final table on rank 0's terminal."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from clap_ds.run_records.schema import Summary, upgrade_summary
from clap_ds.utils.errors import count_of, duration_of, printable


class Progress:
    """A line per advance: steps done and time left. `first` steps were done before this start."""

    def __init__(self, num_steps: int, *, enabled: bool, first: int = 0) -> None:
        self._num_steps = num_steps
        self._enabled = enabled
        self._first = first
        self._done = first
        self._started_s = time.monotonic()

    def advance(self, num_steps: int, text: str) -> None:
        """Print a line on `num_steps` more steps."""
        self._done += num_steps
        if not self._enabled:
            return
        elapsed_s = time.monotonic() - self._started_s
        # Steps of earlier starts took none of this start's time.
        s_per_step = elapsed_s / max(self._done - self._first, 1)
        remaining = duration_of(s_per_step * (self._num_steps - self._done))
        print(f"step {self._done}/{self._num_steps}  {text}  {remaining} left", flush=True)


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
    # Names are aligned left, values right.
    name_width = max(len(name) for name, _ in cells)
    value_width = max(len(value) for _, value in cells)
    lines = [run_title(summary)]
    lines += [f"  {name:{name_width}}  {value:>{value_width}}" for name, value in cells]
    # It tells how to state the peak of an unknown device.
    if "flops" in summary and summary["peak_tflops"] is None:
        lines.append(summary["peak_source"])
    lines += [f"warning: {text}" for text in summary.get("warnings", [])]
    print(printable("\n".join(lines), "\n"), flush=True)


def rows(summary: Summary) -> Iterator[tuple[str, str]]:
    """Yield name and value of the final table's rows."""
    rate = upgrade_summary(summary)["samples_per_s_per_gpu"]
    step = summary["step_time_s"]
    unit = "GPU" if summary["device_type"] == "cuda" else "rank"
    yield f"samples/s/{unit}", f"{rate['mean']:,.2f}"
    yield f"  range of {len(rate['windows'])} windows", f"{rate['min']:,.2f} – {rate['max']:,.2f}"
    yield "samples/s (total)", f"{summary['samples_per_s']:,.2f}"
    yield "seconds per step", f"{summary['global_batch'] / summary['samples_per_s']:,.3f}"
    by_deepspeed = summary["deepspeed_samples_per_s"]
    # DeepSpeed's timer leaves out two steps, which may be all.
    deepspeed_rate = "–" if by_deepspeed is None else f"{by_deepspeed:,.2f}"
    yield "samples/s (total), DeepSpeed's timer", deepspeed_rate
    yield "step time, median", f"{1000 * step['median']:,.1f} ms"
    yield "step time, 95th percentile", f"{1000 * step['p95']:,.1f} ms"
    yield "step time, slowest rank", f"{1000 * step['slowest_rank_median']:,.1f} ms"
    yield "data wait", f"{summary['data_wait_percent']:.2f}%"
    memory = f"{summary['memory_peak_bytes'] / 2**30:,.2f} GiB"
    reserved = summary.get("memory_reserved_peak_bytes")
    if reserved:
        memory += f" of tensors, {reserved / 2**30:,.2f} GiB reserved"
    yield "peak memory per rank (largest)", memory
    if "joules_per_sample" in summary:
        per_sample = f"{summary['joules_per_sample']:,.4g} J per sample"
        yield "energy", f"{per_sample}, {summary['energy_kwh']:,.4g} kWh"
    if "flops" in summary:
        yield from _utilization_rows(summary, summary["flops"], summary["peak_tflops"])
    breakdown = summary["breakdown_s"] or {}
    for phase, seconds in breakdown.items():
        percent = 100 * seconds / sum(breakdown.values())
        yield f"  {phase.replace('_', ' ')}", f"{1000 * seconds:,.1f} ms  {percent:5.1f}%"


def _utilization_rows(
    summary: Summary, flops: dict[str, Any], peak: float | None
) -> Iterator[tuple[str, str]]:
    yield "TFLOPS achieved per device, forward and backward", f"{summary['achieved_tflops']:,.3f}"
    yield "GFLOPs per sample, forward and backward", f"{flops['training_gflops']:,.4f}"
    if peak is None:
        yield "MFU", "– (unknown peak)"
        return
    published = summary["mfu_published_percent"]
    # The published convention doesn't cover open_clip's models.
    if published is not None:
        name = f"MFU, published convention (3 × {flops['published_gflops']:.2f} GFLOPs)"
        yield name, f"{published:.2f}% of {peak:g} TFLOPS"
    yield "MFU (executed FLOPs)", f"{summary['mfu_model_percent']:.2f}% of {peak:g} TFLOPS"
    # Without recomputation HFU equals MFU.
    if flops["recomputed_gflops"]:
        yield "HFU (incl. recomputation)", f"{summary['hfu_percent']:.2f}% of {peak:g} TFLOPS"
