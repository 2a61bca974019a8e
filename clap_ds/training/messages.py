"""What training says before its first step, after its last, and where its numbers aren't finite: what is ahead, what to do."""

import shlex

from clap_ds.config.metrics import names
from clap_ds.engine.building import trained_towers
from clap_ds.engine.session import Session
from clap_ds.ranks.agreement import on_first
from clap_ds.training.checkpoint import CheckpointFolder
from clap_ds.training.schedule import Schedule, TrainingProgress, pairs_together
from clap_ds.training.start import Choices
from clap_ds.weights.checkpoint_files import WEIGHTS, read_all


def introduce(
    session: Session, checkpoints: CheckpointFolder, progress: TrainingProgress, schedule: Schedule, choices: Choices
) -> None:
    """Say what is ahead, and where checkpoints go."""
    if not session.ranks.is_first:
        return
    run = session.run
    steps, samples = schedule.ahead(progress.samples)
    last, (first_skipped, last_skipped) = progress.step + steps, choices.skip_steps or (0, 0)
    if reached := progress.reached(run.clap.train.stop_at):
        print(f"nothing left to train: {reached}; another clap.train.stop_at goes on", flush=True)
    elif steps:
        epochs, beyond = run.clap.train.epochs, samples - schedule.samples
        passes = f" (clap.train.epochs {epochs:g}, of {schedule.epoch_samples:,} each)" if epochs else ""
        rest = f"; the last step takes {beyond:,} more, of the epoch after" if epochs and beyond else ""
        print(f"training to {schedule.samples:,} samples{passes}: {steps:,} steps{rest}", flush=True)
    else:
        print(f"nothing left to train: all of {schedule.samples:,} samples are through", flush=True)
    print(f"checkpoints: {checkpoints.path}", flush=True)
    planned = run.deepspeed.get("scheduler", {}).get("params", {}).get("total_num_steps", last)
    if planned != last:
        print(
            f"warning: scheduler.params.total_num_steps is {planned}, but the run ends after {last} steps", flush=True
        )
    if (decay := run.clap.train.ema) is not None:
        print(f"evaluations and {WEIGHTS} are of a moving average of the weights (decay {decay:g})", flush=True)
        if (span := round(1 / (1 - decay))) > last:
            print(f"warning: clap.train.ema averages over about {span:,} steps, the run has {last:,}", flush=True)
    pairs, items = pairs_together(run, session.ranks.world_size), session.batches.statistics().get("num_samples")
    if items is not None and items < pairs:
        meets = "one that meets itself there counts as wrong"
        print(f"warning: a global batch has {pairs:,} pairs, the data {items:,} items: {meets}", flush=True)
    if first_skipped and not progress.step < first_skipped <= last:
        ahead = f"steps {progress.step + 1} to {last} are ahead" if steps else "no step is ahead"
        print(f"warning: --skip_steps {first_skipped}-{last_skipped}: nothing to leave out: {ahead}", flush=True)
    session.record.update_summary(
        target_samples=schedule.samples, planned_steps=last, epoch_samples=schedule.epoch_samples
    )


def conclude(session: Session, progress: TrainingProgress, schedule: Schedule) -> None:
    """Say what ended the run, what was trained, and what can be done with it."""
    run, clap = session.run, session.run.clap
    folder, path = (shlex.quote(str(each)) for each in (run.checkpoint_folder, run.path))
    evaluation = f"--deepspeed_config {path}" if names(clap.evaluation) else "--retrieval SHARDS"
    if reached := progress.reached(clap.train.stop_at):
        print(reached, flush=True)
    elif not schedule.is_done(progress.samples):
        return
    trained = " and ".join(trained_towers(session.engine.model))
    print(
        f"trained {trained} on {progress.samples:,} samples in {progress.step:,} steps. To evaluate and to export:\n"
        f"  clap-evaluate {folder} {evaluation}\n  python -m clap_ds.weights.export {folder} FOLDER",
        flush=True,
    )


def same_command(choices: Choices) -> str:
    """What to type to go on from the newest checkpoint."""
    return "the same command without --restart" if choices.restart else "the same command"


def how_to_go_on(checkpoints: CheckpointFolder, choices: Choices, last: int) -> str:
    """After numbers that weren't finite in step `last` or before. A collective."""
    saved = on_first(lambda: [manifest.step for manifest in read_all(checkpoints.path).values()])[:1]
    goes_on = f"goes on from step {saved[0]}" if saved else "begins anew"
    first = (saved[0] if saved else 0) + 1
    if (skipped := choices.skip_steps) is not None and first <= skipped[0] <= last:
        first, last = skipped[0], skipped[1] + last - skipped[0] + 1  # the batches left out, and those trained on since
    return (
        f"Nothing of it is saved: {same_command(choices)} {goes_on}. If that ends alike, leave out the batches (--skip_steps"
        f" {first}-{max(first, last)}), take a lower learning rate (optimizer.params.lr), a longer warm-up or"
        " gradient_clipping, or go back further (clap.train.resume CHECKPOINT)"
    )
