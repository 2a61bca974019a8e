"""Summarize the samples of `clap_ds/run_records/gpu_monitor.py` to show what limited a run's GPUs.

Samples during checkpoint saves aren't counted. `docs/watching.md` explains each column.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from clap_ds.analysis.read_run import json_lines
from clap_ds.analysis.table import markdown_table

if TYPE_CHECKING:
    import pandas as pd

CHECKS = {
    "SM use < 90%": ("sm_percent < 90", ["sm_percent"]),
    # Half the limit of a 700 W GPU; GPUs with lower limits are not expected to draw it.
    "< 350 W": ("power_w < 350 and power_limit_w >= 650", ["power_w", "power_limit_w"]),
    "≥ 85 °C": ("temperature_c >= 85", ["temperature_c"]),
    "PCIe > 20 GB/s": ("pcie_rx_gb_per_s > 20", ["pcie_rx_gb_per_s"]),
}


def load_samples(run_directory: Path) -> pd.DataFrame:
    """Return the samples, each with its `source`: `host` or `host:gpu`."""
    import pandas as pd

    hosts = sorted((run_directory / "monitor").glob("*.jsonl"))
    samples = pd.DataFrame([{"host": path.stem, **line} for path in hosts for line in json_lines(path)])
    if samples.empty:
        return samples
    samples["source"] = samples["host"]
    if "gpu" in samples:
        samples["source"] += samples["gpu"].map(":{:.0f}".format, na_action="ignore").fillna("")
    for line in json_lines(run_directory / "metrics.jsonl"):
        if saved := line.get("checkpoint"):
            samples = samples[~samples["time"].between(*saved)]
    return samples


def flagged(samples: pd.DataFrame, check: str) -> str:
    """Return the share of samples that meet one of `CHECKS` and the source with most of them; empty if not measured."""
    condition, fields = CHECKS[check]
    if not set(fields) <= set(samples) or (samples := samples.dropna(subset=fields)).empty:
        return ""
    bad = samples.eval(condition)
    return f"{bad.mean():.0%}" + (f" (most {bad.groupby(samples['source']).mean().idxmax()})" if bad.any() else "")


def table(run_directories: Sequence[Path]) -> str:
    """Return a table with one line per monitored run; empty if there is none."""
    rows = []
    for directory in run_directories:
        if (samples := load_samples(directory)).empty:
            continue
        headroom = ""
        if {"memory_bytes", "memory_total_bytes"} <= set(samples):
            free = 1 - samples["memory_bytes"] / samples["memory_total_bytes"]
            headroom = f"{free.min():.0%} ({samples['source'][free.idxmin()]})"
        number = f"{len(samples)} of {samples['source'].nunique()}"
        rows.append([directory.name, number, *(flagged(samples, check) for check in CHECKS), headroom])
    return markdown_table(["run", "samples of GPUs or hosts", *CHECKS, "memory headroom"], rows) if rows else ""
