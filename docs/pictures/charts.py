"""Draw the charts of docs/ that no command of the project draws, from committed records.

    PYTHONPATH=. python docs/pictures/charts.py {flops,gpu_step,peers,plan,train_demo} RECORD…
    --output FILE

`make pictures` draws all of them.
"""

from __future__ import annotations

import argparse
import json
import re
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.container import BarContainer

from clap_ds.analysis.figure import COLORS, SERIES_STYLES, FigureBuilder, styled
from clap_ds.analysis.published import FORWARD_GFLOPS
from clap_ds.analysis.read_run import read_steps

# Part of a bar: its components of a record of `clap_ds.flops`.
FLOPS_GROUPS = {
    "audio: STFT, mel": ("stft_convolution", "mel"),
    "audio: block linears": ("block_linears",),
    "audio: window attention": ("window_attention",),
    "audio: patches, merging, heads": (
        "patch_embedding",
        "patch_mergings",
        "tscam_conv",
        "audio_projection",
    ),
    "text: linears": ("text_linears",),
    "text: attention": ("text_attention", "text_pooler", "text_projection"),
}
# Part of a bar: pattern of the classes of kernels in it. The first that matches counts.
KERNEL_GROUPS = {
    "matrix products": r"product|weight gradient|aten::mm",
    "attention": "attention",
    "Triton MLPs": "mlp",
    "Inductor's fused kernels": "fused kernel",
    "norms": "norm",
    "other kernels": "",
}
# Bar: record of its kernels and the heading in it; archive with the timed run and the run's folder.
GPU_STEPS = {
    "eager": ("efficiencies.md", "profile_eager", "call1.tar.xz", "call1/compile_off/"),
    "compiled": ("efficiencies.md", "profile_compiled", "call1.tar.xz", "call1/htsat_tiny/"),
    "compiled,\nnewer code": ("step.md", "", "step.tar.xz", "step/"),
}
MIN_LABELED_MS = 7.0
RATE_TICKS = (50, 100, 200, 500, 1000, 2000)
# Model and processor, threads, batch and instructions in the text of `compare_baselines`.
HARDWARE = r"# (.+)\n\n(\d+) threads, (micro-batch \d+),[^\0]*?ours native \((\w+)\)"


def list_bars(axes: Axes) -> list[BarContainer]:
    return [bars for bars in axes.containers if isinstance(bars, BarContainer)]


@styled()
def draw_flops(paths: Sequence[Path]) -> FigureBuilder:
    """Draw forward GFLOPs per sample by component, with a bar for each record, and the published
    figures as lines."""
    figure = FigureBuilder((2.6,))
    (axes,) = figure.panels
    # One bar each.
    records = [json.loads(path.read_text()) for path in paths]
    components = pd.DataFrame([record["published"]["components"] for record in records])
    # Rows are records, columns groups of components.
    groups = pd.DataFrame()
    for group, names in FLOPS_GROUPS.items():
        groups[group] = components[[*names]].sum(axis=1)
    colors = [COLORS[index] for index in (4, 0, 3, 5, 1, 2)]
    groups.plot.bar(ax=axes, stacked=True, color=colors, legend=False, rot=0)
    # The last group is at the top of the bars.
    totals = [f"{total:.2f}" for total in components["forward"]]
    axes.bar_label(list_bars(axes)[-1], totals, padding=2, weight="bold")
    axes.set_xticks(range(len(records)), [f"{record['text_tokens']} tokens" for record in records])
    presets = [record["preset"] for record in records]
    for preset in dict.fromkeys(presets):
        # A line across the preset's bars, which stand side by side.
        start = presets.index(preset) - 0.4
        end = start + presets.count(preset) - 0.2
        published = FORWARD_GFLOPS[preset]
        axes.hlines(published, start, end, color="black", linestyle="--", linewidth=0.8)
        title = preset.split("_roberta")[0].replace("htsat_", "HTSAT-")
        axes.text(start, published + 2, f"{title}, published: {published:.2f}")
    axes.set(ylabel="forward GFLOPs per sample\n(published convention)", ylim=(0, 150))
    axes.grid(axis="x", visible=False)
    figure.add_legend_below(axes, columns=3)
    return figure


def read_kernel_times_ms(path: Path, heading: str) -> pd.Series[float]:
    """Return ms per step by class of kernels, from the first table after a heading of a record of
    `plan_validation`."""
    text = path.read_text()
    section = text.partition(heading)[2] if heading else text
    section = section.partition("\n## ")[0]
    # Class, efficiency or a dash, ms per step, kernels per step.
    row = r"^\| +(.+?) \| +\S+ \| +([\d.]+) \| +[\d.]+ \|$"
    return pd.Series({name: float(ms) for name, ms in re.findall(row, section, re.MULTILINE)})


def read_median_step_ms(archive: Path, folder: str) -> float:
    """Return the median step of a run, from an archive of its records."""
    pattern = re.compile(rf"{folder}(run-[^/]+/)?summary\.json")
    with tarfile.open(archive) as files:
        (name,) = filter(pattern.fullmatch, files.getnames())
        summary = files.extractfile(name)
        assert summary is not None
        return 1000 * float(json.load(summary)["step_time_s"]["median"])


def group_of(kernel_class: str) -> str:
    """Return the first group whose pattern matches."""
    return next(group for group, rule in KERNEL_GROUPS.items() if re.search(rule, kernel_class))


@styled()
def draw_gpu_step(paths: Sequence[Path]) -> FigureBuilder:
    """Draw a step on an H200 in ms by class of kernels, eager beside compiled."""
    figure = FigureBuilder((1.5,))
    (axes,) = figure.panels
    records = {path.name: path for path in paths}
    bars = {}
    for bar, (record, heading, archive, folder) in GPU_STEPS.items():
        times = read_kernel_times_ms(records[record], heading)
        # Copies of batches run beside the kernels.
        times = times.drop("not in the plan: aten::copy_")
        groups = times.groupby(group_of).sum().reindex([*KERNEL_GROUPS], fill_value=0.0)
        step_ms = read_median_step_ms(records[archive], folder)
        groups["rest of the timed step"] = step_ms - groups.sum()
        bars[f"{bar}\n{step_ms:.1f} ms"] = groups
    table = pd.DataFrame(bars).T
    colors = [*(COLORS[index] for index in (0, 1, 4, 5, 3, 2)), "0.92"]
    table.plot.barh(ax=axes, stacked=True, width=0.8, color=colors, edgecolor="white", legend=False)
    # White text on dark colors.
    for part, group, color in zip(list_bars(axes), table, "wwkkwkk", strict=True):
        labels = [f"{ms:.0f}" if ms > MIN_LABELED_MS else "" for ms in table[group]]
        axes.bar_label(part, labels, label_type="center", color=color, fontsize=7)
    axes.grid(axis="y", visible=False)
    axes.invert_yaxis()
    axes.set_xlabel("ms per step")
    figure.add_title("HTSAT-tiny on one NVIDIA H200, bf16, micro-batch 616")
    figure.add_legend_below(axes, columns=4)
    return figure


@styled()
def draw_plan(paths: Sequence[Path]) -> FigureBuilder:
    """Draw predicted over published rates, with the predicted intervals, by GPU."""
    (path,) = paths
    figure = FigureBuilder((3.0,))
    (axes,) = figure.panels
    rows = pd.json_normalize(json.loads(path.read_text()))
    # Room for the intervals on both sides.
    limits = np.array([rows["rate"].min() / 1.7, rows["rate"].max() * 1.7])
    line: dict[str, Any] = {"color": "0.4", "linewidth": 0.8}
    axes.plot(limits, limits, label="predicted = published", **line)
    axes.plot(limits, limits * 1.5, ":", label="1.5 times more or less", **line)
    axes.plot(limits, limits / 1.5, ":", **line)
    for (gpu, group), style in zip(rows.groupby("device", sort=False), SERIES_STYLES, strict=True):
        predicted = group["predicted_rate.middle"]
        errors = [predicted - group["predicted_rate.low"], group["predicted_rate.high"] - predicted]
        label = f"{gpu.upper()}, {len(group)} rates"
        points: dict[str, Any] = {**style, "linestyle": "none", "elinewidth": 0.8}
        axes.errorbar(group["rate"], predicted, errors, label=label, **points)
    axes.set(xscale="log", yscale="log", xlim=limits, ylim=limits, aspect="equal")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_ticks(RATE_TICKS, [f"{rate:,}" for rate in RATE_TICKS])
        # Only round numbers.
        axis.set_ticks([], minor=True)
    axes.set(xlabel="published samples, images or sequences/s", ylabel="predicted")
    figure.add_legend_below(axes, columns=4)
    return figure


def read_ratios(path: Path) -> pd.DataFrame:
    """Return each other program's ratio and interval, fastest first: with SpecAugment if measured
    so, in its faster mode."""
    sides = pd.json_normalize(json.loads(path.read_text()), "sides", "spec_augment")
    sides = sides[sides["side"] != "ours"]
    # `transformers, autocast`
    sides["program"] = sides["side"].str.partition(",")[0]
    order = ["spec_augment", "speed.median"]
    sides = sides.sort_values(order, ascending=[False, True]).drop_duplicates("program")
    is_masked = sides["spec_augment"].astype(bool)
    sides["program"] += np.where(is_masked, "\nwith SpecAugment", "\nwithout SpecAugment")
    return sides.set_index("program").sort_values("speed.median")


@styled()
def draw_peers(paths: Sequence[Path]) -> FigureBuilder:
    """Draw how many times as long a step takes in other programs, from a record of
    `compare_baselines`.

    The hardware is stated by the text next to the record.
    """
    (path,) = paths
    figure = FigureBuilder()
    (axes,) = figure.panels
    # Of each program, one row.
    ratios = read_ratios(path)
    medians = ratios["speed.median"]
    # Lengths of the bars on both sides.
    errors = np.abs([ratios["speed.low"] - medians, ratios["speed.high"] - medians])
    medians.plot.barh(ax=axes, xerr=errors, color=COLORS[0], width=0.6)
    # Inside the bars, as intervals stand to the right.
    for row, ratio in enumerate(medians):
        axes.text(0.03, row, f"{ratio:.2f}", color="w", va="center")
    # The step time of clap-ds.
    axes.axvline(1, color="black", linestyle="--", linewidth=0.8)
    axes.grid(axis="y", visible=False)
    axes.invert_yaxis()
    coverage = ratios["speed.coverage"].min()
    label = f"time of a training step, clap-ds = 1 (less is faster; {coverage:.0%} intervals)"
    axes.set(xlabel=label, ylabel="")
    model, cores, batch, instructions = re.findall(HARDWARE, path.with_suffix(".md").read_text())[0]
    precision = json.loads(path.read_text())[0]["precision"]
    figure.add_title(f"{model} with {instructions}: {cores} cores, {precision}, {batch}")
    return figure


@styled()
def draw_train_demo(paths: Sequence[Path]) -> FigureBuilder:
    """Draw loss and zero-shot accuracy of a training run, with the chance level."""
    (folder,) = paths
    figure = FigureBuilder((1.7,), columns=2)
    loss, accuracy = figure.panels
    steps = pd.DataFrame(read_steps(folder, "train")).set_index("step")
    loss.plot(steps["loss"], color=COLORS[0])
    lines = read_steps(folder, "evaluation")
    evaluations = pd.DataFrame(lines).set_index("step")
    accuracy.plot(100 * evaluations["zero_shot_top1"], "o-", color=COLORS[0], label="clap-ds")
    chance = lines[-1]["chance"]["zero_shot_top1"]
    accuracy.axhline(100 * chance, color="0.4", linestyle=":", label="chance")
    loss.set(xlabel="step", ylabel="loss", ylim=(0, None))
    accuracy.set(xlabel="step", ylabel="zero-shot top-1 (%)", xlim=loss.get_xlim(), ylim=(0, 105))
    accuracy.legend(loc="lower right", bbox_to_anchor=(1, 0.1))
    return figure


CHARTS = {
    "flops": draw_flops,
    "gpu_step": draw_gpu_step,
    "peers": draw_peers,
    "plan": draw_plan,
    "train_demo": draw_train_demo,
}

if __name__ == "__main__":
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    add = parser.add_argument
    add("chart", choices=CHARTS, help="chart to draw")
    add("records", nargs="+", type=Path, help="records in results/ that have its data")
    add("--output", required=True, type=Path, help="picture to write (.png, .svg or .pdf)")
    options = parser.parse_args()
    CHARTS[options.chart](options.records).save(options.output)
