"""Engines that the ranks of checkpoint tests train a few steps, with the micro model."""

import io
import itertools
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

import torch
from torch.distributed import get_rank as rank
from torch.distributed import get_world_size as world_size

from clap_ds.checkpoint.manager import Checkpointer
from clap_ds.checkpoint.train_state import TrainState
from clap_ds.config.settings import RunSettings
from clap_ds.engine.engine import ClapEngine
from clap_ds.engine.factory import freeze
from clap_ds.engine.loss import LOSSES
from clap_ds.model.clap import ClapModel
from tests.training.reference_steps import batch_source, engine_of, run_settings

ROWS = 6
"""Rows of a global batch for any number of ranks."""
SCHEDULER = {
    "type": "WarmupCosineLR",
    "params": {
        "total_num_steps": 12,
        "warmup_num_steps": 4,
        "warmup_type": "linear",
        "cos_min_ratio": 0.1,
    },
}


@contextmanager
def collect_warnings() -> Iterator[list[str]]:
    """Collect printed warnings, available after the block."""
    warnings: list[str] = []
    with redirect_stderr(io.StringIO()) as text:
        yield warnings
    warnings += [line for line in text.getvalue().splitlines() if line.startswith("warning: ")]


def settings(precision: str = "bf16", **changes: Any) -> RunSettings:
    """Return a run of `fp32`, `bf16` or `autocast`, with a global batch of `ROWS`."""
    run: dict[str, Any] = {
        "bf16": {"enabled": precision == "bf16"},
        "optimizer": {"type": "AdamW", "params": {"lr": 5e-3}},
        "train_micro_batch_size_per_gpu": ROWS // world_size(),
    }
    if precision == "autocast":
        run["torch_autocast"] = {"enabled": True, "dtype": "bfloat16"}
    return run_settings(**run | changes)


def build_engine(run: RunSettings, seed: int, *, noisy: bool = False) -> ClapEngine:
    """Build a new engine; `noisy`: with dropout, stochastic depth and SpecAugment."""
    torch.manual_seed(seed)
    probability = 0.3 if noisy else 0.0
    model = ClapModel(
        run.clap.preset(),
        drop_path=probability,
        text_dropout=probability,
        spec_augment=noisy,
        learns_bias=LOSSES[run.clap.loss.kind].needs_bias,
    )
    freeze(model, run.clap.train.freeze)
    engine = engine_of(run, model)
    torch.manual_seed(seed + 10 + rank())
    return engine


def train(engine: ClapEngine, start: int, num_steps: int) -> list[float]:
    """Take steps on this rank's batches from `start` on, and return its losses."""
    source = batch_source(settings(), rank(), world_size(), number=9)
    batches = itertools.islice(source, start, None)
    return [float(engine.step(batches)) for _ in range(num_steps)]


def trained_engine(num_steps: int = 1) -> ClapEngine:
    """Return the engine of a bf16 run."""
    engine = build_engine(settings(), 1)
    train(engine, 0, num_steps)
    return engine


def progress(step: int) -> TrainState:
    return TrainState(
        step=step,
        samples=step * ROWS,
        epoch=step / 7,
        data=[{"rank": number, "step": step} for number in range(world_size())],
        train_s=1.5,
    )


def load(
    checkpointer: Checkpointer, engine: ClapEngine, path: Path | None = None, **options: Any
) -> TrainState:
    checkpoint = checkpointer.find(path and str(path))
    assert checkpoint is not None
    return checkpointer.load(checkpoint, engine, **options)
