"""The tables `clap_ds.flops` prints: the counters side by side, the components, and why counters differ."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from clap_ds.config.model import ClapConfig
from clap_ds.flop_count.analytic import CONVENTIONS

if TYPE_CHECKING:
    from clap_ds.flop_count.counters import Count

EXACT = 1e-9
"""Relative difference up to which counters agree: both count whole numbers, held as floats."""

_COUNTER_NAMES = {"deepspeed": "DeepSpeed's profiler, 2 × MACs", "torch": "torch's FlopCounterMode"}
_INDENTED = ("block_linears", "window_attention", "patch_mergings")
_TOTALS = ("audio_tower", "text_tower", "forward")


def print_report(
    config: ClapConfig, report: dict[str, Any], counts: dict[tuple[str, str], Count], speed: dict[str, Any]
) -> None:
    """Print what `clap_ds.flops.make_report` made.

    Args:
        config: sizes.
        report: the JSON report.
        counts: of the counters that were asked, by convention and name.
        speed: what was measured of this device; may be empty.
    """
    console = Console(width=max(100, Console().width), highlight=False)
    title = f"{config.title}, {report['text_tokens']} text tokens: forward GFLOPs per sample"
    console.print(_counters_table(title, report, counts))
    for line in disagreements(report, counts):
        console.print(line, soft_wrap=True)
    console.print()
    console.print(_components_table(report))
    parameters = report["parameters"]
    console.print(
        f"parameters (M): audio {parameters['audio'] / 1e6:.2f}, text {parameters['text'] / 1e6:.2f},"
        f" total {parameters['total'] / 1e6:.2f} as open_clip counts them; trained {parameters['trainable'] / 1e6:.2f}"
    )
    for line in (*_notes(config, report), *speed_lines(speed)):
        console.print(line, soft_wrap=True)


def _counters_table(title: str, report: dict[str, Any], counts: dict[tuple[str, str], Count]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("counter")
    for convention in CONVENTIONS:
        table.add_column(convention, justify="right")
    table.add_row("closed form, from the settings", *(f"{report[each]['analytic']:.4f}" for each in CONVENTIONS))
    for name, shown in _COUNTER_NAMES.items():
        found = {each: counts[each, name] for each in CONVENTIONS if (each, name) in counts}
        if not found:
            continue
        table.add_row(f"{shown}, by itself", *(f"{found[each].counted / 1e9:.4f}" for each in CONVENTIONS))
        for part in dict.fromkeys(part for each in CONVENTIONS for part in found[each].unseen):
            values = (found[each].unseen.get(part) for each in CONVENTIONS)
            table.add_row(f"  + {part}, which it can't see", *(f"{v / 1e9:.4f}" if v else "–" for v in values))
        table.add_row("  in all", *(f"{found[each].total / 1e9:.4f}" for each in CONVENTIONS))
        if name == "deepspeed":
            own = (f"{(found[each].counted + found[each].element_wise) / 1e9:.4f}" for each in CONVENTIONS)
            table.add_row('  (its "flops": norms, softmax, activations too)', *own)
    return table


def disagreements(report: dict[str, Any], counts: dict[tuple[str, str], Count]) -> list[str]:
    """The largest disagreement with the closed form before and after adding what a counter can't see, with its cause."""
    if not counts:
        return []
    lines = []
    raw, complete = [], []
    for (convention, name), found in counts.items():
        expected = report[convention]["analytic"] * 1e9
        raw.append((abs(found.counted / expected - 1), convention, name))
        complete.append((abs(found.total / expected - 1), convention, name))
    size, convention, name = max(raw)
    if size > EXACT:
        causes = " and ".join(counts[convention, name].unseen) or "unknown"
        lines.append(
            f"largest disagreement: {100 * size:.2f} % ({_COUNTER_NAMES[name]}, {convention}); cause: {causes} not seen"
        )
    size, convention, name = max(complete)
    if size <= EXACT:
        lines.append("with that added, every counter agrees with the closed form to the last FLOP")
    else:
        lines.append(
            f"NOT EXPLAINED: {100 * size:.4f} % between {_COUNTER_NAMES[name]} and the closed form ({convention}):"
            " the model executes something that clap_ds/flop_count/analytic.py doesn't know"
        )
    return lines


def _components_table(report: dict[str, Any]) -> Table:
    table = Table(title="closed form by component", title_justify="left", title_style="bold")
    table.add_column("GFLOPs")
    parts = {each: report[each]["components"] for each in CONVENTIONS}
    for convention in CONVENTIONS:
        table.add_column(convention, justify="right")
    for name in _merged(list(parts["published"]), list(parts["model"])):
        shown = name.replace("_", " ")
        if name in _INDENTED:
            shown = f"  of the stages: {shown}"
        values = (parts[each].get(name) for each in CONVENTIONS)
        style = "bold" if name in _TOTALS else None
        table.add_row(shown, *("–" if value is None else f"{value:.4f}" for value in values), style=style)
    return table


def _merged(first: list[str], second: list[str]) -> list[str]:
    """Both lists' names in order; names of one only stand before the name that follows them there."""
    merged = list(first)
    for index, name in enumerate(second):
        if name not in merged:
            following = next((later for later in second[index:] if later in merged), None)
            merged.insert(len(merged) if following is None else merged.index(following), name)
    return merged


def _notes(config: ClapConfig, report: dict[str, Any]) -> list[str]:
    lines = [
        "published: the STFT as a convolution and the AudioSet head, as the published figures count (at"
        f" {config.text.max_positions} tokens); model: what this engine executes",
        "not counted in either: element-wise work, and the loss's logits, whose cost depends on the global batch;"
        " training costs 3 × forward (backward = 2 × forward)",
    ]
    if report["text_tokens"] > config.text.max_tokens:
        lines.append(
            f"{report['text_tokens']} tokens can be counted but not run: a caption can use {config.text.max_tokens} of"
            f" the {config.text.max_positions} positions"
        )
    return lines


def speed_lines(speed: dict[str, Any]) -> list[str]:
    """What was measured of this device."""
    lines = []
    if "matmul_tflops" in speed:
        peak = speed["peak_tflops"]
        share = f", {100 * speed['matmul_tflops'] / peak:.1f} % of the peak of {peak:g}" if peak else ""
        lines.append(f"matmul ceiling measured on {speed['device_name']}: {speed['matmul_tflops']:.2f} TFLOPS{share}")
    if speed and speed["peak_tflops"] is None:
        lines.append(speed["peak_source"])
    elif speed.get("mfu_model_percent") is not None:
        lines.append(
            f"MFU: {speed['mfu_published_percent']:.2f} % in the published convention,"
            f" {speed['mfu_model_percent']:.2f} % of the work really done"
        )
    if "achievable_percent" in speed:
        lines.append(f"{speed['achievable_percent']:.2f} % of what matrix products achieve on this device")
    return lines
