"""Evaluate a checkpoint by audio–text retrieval and zero-shot classification.

Examples:
    clap-ds evaluate CHECKPOINT --retrieval 'held_out/*.tar' --zero_shot 'held_out/*.tar'
    deepspeed clap_ds/evaluate.py CHECKPOINT --deepspeed_config my_run.json
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import astuple
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if __package__ in (None, ""):
    # Launched by path: sys.path holds the package's folder, not its parent.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from pydantic import ValidationError

from clap_ds.analysis.table import markdown_table
from clap_ds.config.arguments import add_config, add_json, make_parser, whole_number, with_field
from clap_ds.config.schema import RETRIEVAL_LOSS, EvaluationSettings
from clap_ds.config.settings import RunSettings, load_run
from clap_ds.distributed.init import Ranks, add_rank_options, choose_accelerator, run_command
from clap_ds.inference import options
from clap_ds.utils.errors import UserError, explain, printable
from clap_ds.utils.files import show_results

if TYPE_CHECKING:
    from clap_ds.evaluation.metrics import Evaluation

# option → field of `clap.evaluation`
FIELDS = {
    "tokenizer": "tokenizer",
    "batch_size": "batch_size",
    "num_workers": "num_workers",
    "retrieval": "retrieval.shards",
    "caption_key": "retrieval.caption_key",
    "zero_shot": "zero_shot.shards",
    "class_key": "zero_shot.class_key",
    "template": "zero_shot.templates",
}
# Broken clips that the report names.
NUM_BROKEN_SHOWN = 5


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command's options."""
    parser = make_parser(__doc__)
    add = parser.add_argument
    add(
        "checkpoint",
        metavar="CHECKPOINT",
        help="folder or file of weights (path or URL), or a Hub name",
    )
    options.add_model_options(parser, precision="the configuration's, or fp32")
    add(
        "--no_ema",
        action="store_true",
        help=(
            "evaluate the raw weights of a run with clap.train.ema_decay, not their moving average"
        ),
    )
    add(
        "--retrieval",
        nargs="+",
        metavar="SHARDS",
        help="evaluate retrieval on tars of clips with captions",
    )
    add(
        "--zero_shot",
        nargs="+",
        metavar="SHARDS",
        help="classify clips of tars that have a class in their json",
    )
    add(
        "--caption_key",
        metavar="NAME",
        help=(
            "read captions from this txt or json field, or the first of several "
            "(default: txt;caption;text)"
        ),
    )
    add("--class_key", metavar="FIELD", help="read the class from this json field (default: kind)")
    add(
        "--template",
        action="append",
        metavar="TEXT",
        help="add a caption with {} for the class; repeatable",
    )
    add(
        "--batch_size",
        type=whole_number(),
        metavar="N",
        help=f"set clips per rank (default: the configuration's, or {options.BATCH_SIZE})",
    )
    add(
        "--num_workers",
        type=whole_number(0),
        metavar="N",
        help="set decoding processes per rank (default: 0)",
    )
    add_json(parser)
    add_config(parser, required=False)
    add_rank_options(parser)
    return parser.parse_args(argv)


def run_rank(ranks: Ranks, argv: Sequence[str] | None) -> None:
    """Validate options, evaluate the checkpoint, and print a table or write JSON."""
    arguments = parse_arguments(argv)
    run = None
    if arguments.config:
        run = load_run(arguments.config, assignments=arguments.set)
    elif arguments.set:
        raise UserError("--set changes a configuration: give --config, too")
    settings = evaluation_settings(arguments, run)
    # An evaluation may take hours before it writes the file.
    options.check_output(arguments.json, "--json")
    choose_accelerator()

    # Importing torch takes seconds: mistakes are reported before.
    from clap_ds.inference.evaluate_checkpoint import evaluate_checkpoint

    evaluation, checkpoint, conditions = evaluate_checkpoint(settings, arguments, run, ranks)
    if not ranks.is_main_process:
        return
    title = (
        "{model} on {world_size} × {device_name}, {precision}, {context_length} text tokens"
    ).format_map(conditions)
    report = render(evaluation, f"{checkpoint}: {title}")
    show_results(report, {**conditions, **evaluation.to_dict()}, arguments.json)


def evaluation_settings(
    arguments: argparse.Namespace, run: RunSettings | None
) -> EvaluationSettings:
    """Merge command-line options into the configuration's `clap.evaluation`, if any."""
    content: dict[str, Any] = {}
    if run is not None:
        # By default training's tokenizer, or else the checkpoint's.
        content["tokenizer"] = getattr(run.clap.data, "tokenizer", None)
        content |= run.clap.evaluation.model_dump(exclude_none=True)
    for option, field in FIELDS.items():
        value = getattr(arguments, option)
        if value is not None:
            content = with_field(content, field, value)
    if content.keys().isdisjoint(("retrieval", "zero_shot")):
        source = f"{run.path} has no clap.evaluation" if run else "no --deepspeed_config given"
        raise UserError(
            f"nothing to evaluate ({source}): give --retrieval SHARDS, --zero_shot SHARDS or both"
        )
    try:
        return EvaluationSettings.model_validate(content)
    except ValidationError as error:
        problems = [explain(problem, EvaluationSettings) for problem in error.errors()]
        raise UserError("\n".join(f"clap.evaluation.{problem}" for problem in problems)) from None


def render(evaluation: Evaluation, title: str) -> str:
    """Return a table of each metric (percent, except the loss) with its interval, chance level and
    counts."""
    rows = []
    for task, result in evaluation.tasks.items():
        counts = ", ".join(f"{count:,} {noun}" for noun, count in result.counts.items())
        rows.append([f"{task} ({counts})", "", "", ""])
        for name, measure in result.measures.items():
            # Other metrics are fractions.
            if name == RETRIEVAL_LOSS:
                numbers = [f"{number:.4f}" for number in astuple(measure)]
                unit = ""
            else:
                numbers = [f"{100 * number:.2f}" for number in astuple(measure)]
                unit = "%"
            value, chance, low, high = numbers
            rows.append([name, value + unit, f"[{low}, {high}]", chance + unit])
    header = ["metric", "value", "95% interval", "chance"]
    report = f"{printable(title)}\n\n{markdown_table(header, rows)}"
    if broken := evaluation.broken:
        examples = printable("; ".join(map(str, broken[:NUM_BROKEN_SHOWN])))
        report += f"\nskipped {len(broken)} broken clips, first: {examples}"
    return report


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run this rank of the command and exit."""
    run_command(lambda ranks: run_rank(ranks, argv))


if __name__ == "__main__":
    main()
