"""Command: forward cost of one sample, counted three independent ways, in two conventions.

    python -m clap_ds.flops --deepspeed_config ds_configs/htsat_tiny.json [--text_tokens L] [--json]

`--counters analytic` needs no torch and answers at once, also on a login node. What is counted is explained in
analysis/FLOPS.md.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clap_ds.config.errors import UserError, run_alone
from clap_ds.config.model import ClapConfig
from clap_ds.config.settings import RunSettings, load_run
from clap_ds.flop_count.analytic import (
    CONVENTIONS,
    TextLengths,
    forward_components,
    parameter_counts,
    published_flops,
)
from clap_ds.flop_count.peaks import achieved_tflops, mfu_percent, no_peak_message, peak_for

if TYPE_CHECKING:
    from clap_ds.flop_count.counters import Count

COUNTERS = ("analytic", "deepspeed", "torch")
Counts = dict[tuple[str, str], "Count"]
"""By convention and counter."""


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="clap_ds.flops", description=(__doc__ or "").splitlines()[0], allow_abbrev=False
    )
    parser.add_argument(
        "--deepspeed_config", type=Path, required=True, metavar="FILE", help="a run's JSON, or a packaged one's name"
    )
    parser.add_argument(
        "--text_tokens", type=int, metavar="L", help="caption length (default: the run's clap.text_tokens)"
    )
    parser.add_argument("--counters", nargs="+", choices=COUNTERS, default=list(COUNTERS), help="default: all three")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--measure_peak", action="store_true", help="measure this device's matmul ceiling (seconds)")
    parser.add_argument(
        "--samples_per_s", type=float, metavar="R", help="samples/s of one GPU: prints the MFU it amounts to"
    )
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Count and print.

    Raises:
        UserError: a bad configuration or caption length.
    """
    arguments = parse_arguments(argv)
    run = load_run(arguments.deepspeed_config)
    config = run.clap.preset()
    text_tokens = run.clap.text_tokens if arguments.text_tokens is None else arguments.text_tokens
    check_text_tokens(config, text_tokens)
    if arguments.samples_per_s is not None and not arguments.samples_per_s > 0:
        raise UserError(f"--samples_per_s: expected a number above 0, found {arguments.samples_per_s}")

    counts = count(config, text_tokens, arguments.counters)
    report = make_report(config, text_tokens, counts)
    speed = _measure_device(run, arguments) if arguments.measure_peak or arguments.samples_per_s else {}
    if arguments.json:
        print(json.dumps(report | speed, indent=2))
        return
    from clap_ds.flop_count.tables import print_report

    print_report(config, report, counts, speed)


def check_text_tokens(config: ClapConfig, text_tokens: int) -> None:
    """Refuse what the text tower has no positions for.

    Raises:
        UserError: fewer than 1 token, or more than rows in the position table.
    """
    positions = config.text.max_positions
    if not 1 <= text_tokens <= positions:
        raise UserError(
            f"--text_tokens {text_tokens}: expected 1 to {positions}, the rows of {config.name}'s position table"
            f" (a real caption can use {config.text.max_tokens}: RoBERTa numbers positions from 2)"
        )


def count(config: ClapConfig, text_tokens: int, counters: list[str]) -> Counts:
    """What the counters that look at a model say; the closed form is always there and not among them."""
    wanted = [name for name in counters if name != "analytic"]
    if not wanted:
        return {}
    # DeepSpeed logs to standard output, which is the report's.
    with contextlib.redirect_stdout(sys.stderr):
        from clap_ds.flop_count.counters import count_by_deepspeed, count_by_torch

        functions = {"deepspeed": count_by_deepspeed, "torch": count_by_torch}
        return {
            (convention, name): functions[name](config, text_tokens, convention)
            for convention in CONVENTIONS
            for name in wanted
        }


def make_report(config: ClapConfig, text_tokens: int, counts: Counts) -> dict[str, Any]:
    """The JSON report: GFLOPs of one sample's forward pass, and parameters.

    `deepspeed` and `torch` include what the counter can't see (the tables name it); null where it wasn't asked.
    """
    report: dict[str, Any] = {"preset": config.name, "text_tokens": text_tokens}
    for convention in CONVENTIONS:
        components = forward_components(config, TextLengths.fixed(text_tokens), convention)
        section: dict[str, Any] = {"analytic": components["forward"] / 1e9}
        for name in COUNTERS[1:]:
            found = counts.get((convention, name))
            section[name] = None if found is None else found.total / 1e9
        section["components"] = {name: flops / 1e9 for name, flops in components.items()}
        report[convention] = section
    report["parameters"] = dataclasses.asdict(parameter_counts(config))
    return report


def _measure_device(run: RunSettings, arguments: argparse.Namespace) -> dict[str, Any]:
    """This device's peak and, where asked, its measured ceiling and the MFU of a rate."""
    with contextlib.redirect_stdout(sys.stderr):
        import torch

        from clap_ds.measuring.matmul_ceiling import measure_matmul_tflops
        from clap_ds.record import hardware
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = hardware.device_name(device)
    peak = peak_for(name, run.clap.hardware.peak_tflops)
    found: dict[str, Any] = {
        "device_name": name,
        "peak_tflops": peak.tflops if peak else None,
        "peak_source": peak.source if peak else no_peak_message(name),
    }
    if arguments.measure_peak:
        found["matmul_tflops"] = measure_matmul_tflops(device)
    if arguments.samples_per_s:
        config, rate = run.clap.preset(), arguments.samples_per_s
        text_tokens = arguments.text_tokens or run.clap.text_tokens
        model = forward_components(config, TextLengths.fixed(text_tokens), "model")["forward"]
        found["mfu_published_percent"] = mfu_percent(published_flops(config), rate, peak)
        found["mfu_model_percent"] = mfu_percent(model, rate, peak)
        if arguments.measure_peak:
            found["achievable_percent"] = 100 * achieved_tflops(model, rate) / found["matmul_tflops"]
    return found


def command() -> None:
    """Console command `clap-flops`."""
    run_alone(main)


if __name__ == "__main__":
    command()
