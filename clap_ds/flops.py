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

EXACT = 1e-9
"""Relative tolerance for equal counts: both are integers stored as floats."""


def main(argv: Sequence[str] | None = None) -> None:
    """Count and print. Raises UserError for an invalid configuration or caption length."""
    parser = make_parser(__doc__)
    add_config(parser, required=False, default=Path("htsat_tiny"))
    what = "set tokens per caption (default: the run's clap.context_length)"
    parser.add_argument("--context_length", type=int, metavar="N", help=what)
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
    """Return the profiler's count per convention, and parameter counts."""
    with contextlib.redirect_stdout(
        sys.stderr
    ):  # DeepSpeed logs to standard output, reserved for the report
        from clap_ds.flop_count.counters import build, count_by_deepspeed, parameter_counts
        from clap_ds.flop_count.published_model import published_model

        own = build(config)
        models = {"published": published_model(config), "model": own}
        return [
            count_by_deepspeed(models[each], context_length) for each in CONVENTIONS
        ], parameter_counts(own)


def render(
    config: ClapConfig, tokens: int, counts: Sequence[Count], parameters: dict[str, int]
) -> str:
    """Return counts per convention and components of the closed form as a Markdown table, with
    notes."""
    lengths = TextLengths.fixed(tokens)
    rows = list[list[str]]()
    both = [forward_components(config, lengths, each) for each in CONVENTIONS]
    forward = [each["forward"] for each in both]

    def add_row(name: str, flops: Iterable[float]) -> None:
        rows.append([name, *(f"{each / 1e9:.4f}" if each else "" for each in flops)])

    add_row("closed form", forward)
    if counts:
        add_row("DeepSpeed's profiler alone, 2 × MACs", [each.counted for each in counts])
        add_row("+ FFT, not profiled", [each.ffts for each in counts])
    published = {"published": TRAINING_OVER_FORWARD * forward[CONVENTIONS.index("published")]}
    done = {"model": forward[CONVENTIONS.index("model")] + backward_flops(config, lengths)}
    add_row("with the backward pass", [(published | done)[each] for each in CONVENTIONS])
    for name in both[-1]:
        add_row(
            ("of the stages: " if name in STAGE_VIEWS else "") + name.replace("_", " "),
            [each[name] for each in both],
        )
    notes = [agreement(forward, [sum(each) for each in counts])]
    if parameters:
        millions = {name: f"{number / 1e6:.2f}" for name, number in parameters.items()}
        text = "parameters (M): audio {audio}, text {text}, total {total} counted as in open_clip; trained {trainable}"
        notes.append(text.format_map(millions))
    positions = config.text.max_positions
    usable = config.text.max_tokens
    notes.append(
        f"published: {published_flops(config) / 1e9:.2f} at {positions} tokens; definitions: analysis/FLOPS.md"
    )
    if tokens > usable:
        notes.append(
            f"{tokens} tokens can be counted but not run: captions can use {usable} of {positions} positions"
        )
    title = f"{config.name}, {tokens} text tokens: forward GFLOPs per sample"
    return "\n".join([title, "", markdown_table(["counted by", *CONVENTIONS], rows), "", *notes])


def agreement(analytic: Sequence[float], counted: Sequence[float]) -> str:
    """Return a line on whether the profiler, plus operations it misses, agrees with the closed
    form."""
    if not counted:
        return "the profiler was not run"
    worst = max(abs(each / own - 1) for own, each in zip(analytic, counted, strict=True))
    if worst > EXACT:
        return f"UNEXPLAINED: profiler and closed form differ by {100 * worst:.4f}%"
    return "the profiler agrees with the closed form to the last FLOP"


if __name__ == "__main__":
    run_alone(main)
