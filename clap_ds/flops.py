"""Count one sample's forward FLOPs in closed form and with DeepSpeed's profiler, in two conventions.

    python -m clap_ds.flops --deepspeed_config ds_configs/htsat_tiny.json [--context_length L] [--json]

`--counters analytic` needs no torch and runs on a login node. analysis/FLOPS.md defines what is counted.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clap_ds.analysis.table import markdown_table
from clap_ds.config.errors import UserError, run_alone
from clap_ds.config.model import ClapConfig
from clap_ds.config.settings import load_run
from clap_ds.flop_count.analytic import (
    CONVENTIONS,
    STAGE_VIEWS,
    TextLengths,
    backward_flops,
    forward_components,
    published_flops,
)
from clap_ds.flop_count.device_specs import TRAINING_OVER_FORWARD

if TYPE_CHECKING:
    from clap_ds.flop_count.counters import Count

EXACT = 1e-9
"""Relative tolerance for equal counts: both are integers stored as floats."""


def main(argv: list[str] | None = None) -> None:
    """Count and print. Raises UserError for an invalid configuration or caption length."""
    parser = argparse.ArgumentParser("clap_ds.flops", description=(__doc__ or "").split("\n")[0], allow_abbrev=False)
    add, names, default = parser.add_argument, ["analytic", "deepspeed"], Path("htsat_tiny")
    add("--deepspeed_config", type=Path, default=default, metavar="RUN", help="read this JSON file or packaged name")
    what = "set tokens per caption (default: the run's clap.context_length)"
    add("--context_length", type=int, metavar="L", help=what)
    add("--counters", nargs="+", choices=names, default=names, help="choose counters (default: both)")
    add("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args(argv)
    clap = load_run(arguments.deepspeed_config).clap
    config, tokens = (
        clap.preset(),
        clap.context_length if arguments.context_length is None else arguments.context_length,
    )
    if not 1 <= tokens <= config.text.max_positions:
        raise UserError(f"--context_length {tokens}: {config.name} takes 1 to {config.text.max_positions} tokens")
    counts, parameters = count(config, tokens) if "deepspeed" in arguments.counters else ({}, None)
    report = make_report(config, tokens, counts) | {"parameters": parameters}
    print(json.dumps(report, indent=2) if arguments.json else render(config, report, counts))


def count(config: ClapConfig, context_length: int) -> tuple[dict[str, Count], dict[str, int]]:
    """Return the profiler's count per convention, and parameter counts."""
    with contextlib.redirect_stdout(sys.stderr):  # DeepSpeed logs to standard output, reserved for the report
        from clap_ds.flop_count.counters import build, count_by_deepspeed, parameter_counts
        from clap_ds.flop_count.published_model import published_model

        models = {"published": published_model(config), "model": build(config)}
        found = {convention: count_by_deepspeed(model, context_length) for convention, model in models.items()}
        return found, parameter_counts(models["model"])


def make_report(config: ClapConfig, context_length: int, counts: dict[str, Count]) -> dict[str, Any]:
    """Build the JSON report in GFLOPs per sample. `deepspeed` includes operations its profiler misses; null if not run."""
    lengths = TextLengths.fixed(context_length)
    report: dict[str, Any] = {"preset": config.name, "context_length": context_length}
    for convention in CONVENTIONS:
        flops = forward_components(config, lengths, convention)
        forward, found = flops["forward"], counts.get(convention)
        done = forward + backward_flops(config, lengths) if convention == "model" else TRAINING_OVER_FORWARD * forward
        report[convention] = {
            "analytic": forward / 1e9,
            "deepspeed": found and found.total / 1e9,
            "training": done / 1e9,
            "components": {name: value / 1e9 for name, value in flops.items()},
        }
    return report


def render(config: ClapConfig, report: dict[str, Any], counts: dict[str, Count]) -> str:
    """Format the report as Markdown: counts, components of the closed form, and notes."""
    both, found, rows = [report[each] for each in CONVENTIONS], [*counts.values()], list[list[str]]()

    def add_row(name: str, gflops: Iterable[float]) -> None:
        rows.append([name, *(f"{value:.4f}" if value else "" for value in gflops)])

    add_row("closed form", [each["analytic"] for each in both])
    if found:
        add_row("DeepSpeed's profiler alone, 2 × MACs", [each.counted / 1e9 for each in found])
        for part in dict.fromkeys(part for each in found for part in each.unseen):
            add_row(f"+ {part}, not profiled", [each.unseen.get(part, 0.0) / 1e9 for each in found])
    add_row("with the backward pass", [each["training"] for each in both])
    for name in report["model"]["components"]:
        shown = ("of the stages: " if name in STAGE_VIEWS else "") + name.replace("_", " ")
        add_row(shown, [each["components"][name] for each in both])
    notes = [agreement(report)]
    if report["parameters"]:
        millions = {name: f"{number / 1e6:.2f}" for name, number in report["parameters"].items()}
        text = "parameters (M): audio {audio}, text {text}, total {total} counted as in open_clip; trained {trainable}"
        notes.append(text.format_map(millions))
    tokens, positions, usable = report["context_length"], config.text.max_positions, config.text.max_tokens
    notes.append(
        f"published: {published_flops(config) / 1e9:.2f} at {positions} tokens; definitions: analysis/FLOPS.md"
    )
    if tokens > usable:
        notes.append(f"{tokens} tokens can be counted but not run: captions can use {usable} of {positions} positions")
    title = f"{config.name}, {tokens} text tokens: forward GFLOPs per sample"
    return "\n".join([title, "", markdown_table(["counted by", *CONVENTIONS], rows), "", *notes])


def agreement(report: dict[str, Any]) -> str:
    """Return a line on whether the profiler, plus operations it misses, agrees with the closed form."""
    counted = [report[each] for each in CONVENTIONS if report[each]["deepspeed"]]
    worst = max((abs(each["deepspeed"] / each["analytic"] - 1) for each in counted), default=0.0)
    if worst > EXACT:
        return f"UNEXPLAINED: profiler and closed form differ by {100 * worst:.4f}%"
    return "the profiler agrees with the closed form to the last FLOP" if counted else "the profiler was not run"


command = partial(run_alone, main)

if __name__ == "__main__":
    command()
