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
from clap_ds.config.schema import RETRIEVAL_LOSS, EvaluationSettings
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

# Clips per rank without a configuration.
BATCH_SIZE = 32
# Broken clips that the report names.
NUM_BROKEN_SHOWN = 5


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command's options."""
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("checkpoint", metavar="CHECKPOINT", help="folder or file of weights, or a Hub name")
    options.add_model_options(parser, precision="the configuration's, or fp32")
    raw = "evaluate the raw weights of a run with clap.train.ema_decay, not their moving average"
    add("--no_ema", action="store_true", help=raw)
    retrieval = "evaluate retrieval on tars of clips with captions"
    add("--retrieval", nargs="+", metavar="SHARDS", help=retrieval)
    zero_shot = "classify clips of tars that have a class in their json"
    add("--zero_shot", nargs="+", metavar="SHARDS", help=zero_shot)
    captions = (
        "read captions from this txt or json field, or the first of several"
        " (default: txt;caption;text)"
    )
    add("--caption_key", metavar="NAME", help=captions)
    add("--class_key", metavar="FIELD", help="read the class from this json field (default: kind)")
    template = "add a caption with {} for the class; repeatable"
    add("--template", action="append", metavar="TEXT", help=template)
    size = f"set clips per rank (default: the configuration's, or {BATCH_SIZE})"
    add("--batch_size", type=whole_number(), metavar="N", help=size)
    workers = "set decoding processes per rank (default: 0)"
    add("--num_workers", type=whole_number(0), metavar="N", help=workers)
    add_json(parser)
    add_config(parser, required=False)
    add_rank_options(parser)
    return parser.parse_args(argv)


def run_rank(ranks: Ranks, argv: Sequence[str] | None) -> None:
    """Validate options, then load torch and evaluate."""
    arguments = parse_arguments(argv)
    run = None
    if arguments.config:
        run = load_run(arguments.config, assignments=arguments.set)
    elif arguments.set:
        raise UserError("--set changes a configuration: give --config, too")
    settings = evaluation_settings(arguments, run)
    # An evaluation may take hours before it writes the file.
    options.check_output(arguments.json, "--json")
    # This imports torch.
    choose_accelerator()
    evaluate_checkpoint(settings, arguments, run, ranks)


def evaluation_settings(
    arguments: argparse.Namespace, run: RunSettings | None
) -> EvaluationSettings:
    """Merge command-line options into the configuration's `clap.evaluation`, if any."""
    content: dict[str, Any] = run.clap.evaluation.model_dump() if run else {}

    def change(section: dict[str, Any], **changes: Any) -> dict[str, Any]:
        """Change the fields whose options are set."""
        return section | {name: value for name, value in changes.items() if value is not None}

    content = change(
        content,
        tokenizer=arguments.tokenizer,
        batch_size=arguments.batch_size,
        num_workers=arguments.num_workers,
    )
    # An option for a task adds it to the configuration's.
    retrieval = change(
        content.get("retrieval") or {},
        shards=arguments.retrieval,
        caption_key=arguments.caption_key,
    )
    zero_shot = change(
        content.get("zero_shot") or {},
        shards=arguments.zero_shot,
        class_key=arguments.class_key,
        templates=arguments.template,
    )
    if not retrieval and not zero_shot:
        source = f"{run.path} has no clap.evaluation" if run else "no --deepspeed_config given"
        raise UserError(
            f"nothing to evaluate ({source}): give --retrieval SHARDS, --zero_shot SHARDS or both"
        )
    # By default training's, or else the checkpoint's.
    tokenizer = content.get("tokenizer")
    if tokenizer is None and run is not None:
        tokenizer = getattr(run.clap.data, "tokenizer", None)
    content |= {
        "retrieval": retrieval or None,
        "zero_shot": zero_shot or None,
        "tokenizer": tokenizer,
    }
    try:
        return EvaluationSettings.model_validate(content)
    except ValidationError as error:
        problems = [explain(problem, EvaluationSettings) for problem in error.errors()]
        raise UserError("\n".join(f"clap.evaluation.{problem}" for problem in problems)) from None


def evaluate_checkpoint(
    settings: EvaluationSettings,
    arguments: argparse.Namespace,
    run: RunSettings | None,
    ranks: Ranks,
) -> None:
    """Load and evaluate a checkpoint, print a table and write JSON. Collective; a user error on any
    rank is raised on all."""
    # Importing torch takes seconds: options are validated before.
    import torch

    from clap_ds.checkpoint.load_weights import load_weights
    from clap_ds.distributed.collectives import raise_on_all_ranks
    from clap_ds.engine.engine import NonFiniteError
    from clap_ds.evaluation.evaluator import Evaluator
    from clap_ds.run_records.environment import device_name

    # The options and the checkpoint decide what the configuration, if any, doesn't.
    expected_model = None
    context_length = None
    precision = "fp32"
    micro_batch = BATCH_SIZE
    allow_mixed_code = False
    if run is not None:
        expected_model = run.clap.preset()
        # By default the checkpoint's.
        if "context_length" in run.clap.model_fields_set:
            context_length = run.clap.context_length
        if run.precision in DTYPES:
            precision = run.precision
        micro_batch = run.deepspeed.get(batch_sizes.MICRO_BATCH) or BATCH_SIZE
        allow_mixed_code = run.clap.debug.allow_mixed_code
    if arguments.preset:
        expected_model = load_preset(arguments.preset)
    precision = arguments.precision or precision

    device = initialize(ranks, allow_mixed_code=allow_mixed_code)
    with raise_on_all_ranks():
        checkpoint = load_weights(
            arguments.checkpoint, expected_model, best=arguments.best, raw=arguments.no_ema
        )
        tokenizer_name = settings.tokenizer or checkpoint.tokenizer_name
    evaluator = Evaluator(
        settings,
        model_config=checkpoint.config,
        tokenizer_name=tokenizer_name,
        context_length=context_length or checkpoint.longest_caption,
        micro_batch=settings.batch_size or micro_batch,
        loss_kind=checkpoint.loss_kind,
        ranks=ranks,
    )
    model = checkpoint.build_for(device, getattr(torch, DTYPES[precision]))
    try:
        evaluation = evaluator.evaluate(model)
    except (ValueError, NonFiniteError) as error:
        # All ranks raise the same.
        raise CollectiveUserError(str(error)) from None
    if not ranks.is_main_process:
        return
    conditions = {
        "checkpoint": checkpoint.path,
        "model": checkpoint.config.name,
        "world_size": ranks.world_size,
        "device_name": device_name(device),
        "precision": precision,
        "context_length": evaluator.context_length,
    }
    title = (
        f"{checkpoint.config.name} on {ranks.world_size} × {conditions['device_name']},"
        f" {precision}, {evaluator.context_length} text tokens"
    )
    report = render(evaluation, f"{checkpoint.description}: {title}")
    show_results(report, {**conditions, **evaluation.to_dict()}, arguments.json)


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
