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
from clap_ds.config import batch_sizes
from clap_ds.config.arguments import add_config, add_json, make_parser, whole_number
from clap_ds.config.model import load_preset
from clap_ds.config.schema import LOSS, EvaluationSettings
from clap_ds.config.settings import RunSettings, load_run
from clap_ds.distributed.init import (
    Ranks,
    add_rank_options,
    choose_accelerator,
    initialize,
    run_command,
)
from clap_ds.inference import options
from clap_ds.inference.options import DTYPES
from clap_ds.utils.errors import CollectiveUserError, UserError, explain, printable
from clap_ds.utils.files import show_results

if TYPE_CHECKING:
    from clap_ds.evaluation.metrics import Evaluation

BATCH_SIZE = 32
NUM_BROKEN_SHOWN = 5


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("checkpoint", metavar="CHECKPOINT", help="folder or file of weights, or a Hub name")
    options.add_model_options(parser, precision="the configuration's, or fp32")
    raw = "evaluate the raw weights of a run with clap.train.ema_decay, not their moving average"
    add("--no_ema", action="store_true", help=raw)
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
    more = "read captions from this txt or json field, or the first of several (default: txt;caption;text)"
    add("--caption_key", metavar="NAME", help=more)
    add("--class_key", metavar="FIELD", help="read the class from this json field (default: kind)")
    add(
        "--template",
        action="append",
        metavar="TEXT",
        help="add a caption with {} for the class; repeatable",
    )
    size = f"set clips per rank (default: the configuration's, or {BATCH_SIZE})"
    add("--batch_size", type=whole_number(), metavar="N", help=size)
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
    arguments = parse_arguments(argv)
    if arguments.set and not arguments.config:
        raise UserError("--set changes a configuration: give --config, too")
    run = load_run(arguments.config, assignments=arguments.set) if arguments.config else None
    settings = evaluation_settings(arguments, run)
    options.check_output(arguments.json, "--json")
    choose_accelerator()  # imports torch
    evaluate_checkpoint(settings, arguments, run, ranks)


def evaluation_settings(
    arguments: argparse.Namespace, run: RunSettings | None
) -> EvaluationSettings:
    """Merge command-line options into the configuration's `clap.evaluation`, if any."""

    content: dict[str, Any] = run.clap.evaluation.model_dump() if run else {}
    zero_shot = {
        "shards": arguments.zero_shot,
        "class_key": arguments.class_key,
        "templates": arguments.template,
    }
    content["zero_shot"] = {**(content.get("zero_shot") or {}), **_given(zero_shot)} or None
    changes = {
        "tokenizer": arguments.tokenizer,
        "batch_size": arguments.batch_size,
        "num_workers": arguments.num_workers,
    }
    retrieval = {"shards": arguments.retrieval, "caption_key": arguments.caption_key}
    content["retrieval"] = {**(content.get("retrieval") or {}), **_given(retrieval)} or None
    content |= _given(changes)
    content["tokenizer"] = content.get("tokenizer") or getattr(
        run and run.clap.data, "tokenizer", None
    )
    if not (content["retrieval"] or content["zero_shot"]):
        where = f"{run.path} has no clap.evaluation" if run else "no --deepspeed_config given"
        raise UserError(
            f"nothing to evaluate ({where}): give --retrieval SHARDS, --zero_shot SHARDS or both"
        )
    try:
        return EvaluationSettings.model_validate(content)
    except ValidationError as error:
        raise UserError(
            "\n".join(
                f"clap.evaluation.{explain(each, EvaluationSettings)}" for each in error.errors()
            )
        ) from None


def _given(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def evaluate_checkpoint(
    settings: EvaluationSettings,
    arguments: argparse.Namespace,
    run: RunSettings | None,
    ranks: Ranks,
) -> None:
    """Load and evaluate a checkpoint, print a table and write JSON. Collective; a user error on any
    rank is raised on all."""
    # Importing torch takes seconds: validate first.
    import torch

    from clap_ds.checkpoint.load_weights import load_weights
    from clap_ds.distributed.collectives import raise_on_all_ranks
    from clap_ds.engine.loss import LOSSES
    from clap_ds.evaluation.evaluator import Evaluator
    from clap_ds.run_records.environment import device_name

    allow_mixed_code = run is not None and run.clap.debug.allow_mixed_code
    device = initialize(ranks, allow_mixed_code=allow_mixed_code)
    expected = (
        load_preset(arguments.preset) if arguments.preset else run.clap.preset() if run else None
    )
    with raise_on_all_ranks():
        checkpoint = load_weights(
            arguments.checkpoint, expected, best=arguments.best, raw=arguments.no_ema
        )
        tokenizer_name = settings.tokenizer or checkpoint.tokenizer_name
    if checkpoint.loss_kind not in LOSSES:
        lacks = (
            f"trained with the loss {checkpoint.loss_kind!r}; this version has {', '.join(LOSSES)}"
        )
        raise CollectiveUserError(f"{arguments.checkpoint}: {lacks}")
    said = (
        run.clap.context_length if run and "context_length" in run.clap.model_fields_set else None
    )
    evaluator = Evaluator(
        settings,
        model_config=checkpoint.config,
        tokenizer_name=tokenizer_name,
        context_length=said or checkpoint.longest_caption,
        micro_batch=settings.batch_size
        or (run and run.deepspeed.get(batch_sizes.MICRO_BATCH))
        or BATCH_SIZE,
        loss_kind=checkpoint.loss_kind,
        ranks=ranks,
    )
    precision = arguments.precision or (
        run.precision if run and run.precision in DTYPES else "fp32"
    )
    model = checkpoint.build_for(device, getattr(torch, DTYPES[precision]))
    try:
        evaluation = evaluator.evaluate(model)
    except ValueError as error:  # the same on all ranks
        raise CollectiveUserError(str(error)) from None
    if ranks.is_main_process:
        where = {
            "checkpoint": checkpoint.path,
            "model": checkpoint.config.name,
            "world_size": ranks.world_size,
        }
        where |= {
            "device_name": device_name(device),
            "precision": precision,
            "context_length": evaluator.context_length,
        }
        title = "{model} on {world_size} × {device_name}, {precision}, {context_length} text tokens".format_map(
            where
        )
        report = render(evaluation, f"{checkpoint.shown}: {title}")
        show_results(report, {**where, **evaluation.to_dict()}, arguments.json)


def render(evaluation: Evaluation, title: str) -> str:
    """Return a table of each metric (percent, except the loss) with its interval, chance level and
    counts."""
    rows = []
    for task, result in evaluation.tasks.items():
        rows.append(
            [
                f"{task} ({', '.join(f'{count:,} {what}' for what, count in result.counts.items())})",
                "",
                "",
                "",
            ]
        )
        for name, measure in result.measures.items():
            factor, digits, unit = (1, 4, "") if name == LOSS else (100, 2, "%")
            value, chance, low, high = (f"{factor * each:.{digits}f}" for each in astuple(measure))
            rows.append([name, value + unit, f"[{low}, {high}]", chance + unit])
    report = f"{printable(title)}\n\n{markdown_table(['metric', 'value', '95% interval', 'chance'], rows)}"
    if broken := evaluation.broken:
        examples = printable("; ".join(map(str, broken[:NUM_BROKEN_SHOWN])))
        report += f"\nskipped {len(broken)} broken clips, first: {examples}"
    return report


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run this rank of the command and exit."""
    run_command(lambda ranks: run_rank(ranks, argv))


if __name__ == "__main__":
    main()
