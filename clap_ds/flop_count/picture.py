"""Where the forward cost goes, as stacked bars: both published models at 77 and at 514 text tokens, published convention."""

from __future__ import annotations

from typing import TYPE_CHECKING

from clap_ds.config.model import load_preset
from clap_ds.flop_count.analytic import TextLengths, forward_components

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BARS = [(name, tokens) for name in ("tiny", "base") for tokens in (77, 514)]
GROUPS: dict[str, tuple[str, ...]] = {
    "audio: front end (STFT, mel)": ("stft_convolution", "fft", "mel", "stretch"),
    "audio: block linears": ("block_linears",),
    "audio: window attention": ("window_attention",),
    "audio: patches, merging, heads": ("patch_embedding", "patch_mergings", "tscam_conv", "audio_projection"),
    "text: linears": ("text_linears",),
    "text: attention (and pooler, projection: 0.003)": ("text_attention", "text_pooler", "text_projection"),
}
"""Bar segment → components it adds up; all of them together are the forward pass."""
_COLORS = ("#0b3c5d", "#328cc1", "#a9d3ea", "#d9edf7", "#f4b860", "#fdf0e0")  # told apart in greyscale, with hatching
_HATCHES = ("", "", "////", "....", "", "xxxx")


def draw() -> Figure:
    """One bar for each preset and caption length."""
    from matplotlib.figure import Figure

    bars = []
    for name, tokens in BARS:
        config = load_preset(f"htsat_{name}_roberta_base")
        bars.append(forward_components(config, TextLengths.fixed(tokens), "published"))
    figure = Figure(figsize=(7.2, 3.4), layout="constrained")
    axes = figure.subplots()
    left = [0.0] * len(bars)
    for (group, parts), color, hatch in zip(GROUPS.items(), _COLORS, _HATCHES, strict=True):
        widths = [sum(bar[part] for part in parts) / 1e9 for bar in bars]
        drawn = axes.barh(range(len(bars)), widths, 0.62, left, color=color, hatch=hatch, edgecolor="0", linewidth=0.5)
        drawn.set_label(group)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.bar_label(drawn, [f"{total:.2f}" for total in left], padding=4, fontsize=8)
    axes.set_yticks(range(len(bars)), [f"{name}, {tokens} tokens" for name, tokens in BARS], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.12 * max(left))
    axes.set_xlabel("forward GFLOPs per sample, published convention", fontsize=8)
    axes.tick_params(labelsize=8, width=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=7.5)
    return figure
