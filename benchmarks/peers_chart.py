"""Draw records of `benchmarks.compare_baselines` as bars: how many times as long a training step takes in other programs.

python -m benchmarks.peers_chart results/cpu/peers/amx_{padded,packed}.json --output results/cpu/peers/amx.png
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.container import BarContainer

from clap_ds.analysis.figure import COLORS, Picture, styled


def ratios(path: Path) -> pd.DataFrame:
    """Return each program's ratio and interval, fastest first: with SpecAugment if measured so, in its faster mode."""
    sides = pd.json_normalize(json.loads(path.read_text()), "sides", "spec_augment")
    sides["program"] = sides["side"].str.partition(",")[0].replace("ours", "clap-ds")
    sides = sides.sort_values(["spec_augment", "speed.median"], ascending=[False, True]).drop_duplicates("program")
    return sides.set_index("program").sort_values("speed.median")


@styled()
def draw(paths: list[Path]) -> Picture:
    """Draw a group of bars for each program, with one bar for each record."""
    picture = Picture()
    (axes,) = picture.panels
    records = pd.concat({f"{path.stem.split('_')[-1]} captions": ratios(path) for path in paths}, axis=1)
    speed = {name: records.xs(f"speed.{name}", axis=1, level=1) for name in ("median", "low", "high", "coverage")}
    medians = speed["median"]
    errors = np.abs([(speed[end] - medians).to_numpy().T for end in ("low", "high")]).swapaxes(0, 1)
    medians.plot.barh(ax=axes, xerr=errors, color=COLORS, width=0.8)
    for bars in axes.containers:
        if isinstance(bars, BarContainer):
            axes.bar_label(bars, fmt="%.2f", label_type="center", color="w", fontsize=7)
    axes.grid(axis="y", visible=False)
    axes.invert_yaxis()
    coverage = speed["coverage"].drop("clap-ds").min(axis=None)
    axes.set(xlabel=f"time of a training step, clap-ds = 1 (less is faster; {coverage:.0%} intervals)", ylabel="")
    axes.legend(loc="upper right")
    return picture


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", nargs="+", type=Path, help="JSON files that benchmarks.compare_baselines wrote")
    parser.add_argument("--output", required=True, type=Path, help="picture to write (.png, .svg or .pdf)")
    options = parser.parse_args()
    draw(options.records).save(options.output)
