"""Summarize the samples of `clap_ds/run_records/gpu_monitor.py` to show what limited a run's GPUs.

Samples during checkpoint saves aren't counted. `docs/benchmarking.md` explains each column.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from clap_ds.analysis.read_run import json_lines
from clap_ds.analysis.table import markdown_table


def table(run_directories: Sequence[Path]) -> str:
    """Return a table with one line per monitored run; empty if there is none."""
    header = ["run", "samples of GPUs", "SM use < 90%", "≥ 85 °C", "mean power, W", "memory headroom"]
    return markdown_table(header, filter(None, map(_cells, run_directories)))


def _cells(run_directory: Path) -> list[str]:
    """Return a run's line: shares of samples beyond limits, with the GPU that has most of them; empty without samples."""
    import pandas as pd

    hosts = sorted((run_directory / "monitor").glob("*.jsonl"))
    lines = [{"host": path.stem, **line} for path in hosts for line in json_lines(path)]
    columns = ["host", "time", "gpu", "sm_percent", "temperature_c", "power_w", "memory_bytes", "memory_total_bytes"]
    samples = pd.DataFrame(lines, columns=columns).dropna(subset="gpu")
    for line in json_lines(run_directory / "metrics.jsonl"):
        if saved := line.get("checkpoint"):
            samples = samples[~samples["time"].between(*saved)]
    samples.index = samples["host"] + samples["gpu"].map(":{:.0f}".format)
    if samples.empty:
        return []
    cells = [run_directory.name, f"{len(samples)} of {samples.index.nunique()}"]
    for beyond in (samples["sm_percent"].dropna() < 90, samples["temperature_c"].dropna() >= 85):
        worst = beyond.groupby(level=0).mean()
        share = f"{beyond.mean():.0%}" if len(beyond) else ""
        cells.append(share + (f" (most {worst.idxmax()})" if beyond.any() else ""))
    power, free = samples["power_w"].mean(), (1 - samples["memory_bytes"] / samples["memory_total_bytes"]).dropna()
    cells.append("" if math.isnan(power) else f"{power:.0f}")
    return [*cells, "" if free.empty else f"{free.min():.0%} ({free.idxmin()})"]
