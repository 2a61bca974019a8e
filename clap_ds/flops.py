"""Command: forward cost of one sample, counted three independent ways, in two conventions.

    python -m clap_ds.flops --deepspeed_config ds_configs/htsat_tiny.json [--text_tokens L] [--json]

`--counters analytic` needs no torch and answers at once, also on a login node. What is counted is explained in
analysis/FLOPS.md.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from clap_ds.config.errors import UserError, run_alone
from clap_ds.config.model import ClapConfig
from clap_ds.config.settings import load_run
from clap_ds.flop_count import analytic
from clap_ds.flop_count.analytic import CONVENTIONS, Convention, TextLengths, forward_components, published_flops
from clap_ds.flop_count.peaks import TRAINING_OVER_FORWARD, utilization
from clap_ds.ranks.accelerator import nvidia_smi
from clap_ds.record.plausible import doubtful_mfu

if TYPE_CHECKING:
    from clap_ds.flop_count.counters import Count
    from clap_ds.model.clap import ClapModel

    Counts = dict[Convention, dict[str, Count]]

COUNTERS = {"deepspeed": "DeepSpeed's profiler, 2 × MACs", "torch": "torch's FlopCounterMode"}
EXACT = 1e-9
"""Relative difference up to which counters agree: both count whole numbers, held as floats."""


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    description = (__doc__ or "").split("\n")[0]
    parser = argparse.ArgumentParser(prog="clap_ds.flops", description=description, allow_abbrev=False)
    add, names, default = parser.add_argument, ["analytic", *COUNTERS], Path("htsat_tiny")
    add("--deepspeed_config", type=Path, default=default, metavar="RUN", help="JSON file, or a packaged one's name")
    add("--text_tokens", type=int, metavar="L", help="caption length (default: the run's clap.text_tokens)")
    told = "what the model is fed: with mel, log-mel features of prepared shards, the STFT isn't counted"
    add("--audio", choices=("waveform", "mel"), default="waveform", help=f"{told} (default: waveform)")
    add("--counters", nargs="+", choices=names, default=names, help="default: all three")
    add("--json", action="store_true", help="print JSON")
    rate = "samples/s of one GPU: the MFU that amounts to, by the run's peak"
    add("--samples_per_s", type=float, metavar="R", help=rate)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Count and print; a UserError for a bad configuration, caption length or rate."""
    arguments = parse_arguments(argv)
    run = load_run(arguments.deepspeed_config)
    config = run.clap.preset()
    text_tokens = run.clap.text_tokens if arguments.text_tokens is None else arguments.text_tokens
    if not 1 <= text_tokens <= config.text.max_positions:
        raise UserError(
            f"--text_tokens {text_tokens}: expected 1 to {config.text.max_positions}, the rows of {config.name}'s position"
            f" table (a real caption can use {config.text.max_tokens}: RoBERTa numbers positions from 2)"
        )
    front_end = arguments.audio == "waveform"
    counts, parameters = count(config, text_tokens, arguments.counters, front_end=front_end)
    report = make_report(config, text_tokens, counts, front_end=front_end) | {"parameters": parameters}
    if (rate := arguments.samples_per_s) is not None:
        if not rate > 0:
            raise UserError(f"--samples_per_s {rate:g}: expected a number above 0")
        device = next(iter(nvidia_smi()), "this machine's CPU").split(",")[0].strip()
        counted = published_flops(config, front_end=front_end), report["model"]["training"] * 1e9
        report["utilization"] = utilization(*counted, rate, device, run.clap.hardware.peak_tflops)
    if arguments.json:
        print(json.dumps(report, indent=2))
    else:
        print_report(config, report, counts)


def count(
    config: ClapConfig, text_tokens: int, counters: list[str], *, front_end: bool = True
) -> tuple[Counts, dict[str, int] | None]:
    """What those of the counters say that look at a model, by convention and name, of a model that computes what the
    convention counts; and this engine's parameters. Nothing and None without any."""
    if not set(counters) & set(COUNTERS):
        return {}, None
    # DeepSpeed logs to standard output, which is the report's.
    with contextlib.redirect_stdout(sys.stderr):
        from clap_ds.flop_count.counters import build, count_by_deepspeed, count_by_torch, parameter_counts
        from clap_ds.flop_count.published_model import published_model

        functions = {"deepspeed": count_by_deepspeed, "torch": count_by_torch}
        found: Counts = {}
        models: dict[Convention, Callable[[ClapConfig], ClapModel]] = {"published": published_model, "model": build}
        for convention, make in models.items():
            model = make(config)
            counts = {
                name: functions[name](model, text_tokens, front_end=front_end) for name in COUNTERS if name in counters
            }
            found[convention] = counts
        return found, parameter_counts(model)


def make_report(config: ClapConfig, text_tokens: int, counts: Counts, *, front_end: bool = True) -> dict[str, Any]:
    """The JSON report: GFLOPs of one sample's forward pass, and of its training.

    `deepspeed` and `torch` include what they can't see (the table names it); null where not asked.
    """
    audio, lengths = "waveform" if front_end else "mel", TextLengths.fixed(text_tokens)
    report: dict[str, Any] = {"preset": config.name, "audio": audio, "text_tokens": text_tokens}
    for convention in CONVENTIONS:
        flops = forward_components(config, lengths, convention, front_end=front_end)
        found, forward = counts.get(convention, {}), flops["forward"]
        done = forward + analytic.backward_flops(config, lengths)
        report[convention] = {
            "analytic": forward / 1e9,
            **{name: found[name].total / 1e9 if name in found else None for name in COUNTERS},
            "training": (done if convention == "model" else TRAINING_OVER_FORWARD * forward) / 1e9,
            "components": {name: value / 1e9 for name, value in flops.items()},
        }
    return report


def print_report(config: ClapConfig, report: dict[str, Any], counts: Counts) -> None:
    """The report as a table, the counters side by side and the components, and what to know of it."""
    console = Console(width=max(100, Console().width), highlight=False)
    fed = "" if report["audio"] == "waveform" else ", fed log-mel features"
    title = f"{config.title}, {report['text_tokens']} text tokens{fed}: forward GFLOPs per sample"
    table = Table("counted by", title=title, title_justify="left", title_style="bold")
    for convention in CONVENTIONS:
        table.add_column(convention, justify="right")

    def add_row(name: str, gflops: Iterable[float], style: str | None = None) -> None:
        table.add_row(name, *(f"{value:.4f}" if value else "–" for value in gflops), style=style)

    add_row("closed form, from the settings", [report[each]["analytic"] for each in CONVENTIONS])
    for name in next(iter(counts.values()), {}):
        found = [counts[each][name] for each in CONVENTIONS]
        add_row(f"{COUNTERS[name]}, by itself", [each.counted / 1e9 for each in found])
        for part in dict.fromkeys(part for each in found for part in each.unseen):
            add_row(f"  + {part}, which it can't see", [each.unseen.get(part, 0.0) / 1e9 for each in found])
        add_row("  in all", [each.total / 1e9 for each in found])
        if any(each.element_wise for each in found):
            own = [(each.counted + each.element_wise) / 1e9 for each in found]
            add_row('  (its "flops": norms, softmax, activations too)', own)
    add_row("with the backward pass", [report[each]["training"] for each in CONVENTIONS])
    table.add_section()
    table.add_row("component, by the closed form", style="bold")
    for name in report["model"]["components"]:
        shown = ("  of the stages: " if name in analytic.STAGE_VIEWS else "") + name.replace("_", " ")
        style = "bold" if name in ("audio_tower", "text_tower", "forward") else None
        add_row(shown, [report[each]["components"][name] for each in CONVENTIONS], style)
    console.print(table)
    for line in (agreement(report, counts), *_notes(config, report)):
        console.print(line, soft_wrap=True)


def agreement(report: dict[str, Any], counts: Counts) -> str:
    """Whether the counters, with what they can't see, find what the closed form does."""
    ratios = [
        found.total / (report[convention]["analytic"] * 1e9)
        for convention, by_counter in counts.items()
        for found in by_counter.values()
    ]
    worst = max((abs(ratio - 1) for ratio in ratios), default=0.0)
    if worst > EXACT:
        unknown = "the model executes something that clap_ds/flop_count/analytic.py doesn't know"
        return f"NOT EXPLAINED: counters and the closed form are {100 * worst:.4f} % apart: {unknown}"
    return "every counter agrees with the closed form to the last FLOP" if counts else "no counter was asked"


def _notes(config: ClapConfig, report: dict[str, Any]) -> list[str]:
    tokens, positions, usable = report["text_tokens"], config.text.max_positions, config.text.max_tokens
    notes = [
        f"published: {published_flops(config) / 1e9:.2f} at {positions} tokens; what is counted: analysis/FLOPS.md"
    ]
    if report["parameters"]:
        millions = {name: f"{number / 1e6:.2f}" for name, number in report["parameters"].items()}
        text = "parameters (M): audio {audio}, text {text}, total {total} as open_clip counts them; trained {trainable}"
        notes.insert(0, text.format_map(millions))
    if report["audio"] == "mel":
        notes.append("fed log-mel features: STFT and mel filters are counted in neither")
    if tokens > usable:
        notes.append(
            f"{tokens} tokens can be counted but not run: a caption can use {usable} of the {positions} positions"
        )
    if found := report.get("utilization"):
        percents = (
            "MFU {mfu_published_percent:.1f} % published, {mfu_model_percent:.1f} % model, of {peak_tflops:g} TFLOPS"
        )
        notes.append(percents.format_map(found) if found["peak_tflops"] else found["peak_source"])
        notes += doubtful_mfu(found["mfu_published_percent"], found["mfu_model_percent"])
    return notes


def command() -> None:
    """Console command `clap-flops`."""
    run_alone(main)


if __name__ == "__main__":
    command()
