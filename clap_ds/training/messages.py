"""Messages of training at its start and end, and after non-finite numbers."""

import shlex

from clap_ds.config.metrics import names
from clap_ds.distributed.collectives import run_on_rank0
from clap_ds.engine.factory import trained_towers
from clap_ds.engine.session import Session
from clap_ds.training.checkpoint import CheckpointFolder
from clap_ds.training.train_state import Schedule, TrainingProgress, pairs_together
from clap_ds.weights.checkpoint_files import read_all


def log_run_start(
    session: Session, checkpoints: CheckpointFolder, progress: TrainingProgress, schedule: Schedule
) -> None:
    """Print the steps to train and the checkpoint folder, and warn about doubtful settings."""
    if not session.ranks.is_main_process:
        return
    run, train, last = session.run, session.run.clap.train, progress.step + schedule.ahead(progress.samples)[0]
    if reached := progress.reached(train.target_metrics):
        print(f"nothing left to train: {reached}; change clap.train.target_metrics to continue", flush=True)
    elif last > progress.step:
        passes = f" (clap.train.epochs {train.epochs:g}, of {schedule.epoch_samples:,} each)" if train.epochs else ""
        print(f"training to {schedule.samples:,} samples{passes}: {last - progress.step:,} steps", flush=True)
    else:
        print(f"nothing left to train: all {schedule.samples:,} samples are consumed", flush=True)
    print(f"checkpoints: {checkpoints.path}", flush=True)
    planned = run.deepspeed.get("scheduler", {}).get("params", {}).get("total_num_steps", last)
    if planned != last:
        print(
            f"warning: scheduler.params.total_num_steps is {planned}, but the run ends after {last} steps", flush=True
        )
    pairs, items = pairs_together(run, session.ranks.world_size), session.batches.statistics().get("num_samples")
    if items is not None and items < pairs:
        print(f"warning: a global batch has {pairs:,} pairs, but the data only {items:,} samples", flush=True)
    session.record.update_summary(epoch_samples=schedule.epoch_samples)


def log_run_end(session: Session, progress: TrainingProgress, schedule: Schedule) -> None:
    """Print why the run ended, and commands to evaluate and export the model."""
    run, reached = session.run, progress.reached(session.run.clap.train.target_metrics)
    if not (reached or schedule.is_done(progress.samples)):
        return
    folder, path = (shlex.quote(str(each)) for each in (run.checkpoint_folder, run.path))
    evaluation = f"--deepspeed_config {path}" if names(run.clap.evaluation) else "--retrieval SHARDS"
    print(
        f"{reached or 'done'}: trained {' and '.join(trained_towers(session.engine.model))} on {progress.samples:,} samples in"
        f" {progress.step:,} steps. To evaluate and to export:\n  clap-evaluate {folder} {evaluation}\n"
        f"  clap-export {folder} FOLDER",
        flush=True,
    )


def how_to_go_on(checkpoints: CheckpointFolder, last: int) -> str:
    """Return advice after non-finite numbers in step `last` or earlier. A collective."""
    saved = run_on_rank0(lambda: [manifest.step for manifest in read_all(checkpoints.path).values()])[:1]
    goes_on, first = (f"resumes from step {saved[0]}", saved[0] + 1) if saved else ("starts from scratch", 1)
    return (
        f"The bad state was not saved: the same command without --restart {goes_on}. If it fails again, skip the batches"
        f" (--skip_steps {first}-{max(first, last)}), lower optimizer.params.lr, use a longer warm-up or gradient_clipping, or"
        " resume from an earlier checkpoint (clap.train.resume CHECKPOINT)"
    )
