"""Command: where the forward cost goes, as stacked bars: both published models at 77 and at 514 text tokens.

    python -m benchmarks.plot_flops [--output results/flops/components.png] [--convention published]

The closed form of `clap_ds.flop_count.analytic` drawn; distinguishable in greyscale by lightness and hatching.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from clap_ds.config.model import load_preset
from clap_ds.flop_count.analytic import CONVENTIONS, Convention, TextLengths, forward_components

if TYPE_CHECKING:
    from matplotlib.figure import Figure

OUTPUT = Path("results/flops/components.png")
PRESETS = ("htsat_tiny_roberta_base", "htsat_base_roberta_base")
TEXT_TOKENS = (77, 514)

GROUPS: dict[str, tuple[str, ...]] = {
    "audio: front end (STFT, mel)": ("stft_convolution", "fft", "mel", "stretch"),
    "audio: block linears": ("block_linears",),
    "audio: window attention": ("window_attention",),
    "audio: patches, merging, heads": ("patch_embedding", "patch_mergings", "tscam_conv", "audio_projection"),
    "text: linears": ("text_linears",),
    "text: attention (and pooler, projection: 0.003)": ("text_attention", "text_pooler", "text_projection"),
}
"""Bar segment → components it adds up."""
_STYLES = [
    ("#0b3c5d", ""),
    ("#328cc1", ""),
    ("#a9d3ea", "////"),
    ("#d9edf7", "...."),
    ("#f4b860", ""),
    ("#fdf0e0", "xxxx"),
]


def group_components(components: dict[str, float]) -> dict[str, float]:
    """GFLOPs of each segment; they add up to the forward pass."""
    return {group: sum(components.get(name, 0.0) for name in names) / 1e9 for group, names in GROUPS.items()}


def draw(convention: Convention) -> Figure:
    """One bar for each preset and caption length."""
    from matplotlib.figure import Figure

    labels, bars = [], []
    for preset in PRESETS:
        config = load_preset(preset)
        for tokens in TEXT_TOKENS:
            labels.append(f"{'tiny' if 'tiny' in preset else 'base'}, {tokens} tokens")
            bars.append(group_components(forward_components(config, TextLengths.fixed(tokens), convention)))
    figure = Figure(figsize=(7.2, 3.4), layout="constrained")
    axes = figure.subplots()
    positions = range(len(bars))
    left = [0.0] * len(bars)
    for group, (color, hatch) in zip(GROUPS, _STYLES, strict=True):
        widths = [bar[group] for bar in bars]
        axes.barh(
            positions,
            widths,
            left=left,
            height=0.62,
            color=color,
            hatch=hatch,
            edgecolor="black",
            linewidth=0.5,
            label=group,
        )
        left = [start + width for start, width in zip(left, widths, strict=True)]
    for position, total in zip(positions, left, strict=True):
        axes.text(total + 1.5, position, f"{total:.2f}", va="center", fontsize=8)
    axes.set_yticks(list(positions), labels, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.12 * max(left))
    axes.set_xlabel(f"forward GFLOPs per sample, {convention} convention", fontsize=8)
    axes.tick_params(labelsize=8, width=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=7.5)
    return figure


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="benchmarks.plot_flops", description=(__doc__ or "").splitlines()[0], allow_abbrev=False
    )
    parser.add_argument("--output", type=Path, default=OUTPUT, metavar="FILE", help=f"default: {OUTPUT}")
    parser.add_argument("--convention", choices=CONVENTIONS, default="published")
    arguments = parser.parse_args(argv)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    draw(arguments.convention).savefig(arguments.output, dpi=160)
    print(arguments.output)


if __name__ == "__main__":
    main()
