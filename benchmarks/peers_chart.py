"""Draw records of `benchmarks.compare_baselines` as bars: how many times as long a training step takes in other programs.

python -m benchmarks.peers_chart results/cpu/peers/amx_{padded,packed}.json --output results/cpu/peers/amx.png
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from clap_ds.analysis.figure import COLORS, Picture, styled


def ratios(record: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return each program's ratio and interval, fastest first: with SpecAugment if measured so, in its faster mode."""
    found: dict[str, dict[str, float]] = {}
    for case in sorted(record, key=lambda case: case["spec_augment"]):
        sides = sorted(case["sides"], key=lambda side: -side["speed"]["median"])
        found |= {side["side"].split(",")[0]: side["speed"] for side in sides}
    return dict(sorted(found.items(), key=lambda item: item[1]["median"]))


@styled()
def draw(paths: list[Path]) -> Picture:
    """Draw a group of bars for each program, with one bar for each record."""
    picture = Picture((1.7,), columns_wide=2)
    (axes,) = picture.panels
    coverages = set[float]()
    for number, path in enumerate(paths):
        speeds = ratios(json.loads(path.read_text()))
        coverages |= {speed["coverage"] for name, speed in speeds.items() if name != "ours"}
        middle = [speed["median"] for speed in speeds.values()]
        errors = [[abs(speed[end] - speed["median"]) for speed in speeds.values()] for end in ("low", "high")]
        rows, label = [row + 0.4 * number for row in range(len(speeds))], f"{path.stem.split('_')[-1]} captions"
        bars = axes.barh(rows, middle, 0.36, xerr=errors, color=COLORS[number], label=label)
        axes.bar_label(bars, [f"{each:.2f}" for each in middle], label_type="center", color="w", fontsize=7)
        names = ["clap-ds" if name == "ours" else name for name in speeds]
        axes.set_yticks([row + 0.2 * number for row in range(len(speeds))], names)
    axes.grid(axis="y", visible=False)
    axes.invert_yaxis()
    axes.set_xlabel(f"time of a training step, clap-ds = 1 (less is faster; {min(coverages):.0%} intervals)")
    axes.legend(loc="upper right")
    return picture


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", nargs="+", type=Path, help="JSON files that benchmarks.compare_baselines wrote")
    parser.add_argument("--output", required=True, type=Path, help="picture to write (.png, .svg or .pdf)")
    options = parser.parse_args()
    draw(options.records).save(options.output)
