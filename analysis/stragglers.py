"""Who made the others wait: the ranks that a run's record names (`record/stragglers.py`), and hosts by time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from clap_ds.analysis.figure import Blocks, Figure, Picture, styled
from clap_ds.analysis.record import json_lines, read_json
from clap_ds.analysis.table import markdown_table
from clap_ds.record.schema import SlowRank


def blocks(runs: Sequence[Path]) -> Blocks:
    """A table of the ranks that were slow at the end of their run, and a map of each run that has lines enough for one."""
    names = list(SlowRank.__annotations__)
    rows = [
        [run.name, *(str(slow.get(name, "")) for name in names)]
        for run in runs
        for slow in read_json(run, "summary").get("slow_ranks") or ()
    ]
    if rows:
        yield markdown_table(["run", *(name.replace("_", " ") for name in names)], rows)
    for number, run in enumerate(runs, start=1):
        if len(lines := [*json_lines(run / "lags.jsonl")]) > 1:
            yield Figure(f"lags-{number}.png", f"Each host's slowest rank, {run.name}", draw(run, lines))


@styled()
def draw(run: Path, lines: Sequence[dict[str, Any]]) -> Picture:
    """How far a run's hosts were behind, over hours, by the lines of its `lags.jsonl`."""
    hosts = read_json(run, "environment").get("hosts") or ["?"]
    picture, every = Picture((min(0.5 + 0.12 * len(hosts), 6),)), 1 + len(hosts) // 40
    (axes,), hours = picture.panels, [(line["time"] - lines[0]["time"]) / 3600 for line in lines]
    behind = [[line["behind_percent"][host] for line in lines] for host in range(len(hosts))]
    mesh = axes.pcolormesh(hours, range(len(hosts)), behind, cmap="Greys", vmin=0, vmax=30)
    axes.set_yticks(range(0, len(hosts), every), hosts[::every])
    axes.set(xlabel="hours", ylim=(len(hosts) - 0.5, -0.5))
    picture.figure.colorbar(mesh, label="% behind the median rank", extend="max")
    return picture
