"""Count one sample's forward FLOPs in closed form and with DeepSpeed's profiler, in two
conventions.

Examples:
    clap-ds flops --config htsat_tiny
    clap-ds flops --config htsat_base --context_length 514

Without torch, as on a login node, only the closed form is printed. analysis/FLOPS.md defines what
is counted.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from clap_ds.analysis.table import markdown_table
from clap_ds.config.arguments import add_config, make_parser
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
from clap_ds.utils.errors import UserError, run_alone

if TYPE_CHECKING:
    from clap_ds.flop_count.counters import Count

# Relative tolerance for equal counts: both are integers stored as floats.
EXACT = 1e-9


def main(argv: Sequence[str] | None = None) -> None:
    """Count and print. Raises UserError for an invalid configuration or caption length."""
    parser = make_parser(__doc__)
    add_config(parser, required=False, default=Path("htsat_tiny"))
    length_help = "set tokens per caption (default: the run's clap.context_length)"
    parser.add_argument("--context_length", type=int, metavar="N", help=length_help)
    arguments = parser.parse_args(argv)
    clap = load_run(arguments.config, assignments=arguments.set).clap
    config = clap.preset()
    tokens = clap.context_length if arguments.context_length is None else arguments.context_length
    if config.open_clip:
        raise UserError(
            f"{config.name}: FLOPs in closed form are of this project's models only; clap-ds bench counts others"
        )
    if not 1 <= tokens <= config.text.max_positions:
        raise UserError(
            f"--context_length {tokens}: {config.name} takes 1 to {config.text.max_positions} tokens"
        )
    try:
        counts, parameters = count(config, tokens)
    except ImportError:  # on a login node
        counts = []
        parameters = {}
    print(render(config, tokens, counts, parameters))


def count(config: ClapConfig, context_length: int) -> tuple[list[Count], dict[str, int]]:
    """Return the profiler's counts in the order of `CONVENTIONS`, and parameter counts."""
    # DeepSpeed logs to standard output, which is for the report.
    with contextlib.redirect_stdout(sys.stderr):
        from clap_ds.flop_count import counters, published_model  # these import torch

        model = counters.build(config)
        published = published_model.build_published_model(config)
        counts = [
            counters.count_by_deepspeed(published, context_length),
            counters.count_by_deepspeed(model, context_length),
        ]
        return counts, counters.parameter_counts(model)


def render(
    config: ClapConfig, tokens: int, counts: Sequence[Count], parameters: dict[str, int]
) -> str:
    """Return counts per convention and components of the closed form as a Markdown table, with
    notes."""
    lengths = TextLengths.fixed(tokens)
    published, executed = (
        forward_components(config, lengths, convention) for convention in CONVENTIONS
    )
    forward = [published["forward"], executed["forward"]]
    # The published convention counts three forward passes.
    training = [
        TRAINING_OVER_FORWARD * published["forward"],
        executed["forward"] + backward_flops(config, lengths),
    ]

    rows = [_row("closed form", forward)]
    if counts:
        profiled = [count.counted for count in counts]
        rows.append(_row("DeepSpeed's profiler alone, 2 × MACs", profiled))
        # Published counts have a convolution instead, so their cell is empty.
        rows.append(_row("+ FFT, not profiled", [count.ffts for count in counts]))
    rows.append(_row("with the backward pass", training))
    for name in executed:
        prefix = "of the stages: " if name in STAGE_VIEWS else ""
        label = prefix + name.replace("_", " ")
        rows.append(_row(label, [published[name], executed[name]]))

    notes = [agreement(forward, [sum(count) for count in counts])]
    if parameters:
        millions = {name: f"{number / 1e6:.2f}" for name, number in parameters.items()}
        template = "parameters (M): audio {audio}, text {text}, total {total} counted as in open_clip; trained {trainable}"
        notes.append(template.format_map(millions))
    positions = config.text.max_positions
    usable = config.text.max_tokens
    notes.append(
        f"published: {published_flops(config) / 1e9:.2f} at {positions} tokens; definitions: analysis/FLOPS.md"
    )
    # RoBERTa's positions start after its padding id.
    if tokens > usable:
        notes.append(
            f"{tokens} tokens can be counted but not run: captions can use {usable} of {positions} positions"
        )
    title = f"{config.name}, {tokens} text tokens: forward GFLOPs per sample"
    return "\n".join([title, "", markdown_table(["counted by", *CONVENTIONS], rows), "", *notes])


def _row(label: str, flops: Iterable[float]) -> list[str]:
    """Return a table's row in GFLOPs, with empty cells for zeros."""
    return [label, *(f"{number / 1e9:.4f}" if number else "" for number in flops)]


def agreement(analytic: Sequence[float], counted: Sequence[float]) -> str:
    """Return a line on whether the profiler, plus operations it misses, agrees with the closed
    form."""
    if not counted:
        return "the profiler was not run"
    pairs = zip(analytic, counted, strict=True)
    largest_error = max(abs(count / expected - 1) for expected, count in pairs)
    if largest_error > EXACT:
        return f"UNEXPLAINED: profiler and closed form differ by {100 * largest_error:.4f}%"
    return "the profiler agrees with the closed form to the last FLOP"


if __name__ == "__main__":
    run_alone(main)
