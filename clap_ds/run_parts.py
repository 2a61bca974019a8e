"""Build a run's model, engine and data loader from its settings, for `train.py` and `bench.py`.

All functions are collectives: a mistake that any rank finds is raised as a UserError on all.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from clap_ds.config.errors import UserError
from clap_ds.config.settings import RunSettings
from clap_ds.data.dataloader import BatchSource, build_batches
from clap_ds.distributed.collectives import raise_on_all_ranks
from clap_ds.distributed.init import Ranks, initialize
from clap_ds.engine.engine import ClapEngine
from clap_ds.engine.factory import build_model, fetch_from_hub
from clap_ds.engine.loss import build_loss
from clap_ds.model.contrastive import ContrastiveModel
from clap_ds.planning.least_memory import require_memory
from clap_ds.run_records.timers import StepTimer


@contextmanager
def joined_ranks(run: RunSettings, ranks: Ranks) -> Iterator[torch.device]:
    """Join the process group and yield the device. User errors begin with the run's file."""
    try:
        debug = run.clap.debug
        device = initialize(
            ranks,
            collective_timeout_s=debug.collective_timeout_s,
            allow_mixed_code=debug.allow_mixed_code,
        )
        yield device
    except UserError as error:
        raise type(error)(f"{run.path}: {error}") from None


def model_of(run: RunSettings, ranks: Ranks, device: torch.device) -> ContrastiveModel:
    """Build a run's model on a device, with the same weights on every rank, if a training step can
    fit in memory."""
    clap = run.clap
    require_memory(run, ranks, device)
    with raise_on_all_ranks():
        fetch_from_hub(clap.model, clap.data, ranks)
    with raise_on_all_ranks():
        torch.manual_seed(clap.seed)
        model = build_model(clap.model, clap.loss, device, clap.train.freeze).to(device)
    return model


def engine_of(
    run: RunSettings, ranks: Ranks, model: ContrastiveModel, timer: StepTimer
) -> ClapEngine:
    """Build a run's engine around a model; from here on, ranks draw different dropout and
    augmentation."""
    clap = run.clap
    with raise_on_all_ranks():
        loss = build_loss(clap.loss, run.precision, timer.peer_wait)
        engine = ClapEngine(model, loss, run.deepspeed, clap, clap.train, timer)
    torch.manual_seed(clap.seed + 1 + ranks.rank)
    return engine


def loader_of(
    run: RunSettings, ranks: Ranks, engine: ClapEngine, state: dict[str, Any] | None = None
) -> BatchSource:
    """Build a rank's data loader for an engine; it continues from `state`."""
    clap = run.clap
    with raise_on_all_ranks():
        loader = build_batches(
            clap.data,
            model=engine.model.config,
            context_length=clap.context_length,
            micro_batch=run.micro_batch,
            rank=ranks.rank,
            world_size=ranks.world_size,
            ranks_per_host=ranks.local_world_size,
            seed=clap.seed,
            device=engine.device,
            pack_captions=clap.text_packing,
            state=state,
            needs_epochs=clap.train.epochs is not None,
        )
    return loader
