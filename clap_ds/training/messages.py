"""Messages of training at its start and after non-finite numbers."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from clap_ds.distributed.collectives import run_on_rank0
from clap_ds.engine.engine import ClapEngine
from clap_ds.engine.exit_handling import NonFiniteError
from clap_ds.training.checkpoint import Checkpointer
from clap_ds.training.log import TrainLogger
from clap_ds.training.train_state import TrainPlan, TrainState
from clap_ds.weights.checkpoint_files import read_all


def log_run_start(
    plan: TrainPlan, state: TrainState, checkpoints: Path, deepspeed: dict[str, Any]
) -> None:
    """Print the steps to train and the checkpoint folder, and warn about a schedule of another
    length and too few data."""
    last = plan.last_step(state)
    of_epochs = f" ({plan.samples / plan.epoch_samples:g} epochs)" if plan.epoch_samples else ""
    if reached := state.reached(plan.target_metrics):
        print(
            f"nothing left to train: {reached}; change clap.train.target_metrics to continue",
            flush=True,
        )
    elif last > state.step:
        print(
            f"training to {plan.samples:,} samples{of_epochs}: {last - state.step:,} steps",
            flush=True,
        )
    else:
        print(f"nothing left to train: all {plan.samples:,} samples are consumed", flush=True)
    print(f"checkpoints: {checkpoints}", flush=True)
    planned = deepspeed.get("scheduler", {}).get("params", {}).get("total_num_steps", last)
    if planned != last:
        print(
            f"warning: scheduler.params.total_num_steps is {planned}, but the run ends after {last} steps",
            flush=True,
        )
    if plan.epoch_samples is not None and plan.epoch_samples < plan.global_batch:
        said = f"a global batch has {plan.global_batch:,} pairs, but the data only {plan.epoch_samples:,}"
        print(f"warning: {said}; items repeat within a batch", flush=True)


@contextmanager
def advice_on_non_finite(
    engine: ClapEngine, checkpointer: Checkpointer, logger: TrainLogger
) -> Iterator[None]:
    """Add advice to a NonFiniteError of the body. A collective then."""
    try:
        yield
    except NonFiniteError as error:
        logger.saved(*checkpointer.poll(None))
        checkpointer.close()
        saved = run_on_rank0(
            lambda: [manifest.step for manifest in read_all(checkpointer.path).values()]
        )
        first = saved[0] + 1 if saved else 1
        raise NonFiniteError(
            f"{error}. The bad state was not saved: the same command without --restart continues at step {first}. If it fails"
            f" again, skip the batches (--skip_steps {first}-{max(first, engine.steps)}), lower optimizer.params.lr, use a"
            " longer warm-up or gradient_clipping, or resume from an earlier checkpoint (clap.train.resume CHECKPOINT)"
        ) from None
