"""Who made the others wait: the ranks that a run's record names (`record/stragglers.py`), and hosts by time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from clap_ds.analysis.figure import Blocks, Figure, Picture, styled
from clap_ds.analysis.record import json_lines, read_json
from clap_ds.analysis.table import markdown_table
from clap_ds.record.schema import SlowRank


def blocks(run_directories: Sequence[Path]) -> Blocks:
    """A table of the ranks that were slow at the end of their run, and a map of each run that has lines enough for one."""
    header, rows, figures = [name.replace("_", " ") for name in SlowRank.__annotations__], list[list[str]](), []
    for number, run in enumerate(run_directories, start=1):
        slow, lines = read_json(run, "summary", []).get("slow_ranks"), list(json_lines(run / "lags.jsonl"))
        found = [each for each in slow if isinstance(each, dict)] if isinstance(slow, list) else []
        rows += [[run.name, *(str(each.get(name, "")) for name in SlowRank.__annotations__)] for each in found]
        if len(lines) > 2:
            figures.append(Figure(f"lags-{number}.png", f"Each host's slowest rank, {run.name}", draw(lines)))
    yield from [markdown_table(["run", *header], rows)] * bool(rows)
    yield from figures


@styled()
def draw(lines: Sequence[dict[str, Any]]) -> Picture:
    """How far hosts were behind, over hours, of the lines of a `lags.jsonl`."""
    import pandas as pd

    hosts, times = list(map(str, lines[0].get("hosts") or ["?"])), [line.get("time") for line in lines[1:]]
    behind = pd.DataFrame([pd.Series(line.get("behind_percent")) for line in lines[1:]], index=times)
    behind = behind.reindex(columns=range(len(hosts))).apply(pd.to_numeric, errors="coerce")
    picture, every = Picture((min(0.5 + 0.12 * len(hosts), 6),)), math.ceil(len(hosts) / 40)
    (axes,) = picture.panels
    hours = pd.to_numeric(behind.index, errors="coerce")
    mesh = axes.pcolormesh((hours - hours[0]) / 3600, range(len(hosts)), behind.T, cmap="Greys", vmin=0, vmax=30)
    axes.set_yticks(range(0, len(hosts), every), hosts[::every])
    axes.set(xlabel="hours", ylim=(len(hosts) - 0.5, -0.5))
    picture.figure.colorbar(mesh, label="% behind the median rank", extend="max")
    return picture
