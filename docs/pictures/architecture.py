"""Draw the way of a batch through the modules, and what overlaps in a training step.

python docs/pictures/architecture.py --output FILE
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

INK = "#22303c"
LOADER_COLOR = "#dcefe3"
RANK_COLOR = "#dbe8f7"
NETWORK_COLOR = "#fbe3cd"
BOX_WIDTH = 2.1
BOX_HEIGHT = 1.0

# Column, row, title, file, and color of each box. Rows count from the top.
BOXES = [
    (0, 0, "this rank's shards", "data/shard_assignment.py", LOADER_COLOR),
    (1, 0, "read and shuffle", "data/shard_reader.py", LOADER_COLOR),
    (2, 0, "decode and crop", "data/decoding.py, clip.py", LOADER_COLOR),
    (3, 0, "rows in shared memory", "data/webdataset.py", LOADER_COLOR),
    (4, 0, "join, copy to the GPU", "data/dataloader.py", RANK_COLOR),
    (4, 1.15, "log-mel spectrogram", "model/mel.py", RANK_COLOR),
    (3, 1.15, "audio tower (HTSAT)", "model/htsat.py", RANK_COLOR),
    (3, 2.25, "text tower (RoBERTa)", "model/text.py", RANK_COLOR),
    (2, 1.7, "global contrastive loss", "engine/loss.py", RANK_COLOR),
    (1, 1.7, "backward, all-reduce", "engine/gradient_sync.py", NETWORK_COLOR),
    (0, 1.7, "AdamW, fp32 weights", "engine/optimizer.py", RANK_COLOR),
]
# Indexes of the boxes that an arrow connects.
ARROWS = [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (5, 6), (6, 8), (7, 8), (8, 9), (9, 10)]

# Lane, start, end, label, and color of each bar. The unit of time is arbitrary.
BARS = [
    ("loader workers", 0.0, 12.0, "read and decode the next batches", LOADER_COLOR),
    ("copy stream", 0.0, 1.6, "next batch → GPU", LOADER_COLOR),
    ("compute", 0.0, 2.4, "audio forward", RANK_COLOR),
    ("compute", 2.4, 3.9, "text forward", RANK_COLOR),
    ("compute", 4.2, 4.9, "loss", RANK_COLOR),
    ("compute", 4.9, 7.6, "backward: text", RANK_COLOR),
    ("compute", 7.6, 10.4, "backward: audio", RANK_COLOR),
    ("compute", 11.0, 12.0, "AdamW", RANK_COLOR),
    ("network", 2.4, 3.3, "gather audio", NETWORK_COLOR),
    ("network", 3.9, 4.2, "", NETWORK_COLOR),
    ("network", 5.9, 7.1, "bucket 1", NETWORK_COLOR),
    ("network", 7.2, 8.4, "bucket 2", NETWORK_COLOR),
    ("network", 8.6, 9.8, "bucket 3", NETWORK_COLOR),
    ("network", 10.0, 11.0, "last bucket", NETWORK_COLOR),
]
LANES = ["loader workers", "copy stream", "compute", "network"]


def draw_boxes(axes: Axes) -> None:
    """Draw what happens to a batch, as boxes that name the files."""
    centers = []
    for column, row, title, file, color in BOXES:
        x = column * (BOX_WIDTH + 0.45)
        y = -row * (BOX_HEIGHT + 0.35)
        style = "round,pad=0.04,rounding_size=0.12"
        axes.add_patch(
            FancyBboxPatch((x, y), BOX_WIDTH, BOX_HEIGHT, style, facecolor=color, edgecolor=INK)
        )
        middle = x + BOX_WIDTH / 2
        axes.text(middle, y + 0.64, title, ha="center", va="center", fontsize=9, color=INK)
        axes.text(middle, y + 0.28, file, ha="center", va="center", fontsize=7, family="monospace")
        centers.append((middle, y + BOX_HEIGHT / 2))
    for start, end in ARROWS:
        # Arrows end at the edges of boxes, whose centers they connect: points from center to edge.
        shrink = 34 if is_vertical(centers[start], centers[end]) else 66
        axes.add_patch(
            FancyArrowPatch(
                centers[start],
                centers[end],
                arrowstyle="-|>",
                mutation_scale=11,
                shrinkA=shrink,
                shrinkB=shrink,
                color=INK,
            )
        )
    # Captions go past the spectrogram: from the right edge of "join" to that of the text tower.
    join_y = centers[4][1]
    text_y = centers[7][1]
    right_edge = centers[4][0] + BOX_WIDTH / 2
    axes.plot(
        [right_edge + 0.05, right_edge + 0.3, right_edge + 0.3],
        [join_y, join_y, text_y],
        color=INK,
        linewidth=1,
    )
    tower_edge = centers[7][0] + BOX_WIDTH / 2
    axes.annotate(
        "",
        (tower_edge + 0.05, text_y),
        (right_edge + 0.3, text_y),
        arrowprops={"arrowstyle": "-|>", "color": INK, "shrinkA": 0},
    )
    axes.text((tower_edge + right_edge) / 2, text_y + 0.1, "captions", ha="center", fontsize=8)
    axes.set_xlim(-0.2, 5 * (BOX_WIDTH + 0.45))
    axes.set_ylim(-3.4, 1.3)
    axes.axis("off")
    axes.set_title("The way of a batch", loc="left", fontsize=11, color=INK)


def is_vertical(start: tuple[float, float], end: tuple[float, float]) -> bool:
    """Return whether an arrow connects boxes of one column."""
    return abs(start[0] - end[0]) < 0.1


def draw_step(axes: Axes) -> None:
    """Draw which parts of a step run at the same time."""
    for lane, start, end, label, color in BARS:
        y = -LANES.index(lane)
        axes.barh(y, end - start, left=start, height=0.62, color=color, edgecolor=INK)
        axes.text((start + end) / 2, y, label, ha="center", va="center", fontsize=8, color=INK)
    axes.annotate(
        "gather text",
        (4.05, -3.31),
        (4.05, -3.75),
        ha="center",
        fontsize=7,
        arrowprops={"arrowstyle": "-", "color": INK},
    )
    axes.annotate(
        "exposed: only this part of\nthe all-reduce costs time",
        (10.7, -3.31),
        (10.7, -4.0),
        ha="center",
        fontsize=8,
        arrowprops={"arrowstyle": "->", "color": INK},
    )
    axes.set_yticks([-row for row in range(len(LANES))], LANES, fontsize=9)
    axes.set_xticks([])
    axes.set_ylim(-4.1, 0.6)
    axes.set_xlim(-0.05, 12.1)
    for side in ("top", "right", "bottom", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(length=0)
    axes.set_title(
        "A step on several GPUs, clap.gradient_sync = overlap (not to scale)",
        loc="left",
        fontsize=11,
        color=INK,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", required=True, type=Path)
    options = parser.parse_args()
    figure, (top, bottom) = pyplot.subplots(
        2, 1, figsize=(11, 7.4), height_ratios=[1.25, 1], layout="constrained"
    )
    draw_boxes(top)
    draw_step(bottom)
    # Without a date and version, equal drawings are equal files.
    figure.savefig(options.output, dpi=130, metadata={"Software": None})


if __name__ == "__main__":
    main()
