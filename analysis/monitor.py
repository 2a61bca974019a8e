"""What held a run's GPUs back: shares of the samples that `clap_ds/record/monitor.py` took while it stepped.

    python analysis/monitor.py RUN_DIRECTORY…

Samples taken while a checkpoint was saved aren't counted. `docs/numbers.md` says what each column is for.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from clap_ds.analysis.record import non_negative
from clap_ds.analysis.runs import parse_options
from clap_ds.analysis.table import markdown_table
from clap_ds.config.errors import UserError, run_alone

Sample = dict[str, Any]
LASTING = 3
"""Samples in a row that make traffic sustained: fewer are a burst."""
CHECKS: dict[str, tuple[Callable[[Sample], bool], int]] = {
    "SM use < 90 %": (lambda s: s["sm_percent"] < 90, 1),
    # Half of what a 700 W part may draw; a part with a lower limit is not expected to draw it.
    "< 350 W": (lambda s: s["power_limit_w"] >= 650 and s["power_w"] < 350, 1),
    "≥ 85 °C": (lambda s: s["temperature_c"] >= 85, 1),
    "PCIe > 20 GB/s": (lambda s: s["pcie_rx_gb_per_s"] > 20, LASTING),
}
"""What is flagged, and for how many samples in a row on one GPU it has to hold. A sample without the fields isn't one."""


def load_samples(run_directory: Path) -> dict[str, list[Sample]]:
    """Samples by `host` or `host:gpu`, in the order of time; lines that were cut or damaged left out."""
    saved = [line["checkpoint"] for line in _lines(run_directory / "metrics.jsonl") if line.get("checkpoint")]
    saved = [
        pair for pair in saved if isinstance(pair, list) and len(pair) == 2 and None not in map(non_negative, pair)
    ]
    samples: dict[str, list[Sample]] = {}
    for path in sorted((run_directory / "monitor").glob("*.jsonl")):
        for line in _lines(path):
            sample = {name: number for name, value in line.items() if (number := non_negative(value)) is not None}
            if "time" in sample and not any(begin <= sample["time"] <= end for begin, end in saved):
                source = f"{path.stem}:{sample['gpu']:.0f}" if "gpu" in sample else path.stem
                samples.setdefault(source, []).append(sample)
    return samples


def _lines(path: Path) -> Iterator[Sample]:
    with suppress(OSError):
        for text in path.read_bytes().split(b"\n"):
            with suppress(ValueError, RecursionError):  # the last line of a host that was killed
                line = json.loads(text)
                yield from [line] if isinstance(line, dict) else []


def flagged_share(samples: dict[str, list[Sample]], check: str) -> tuple[float, str] | None:
    """Share of samples for which one of `CHECKS` holds, and where it holds most; None where nothing measures it."""
    bad, lasting = CHECKS[check]
    flagged: dict[str, tuple[int, int]] = {}
    for source, series in samples.items():
        found: list[bool] = []
        for sample in series:
            with suppress(KeyError):
                found.append(bad(sample))
        rows = [len([*row]) for is_bad, row in itertools.groupby(found) if is_bad]
        if found:
            flagged[source] = sum(row for row in rows if row >= lasting), len(found)
    if not flagged:
        return None
    worst = max(flagged, key=lambda source: flagged[source][0] / flagged[source][1])
    return sum(bad for bad, _ in flagged.values()) / sum(total for _, total in flagged.values()), worst


def table(run_directories: Sequence[Path]) -> str:
    """A line for each run that was watched; empty where none was."""
    rows = []
    for directory in run_directories:
        if samples := load_samples(directory):
            shares = [flagged_share(samples, check) for check in CHECKS]
            cells = [f"{found[0]:.0%}{f' (most {found[1]})' if found[0] else ''}" if found else "" for found in shares]
            held = [
                (s.get("memory_bytes"), s.get("memory_total_bytes"), at) for at, each in samples.items() for s in each
            ]
            fullest = max(((used / total, at) for used, total, at in held if used and total), default=None)
            headroom = f"{1 - fullest[0]:.0%} ({fullest[1]})" if fullest else ""
            rows.append([directory.name, f"{sum(map(len, samples.values()))} of {len(samples)}", *cells, headroom])
    return markdown_table(["run", "samples of GPUs or hosts", *CHECKS, "memory headroom"], rows) if rows else ""


def main() -> None:
    directories = parse_options("What held the GPUs of runs back.", "directories").directories
    if not (text := table(directories)):
        raise UserError(f"{', '.join(map(str, directories))}: expected samples under monitor/, found none")
    print(text)


if __name__ == "__main__":
    run_alone(main)
