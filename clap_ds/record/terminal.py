"""What a run shows on rank 0's terminal: progress while it runs, a table when it is done."""

from __future__ import annotations

import time

from rich.console import Console
from rich.table import Table

from clap_ds.record.schema import Summary
from clap_ds.record.statistics import interval_label


class Progress:
    """Steps done, live rate and time left: a line per advance.

    Args:
        num_steps: at the end.
        enabled: show anything at all.
        first: steps done before, which took none of this run's time.
    """

    def __init__(self, num_steps: int, *, enabled: bool, first: int = 0) -> None:
        self._num_steps, self._enabled = num_steps, enabled
        self._first = self._done = first
        self._started_s = time.monotonic()

    def advance(self, num_steps: int, text: str) -> None:
        """Say that `num_steps` more steps are done."""
        self._done += num_steps
        if self._enabled:
            elapsed_s = time.monotonic() - self._started_s
            left_s = elapsed_s / max(self._done - self._first, 1) * (self._num_steps - self._done)
            print(f"step {self._done}/{self._num_steps}  {text}  {left_s:.0f} s left", flush=True)


def print_summary(summary: Summary) -> None:
    """The final table."""
    table = Table(show_header=False)
    table.add_column("quantity")
    table.add_column("value", justify="right")
    for name, value in rows(summary):
        table.add_row(name, value)
    console = Console(width=max(100, Console().width), highlight=False)
    console.print(title(summary), style="bold", soft_wrap=True)
    console.print(table)
    if "flops" in summary and summary["peak_tflops"] is None:
        console.print(summary["peak_source"], soft_wrap=True)


def title(summary: Summary) -> str:
    """One line: model, device, scale, precision."""
    return (
        f"{summary['preset']} on {summary['world_size']} × {summary['device_name']},"
        f" {summary['num_nodes']} node{'s' if summary['num_nodes'] > 1 else ''}, {summary['precision']},"
        f" micro-batch {summary['micro_batch_per_gpu']}, {summary['text_tokens']} text tokens"
    )


def rows(summary: Summary) -> list[tuple[str, str]]:
    """Name and value of every line of the final table."""
    rate, step = summary["samples_per_s_per_gpu"], summary["step_time_s"]
    unit = "GPU" if summary["device_type"] == "cuda" else "rank"
    host_alone = " (the host alone)" if unit == "GPU" and summary.get("deepspeed_times_host_alone") else ""
    lines = [
        (f"samples/s/{unit}", f"{rate['mean']:,.2f}"),
        (
            f"  {interval_label(rate.get('coverage'), len(rate['windows']))}",
            f"{rate['low']:,.2f} – {rate['high']:,.2f}",
        ),
        ("samples/s in all", f"{summary['samples_per_s']:,.2f}"),
        (f"samples/s in all, by DeepSpeed's timer{host_alone}", _number(summary["deepspeed_samples_per_s"])),
        ("step time, median", _seconds(step["median"])),
        ("step time, 95th percentile", _seconds(step["p95"])),
        ("step time, slowest rank", _seconds(step["slowest_rank_median"])),
        ("waiting for data", f"{summary['data_wait_percent']:.2f} %"),
        ("peak memory per rank (largest)", _memory(summary)),
        *_utilization_rows(summary),
    ]
    breakdown = summary["breakdown_s"] or {}
    total = sum(breakdown.values())
    for phase, seconds in breakdown.items():
        lines.append((f"  {phase.replace('_', ' ')}", f"{_seconds(seconds)}  {100 * seconds / total:5.1f} %"))
    lines += [("warning", text) for text in summary.get("warnings", [])]
    return lines


def _utilization_rows(summary: Summary) -> list[tuple[str, str]]:
    """MFU by both counts of FLOPs, each named with what it counts."""
    if "flops" not in summary:
        return []
    flops = summary["flops"]
    lines = [
        ("TFLOPS achieved per device, forward and backward", f"{summary['achieved_tflops']:,.3f}"),
        ("GFLOPs a sample, forward and backward", f"{flops['training_gflops']:,.4f}"),
        ("GFLOPs a sample, forward", f"{flops['model_gflops']:,.4f}"),
    ]
    if flops["recomputed_gflops"]:
        recomputed = f"{summary['hardware_tflops']:,.3f} ({flops['recomputed_gflops']:.4f} GFLOPs a sample done twice)"
        lines.insert(1, ("  with what is done twice", recomputed))
    if flops["deepspeed_gflops"] is not None:
        unseen = sum(flops["deepspeed_unseen_gflops"].values())
        value = f"{flops['deepspeed_gflops']:,.4f}" + (f" ({unseen:.4f} of it unseen by it)" if unseen else "")
        lines.append(("  by DeepSpeed's profiler", value))
    if summary["peak_tflops"] is None:
        lines.append(("MFU", "– (unknown peak)"))
    else:
        peak = f"of {summary['peak_tflops']:g} TFLOPS"
        published = f"MFU, published convention (3 × {flops['published_gflops']:.2f} GFLOPs)"
        lines.append((published, f"{summary['mfu_published_percent']:.2f} % {peak}"))
        lines.append(("MFU, work really done", f"{summary['mfu_model_percent']:.2f} % {peak}"))
        if flops["recomputed_gflops"]:
            lines.append(("  with what is done twice (HFU)", f"{summary['hfu_percent']:.2f} % {peak}"))
    if "matmul_tflops" in summary:
        share = f"{summary['achievable_percent']:.2f} % of {summary['matmul_tflops']:,.2f} TFLOPS"
        lines.append(("of what matrix products achieve here", share))
    return lines


def _memory(summary: Summary) -> str:
    reserved = summary.get("memory_reserved_peak_bytes")
    held = f" of tensors, {reserved / 2**30:,.2f} GiB reserved" if reserved else ""
    return f"{summary['memory_peak_bytes'] / 2**30:,.2f} GiB{held}"


def _seconds(value: float) -> str:
    return f"{1000 * value:,.1f} ms"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:,.2f}"
