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
    names, rows = list(SlowRank.__annotations__), []
    for run in runs:
        found = read_json(run, "summary", []).get("slow_ranks")
        slow = [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []
        rows += [[run.name, *(str(each.get(name, "")) for name in names)] for each in slow]
    yield from [markdown_table(["run", *(name.replace("_", " ") for name in names)], rows)] * bool(rows)
    for number, run in enumerate(runs, start=1):
        if len(lines := [*json_lines(run / "lags.jsonl")]) > 1:
            yield Figure(f"lags-{number}.png", f"Each host's slowest rank, {run.name}", draw(run, lines))


@styled()
def draw(run: Path, lines: Sequence[dict[str, Any]]) -> Picture:
    """How far a run's hosts were behind, over hours, by the lines of its `lags.jsonl`."""
    import pandas as pd

    hosts = [str(host) for host in read_json(run, "environment", []).get("hosts") or ["?"]]
    frame = pd.DataFrame([[line.get("time"), *(line.get("behind_percent") or [])] for line in lines])
    frame = frame.reindex(columns=range(len(hosts) + 1)).apply(pd.to_numeric, errors="coerce").dropna(subset=0)
    picture, every = Picture((min(0.5 + 0.12 * len(hosts), 6),)), 1 + len(hosts) // 40
    (axes,), hours = picture.panels, (frame[0] - frame[0].min()) / 3600
    mesh = axes.pcolormesh(hours, range(len(hosts)), frame.iloc[:, 1:].T, cmap="Greys", vmin=0, vmax=30)
    axes.set_yticks(range(0, len(hosts), every), hosts[::every])
    axes.set(xlabel="hours", ylim=(len(hosts) - 0.5, -0.5))
    picture.figure.colorbar(mesh, label="% behind the median rank", extend="max")
    return picture
