"""Load a checkpoint and evaluate it, for `clap-ds evaluate`."""

import argparse
from typing import Any

import torch

from clap_ds.checkpoint.load_weights import load_weights
from clap_ds.config import batch_sizes
from clap_ds.config.model import load_preset
from clap_ds.config.schema import EvaluationSettings
from clap_ds.config.settings import RunSettings
from clap_ds.distributed.collectives import raise_on_all_ranks
from clap_ds.distributed.init import Ranks
from clap_ds.distributed.process_group import initialize
from clap_ds.engine.engine import NonFiniteError
from clap_ds.evaluation.evaluator import Evaluator
from clap_ds.evaluation.metrics import Evaluation
from clap_ds.inference.options import BATCH_SIZE, DTYPES
from clap_ds.run_records.environment import device_name
from clap_ds.utils.errors import CollectiveUserError


def evaluate_checkpoint(
    settings: EvaluationSettings,
    arguments: argparse.Namespace,
    run: RunSettings | None,
    ranks: Ranks,
) -> tuple[Evaluation, str, dict[str, Any]]:
    """Load and evaluate a checkpoint by the command's options and configuration, if any. Return
    its description and the conditions, too. Collective; a user error on any rank is raised on
    all."""
    # The options and the checkpoint decide what the configuration doesn't.
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
    context_length = context_length or checkpoint.longest_caption
    evaluator = Evaluator(
        settings,
        model_config=checkpoint.config,
        tokenizer_name=tokenizer_name,
        context_length=context_length,
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
    conditions = {
        "checkpoint": checkpoint.path,
        "model": checkpoint.config.name,
        "world_size": ranks.world_size,
        "device_name": device_name(device),
        "precision": precision,
        "context_length": context_length,
    }
    return evaluation, checkpoint.description, conditions
