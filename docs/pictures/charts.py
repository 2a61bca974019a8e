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
LEAST_LABELED_MS = 7.0
RATE_TICKS = (50, 100, 200, 500, 1000, 2000)
# Model and processor, threads, batch and instructions in the text of `compare_baselines`.
HARDWARE = r"# (.+)\n\n(\d+) threads, (micro-batch \d+),[^\0]*?ours native \((\w+)\)"


def list_bars(axes: Axes) -> list[BarContainer]:
    return [bars for bars in axes.containers if isinstance(bars, BarContainer)]


@styled()
def draw_flops(paths: Sequence[Path]) -> FigureBuilder:
    """Draw forward GFLOPs per sample by component, with a bar for each record, and the published
    figures as lines."""
    picture = FigureBuilder((2.6,))
    (axes,) = picture.panels
    records = [json.loads(path.read_text()) for path in paths]
    parts = pd.DataFrame([record["published"]["components"] for record in records])
    groups = pd.DataFrame(
        {name: parts[[*components]].sum(axis=1) for name, components in FLOPS_GROUPS.items()}
    )
    groups.plot.bar(
        ax=axes,
        stacked=True,
        color=[COLORS[index] for index in (4, 0, 3, 5, 1, 2)],
        legend=False,
        rot=0,
    )
    axes.bar_label(
        list_bars(axes)[-1],
        [f"{total:.2f}" for total in parts["forward"]],
        padding=2,
        weight="bold",
    )
    axes.set_xticks(range(len(records)), [f"{record['text_tokens']} tokens" for record in records])
    for name in dict.fromkeys(record["preset"] for record in records):
        published = FORWARD_GFLOPS[name]
        bars = [index for index, record in enumerate(records) if record["preset"] == name]
        title = name.split("_roberta")[0].replace("htsat_", "HTSAT-")
        axes.hlines(
            published, bars[0] - 0.4, bars[-1] + 0.4, color="black", linestyle="--", linewidth=0.8
        )
        axes.text(bars[0] - 0.4, published + 2, f"{title}, published: {published:.2f}")
    axes.set(ylabel="forward GFLOPs per sample\n(published convention)", ylim=(0, 150))
    axes.grid(axis="x", visible=False)
    picture.add_legend_below(axes, columns=3)
    return picture


def read_kernel_times_ms(path: Path, heading: str) -> pd.Series[float]:
    """Return ms per step by class of kernels, from the first table after a heading of a record of
    `plan_validation`."""
    section = path.read_text().partition(heading)[2] if heading else path.read_text()
    rows = re.findall(
        r"^\| +(.+?) \| +\S+ \| +([\d.]+) \| +[\d.]+ \|$", section.split("\n## ")[0], re.MULTILINE
    )
    return pd.Series({name: float(ms) for name, ms in rows})


def read_median_step_ms(archive: Path, folder: str) -> float:
    """Return the median step of a run, from an archive of its records."""
    with tarfile.open(archive) as files:
        (name,) = (
            name
            for name in files.getnames()
            if re.fullmatch(rf"{folder}(run-[^/]+/)?summary\.json", name)
        )
        summary = files.extractfile(name)
        assert summary is not None
        return 1000 * float(json.load(summary)["step_time_s"]["median"])


@styled()
def draw_gpu_step(paths: Sequence[Path]) -> FigureBuilder:
    """Draw a step on an H200 in ms by class of kernels, eager beside compiled."""
    picture = FigureBuilder((1.5,))
    (axes,) = picture.panels
    records = {path.name: path for path in paths}
    bars = {}
    for bar, (record, heading, archive, folder) in GPU_STEPS.items():
        times = read_kernel_times_ms(records[record], heading)
        # Copies of batches run beside the kernels.
        times = times.drop("not in the plan: aten::copy_")
        names = [
            next(group for group, rule in KERNEL_GROUPS.items() if re.search(rule, name))
            for name in times.index
        ]
        groups = times.groupby(names).sum().reindex([*KERNEL_GROUPS], fill_value=0.0)
        step_ms = read_median_step_ms(records[archive], folder)
        bars[f"{bar}\n{step_ms:.1f} ms"] = {
            **groups,
            "rest of the timed step": step_ms - groups.sum(),
        }
    table = pd.DataFrame(bars).T
    colors = [*(COLORS[index] for index in (0, 1, 4, 5, 3, 2)), "0.92"]
    table.plot.barh(ax=axes, stacked=True, width=0.8, color=colors, edgecolor="white", legend=False)
    for part, name, color in zip(list_bars(axes), table, "wwkkwkk", strict=True):
        labels = [f"{ms:.0f}" if ms > LEAST_LABELED_MS else "" for ms in table[name]]
        axes.bar_label(part, labels, label_type="center", color=color, fontsize=7)
    axes.grid(axis="y", visible=False)
    axes.invert_yaxis()
    axes.set_xlabel("ms per step")
    picture.add_title("HTSAT-tiny on one NVIDIA H200, bf16, micro-batch 616")
    picture.add_legend_below(axes, columns=4)
    return picture


@styled()
def draw_plan(paths: Sequence[Path]) -> FigureBuilder:
    """Draw predicted over published rates, with the predicted intervals, by GPU."""
    (path,) = paths
    picture = FigureBuilder((3.0,))
    (axes,) = picture.panels
    rows = pd.json_normalize(json.loads(path.read_text()))
    limits = np.array([rows["rate"].min() / 1.7, rows["rate"].max() * 1.7])
    axes.plot(limits, limits, color="0.4", linewidth=0.8, label="predicted = published")
    axes.plot(limits, limits * 1.5, ":", color="0.4", linewidth=0.8, label="1.5 times more or less")
    axes.plot(limits, limits / 1.5, ":", color="0.4", linewidth=0.8)
    for (gpu, group), style in zip(rows.groupby("device", sort=False), SERIES_STYLES, strict=True):
        predicted = group["predicted_rate.middle"]
        errors = [predicted - group["predicted_rate.low"], group["predicted_rate.high"] - predicted]
        style = {**style, "linestyle": "none", "elinewidth": 0.8}
        axes.errorbar(
            group["rate"], predicted, errors, label=f"{gpu.upper()}, {len(group)} rates", **style
        )
    axes.set(xscale="log", yscale="log", xlim=limits, ylim=limits, aspect="equal")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_ticks(RATE_TICKS, [f"{rate:,}" for rate in RATE_TICKS])
        axis.set_ticks([], minor=True)
    axes.set(xlabel="published samples, images or sequences/s", ylabel="predicted")
    picture.add_legend_below(axes, columns=4)
    return picture


def read_ratios(path: Path) -> pd.DataFrame:
    """Return each other program's ratio and interval, fastest first: with SpecAugment if measured
    so, in its faster mode."""
    sides = pd.json_normalize(json.loads(path.read_text()), "sides", "spec_augment")
    sides = sides[sides["side"] != "ours"]
    sides["program"] = sides["side"].str.partition(",")[0]
    sides = sides.sort_values(
        ["spec_augment", "speed.median"], ascending=[False, True]
    ).drop_duplicates("program")
    sides["program"] += np.where(
        sides["spec_augment"], "\nwith SpecAugment", "\nwithout SpecAugment"
    )
    return sides.set_index("program").sort_values("speed.median")


@styled()
def draw_peers(paths: Sequence[Path]) -> FigureBuilder:
    """Draw how many times as long a step takes in other programs, from a record of
    `compare_baselines`.

    The hardware is stated by the text next to the record.
    """
    (path,) = paths
    picture = FigureBuilder()
    (axes,) = picture.panels
    ratios = read_ratios(path)
    medians = ratios["speed.median"]
    errors = np.abs([ratios["speed.low"] - medians, ratios["speed.high"] - medians])
    medians.plot.barh(ax=axes, xerr=errors, color=COLORS[0], width=0.6)
    for row, ratio in enumerate(medians):
        axes.text(0.03, row, f"{ratio:.2f}", color="w", va="center")
    axes.axvline(1, color="black", linestyle="--", linewidth=0.8)
    axes.grid(axis="y", visible=False)
    axes.invert_yaxis()
    coverage = ratios["speed.coverage"].min()
    axes.set(
        xlabel=f"time of a training step, clap-ds = 1 (less is faster; {coverage:.0%} intervals)",
        ylabel="",
    )
    model, cores, batch, instructions = re.findall(HARDWARE, path.with_suffix(".md").read_text())[0]
    precision = json.loads(path.read_text())[0]["precision"]
    picture.add_title(f"{model} with {instructions}: {cores} cores, {precision}, {batch}")
    return picture


@styled()
def draw_train_demo(paths: Sequence[Path]) -> FigureBuilder:
    """Draw loss and zero-shot accuracy of a training run, with the chance level."""
    (folder,) = paths
    picture = FigureBuilder((1.7,), columns=2)
    loss, accuracy = picture.panels
    steps = pd.DataFrame(read_steps(folder, "train")).set_index("step")
    loss.plot(steps["loss"], color=COLORS[0])
    lines = read_steps(folder, "evaluation")
    evaluations = pd.DataFrame(lines).set_index("step")
    accuracy.plot(100 * evaluations["zero_shot_top1"], "o-", color=COLORS[0], label="clap-ds")
    accuracy.axhline(
        100 * lines[-1]["chance"]["zero_shot_top1"], color="0.4", linestyle=":", label="chance"
    )
    loss.set(xlabel="step", ylabel="loss", ylim=(0, None))
    accuracy.set(xlabel="step", ylabel="zero-shot top-1 (%)", xlim=loss.get_xlim(), ylim=(0, 105))
    accuracy.legend(loc="lower right", bbox_to_anchor=(1, 0.1))
    return picture


CHARTS = {
    "flops": draw_flops, "gpu_step": draw_gpu_step, "peers": draw_peers, "plan": draw_plan, "train_demo": draw_train_demo,
}  # fmt: skip

if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("chart", choices=CHARTS, help="chart to draw")
    parser.add_argument(
        "records", nargs="+", type=Path, help="records in results/ that have its data"
    )
    parser.add_argument(
        "--output", required=True, type=Path, help="picture to write (.png, .svg or .pdf)"
    )
    options = parser.parse_args()
    CHARTS[options.chart](options.records).save(options.output)
