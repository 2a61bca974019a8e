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
from typing import Any, NamedTuple

from clap_ds.analysis.record import non_negative
from clap_ds.analysis.runs import parse_options
from clap_ds.analysis.table import markdown_table
from clap_ds.config.errors import UserError, run_alone

Sample = dict[str, Any]
LASTING = 3
"""Samples in a row that make traffic sustained: fewer are a burst."""


class Check(NamedTuple):
    """One thing to flag: samples for which `bad` holds, `lasting` of them in a row on one GPU."""

    name: str
    fields: tuple[str, ...]
    bad: Callable[[Sample], bool]
    lasting: int = 1


CHECKS = (
    Check("SM use < 90 %", ("sm_percent",), lambda s: s["sm_percent"] < 90),
    # Half of what a 700 W part may draw; a part with a lower limit is not expected to draw it.
    Check("< 350 W", ("power_w", "power_limit_w"), lambda s: s["power_w"] < 350 and s["power_limit_w"] >= 650),
    Check("≥ 85 °C", ("temperature_c",), lambda s: s["temperature_c"] >= 85),
    Check("PCIe > 20 GB/s", ("pcie_rx_gb_per_s",), lambda s: s["pcie_rx_gb_per_s"] > 20, LASTING),
)


def load_samples(run_directory: Path) -> dict[str, list[Sample]]:
    """Samples by `host` or `host:gpu`, in the order of time; lines that were cut or damaged left out."""
    saved = [line["checkpoint"] for line in _lines(run_directory / "metrics.jsonl") if line.get("checkpoint")]
    intervals = [
        pair for pair in saved if isinstance(pair, list) and len(pair) == 2 and None not in map(non_negative, pair)
    ]
    samples: dict[str, list[Sample]] = {}
    for path in sorted((run_directory / "monitor").glob("*.jsonl")):
        for line in _lines(path):
            sample = {name: number for name, value in line.items() if (number := non_negative(value)) is not None}
            time = sample.get("time")
            if time is not None and not any(begin <= time <= end for begin, end in intervals):
                source = f"{path.stem}:{sample['gpu']:.0f}" if "gpu" in sample else path.stem
                samples.setdefault(source, []).append(sample)
    return samples


def _lines(path: Path) -> Iterator[Sample]:
    with suppress(OSError):
        for text in path.read_bytes().split(b"\n"):
            with suppress(ValueError, RecursionError):  # the last line of a host that was killed
                line = json.loads(text)
                yield from [line] if isinstance(line, dict) else []


def flagged_share(samples: dict[str, list[Sample]], check: Check) -> tuple[float, str] | None:
    """Share of samples for which a check holds, and where it holds most; None where nothing measures it."""
    flagged: dict[str, tuple[int, int]] = {}
    for source, series in samples.items():
        measured = [sample for sample in series if all(name in sample for name in check.fields)]
        rows = [len([*row]) for bad, row in itertools.groupby(measured, check.bad) if bad]
        if measured:
            flagged[source] = (sum(row for row in rows if row >= check.lasting), len(measured))
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
            cells = [found and f"{found[0]:.0%}{f' (most {found[1]})' if found[0] else ''}" for found in shares]
            held = (
                (s.get("memory_bytes"), s.get("memory_total_bytes"), at) for at, each in samples.items() for s in each
            )
            fullest, where = max(((used / total, at) for used, total, at in held if used and total), default=(None, ""))
            headroom = "" if fullest is None else f"{1 - fullest:.0%} ({where})"
            number = f"{sum(map(len, samples.values()))} of {len(samples)}"
            rows.append([directory.name, number, *(cell or "" for cell in cells), headroom])
    header = ["run", "samples of GPUs or hosts", *(check.name for check in CHECKS), "memory headroom"]
    return markdown_table(header, rows) if rows else ""


def main() -> None:
    directories = parse_options("What held the GPUs of runs back.", "directories").directories
    if not (text := table(directories)):
        raise UserError(f"{', '.join(map(str, directories))}: expected samples under monitor/, found none")
    print(text)


if __name__ == "__main__":
    run_alone(main)
