"""Evaluate the engine's model during training."""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import TYPE_CHECKING

from clap_ds.distributed.collectives import run_on_rank0
from clap_ds.engine.engine import ClapEngine, NonFiniteError

if TYPE_CHECKING:
    from clap_ds.evaluation.evaluator import Evaluator


def evaluate(
    evaluator: Evaluator, engine: ClapEngine
) -> tuple[dict[str, float], dict[str, float], float]:
    """Evaluate the averaged weights, if there are any, else the model's. A collective.

    Returns:
        Metrics, their chance levels, and the seconds it took.
    """
    from clap_ds.evaluation.evaluator import (
        NonFiniteEmbeddingsError,
    )  # needs audio decoders and tokenizers

    started_s = time.monotonic()
    engine.share_statistics()
    try:
        with engine.average.in_place() if engine.average is not None else nullcontext():
            found = evaluator.evaluate(engine.model)
    except NonFiniteEmbeddingsError as error:
        raise NonFiniteError(f"after step {engine.steps} {error}") from None
    # Different devices may differ in the last bit.
    metrics, chances = run_on_rank0(lambda: (found.metrics, found.chances))
    return metrics, chances, time.monotonic() - started_s
