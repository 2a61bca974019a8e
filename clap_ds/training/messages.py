"""What training says before its first step, after its last, and where its numbers aren't finite: what is ahead, what to do."""

import shlex
from pathlib import Path

from clap_ds.config.settings import RunSettings
from clap_ds.engine.session import Session
from clap_ds.ranks.agreement import on_first
from clap_ds.training.batches import too_few_items
from clap_ds.training.checkpoint import CheckpointFolder
from clap_ds.training.schedule import Schedule, TrainingProgress
from clap_ds.training.start import Choices


def introduce(
    session: Session, checkpoints: CheckpointFolder, progress: TrainingProgress, schedule: Schedule, choices: Choices
) -> None:
    """Say what is ahead: steps, and what checkpoints will cost."""
    run = session.run
    size, seconds = checkpoints.estimate(session.engine)
    if not session.ranks.is_first:
        return
    why, every = progress.why_over(run), run.clap.checkpoint.every_steps
    steps, samples = schedule.ahead(progress.samples)
    last = progress.step + steps
    if why is not None:
        print(f"nothing left to train: {why}; another clap.train.stop_at or stop_on_plateau goes on", flush=True)
    elif steps:
        epochs, beyond = run.clap.train.epochs, samples - schedule.samples
        passes = f" (clap.train.epochs {epochs:g}, of {schedule.epoch_samples:,} each)" if epochs else ""
        rest = f"; the last step takes {beyond:,} more, of the epoch after" if epochs and beyond else ""
        print(f"training to {schedule.samples:,} samples{passes}: {steps:,} steps{rest}", flush=True)
    else:
        print(f"nothing left to train: all of {schedule.samples:,} samples are through", flush=True)
    number = last // every - progress.step // every if every else 1
    print(
        f"checkpoints: {size / 1e6:,.1f} MB and about {seconds:.1f} s each, about {number}, at most {checkpoints.most} at a"
        f" time ({checkpoints.most * size / 1e6:,.1f} MB), in {checkpoints.path}",
        flush=True,
    )
    warnings = [
        schedule.mismatch(run.deepspeed.get("scheduler", {}), progress.step, progress.samples),
        too_few_items(session),
    ]
    if (skipped := choices.skip_steps) is not None and not progress.step < skipped[0] <= last:
        ahead = f"steps {progress.step + 1} to {last} are ahead" if steps else "no step is ahead"
        warnings.append(f"--skip_steps {skipped[0]}-{skipped[1]}: there is nothing to leave out: {ahead}")
    for warning in filter(None, warnings):
        print(f"warning: {warning}", flush=True)
    session.record.update_summary(
        target_samples=schedule.samples,
        planned_steps=last,
        epoch_samples=schedule.epoch_samples,
        checkpoint_estimate={"bytes": size, "seconds": seconds, "folder": str(checkpoints.path)},
    )


def conclude(run: RunSettings, progress: TrainingProgress, schedule: Schedule, folder: Path) -> None:
    """Say what ended the run, what was trained, and what can be done with it."""
    clap, quoted = run.clap, shlex.quote(str(folder))
    if why := progress.why_over(run):
        print(why, flush=True)
    elif not schedule.is_done(progress.samples):
        return
    trained = " and ".join(tower for tower in ("audio", "text") if tower not in clap.train.freeze)
    shards = clap.evaluation.retrieval.shards if clap.evaluation.retrieval else "SHARDS"
    print(
        f"trained {trained} on {progress.samples:,} samples in {progress.step:,} steps. To evaluate and to export:\n"
        f"  python clap_ds/evaluate.py {quoted} --retrieval {shlex.join([shards] if isinstance(shards, str) else shards)}\n"
        f"  python -m clap_ds.weights.export {quoted} FOLDER",
        flush=True,
    )


def same_command(run: RunSettings, choices: Choices) -> str:
    """What to type to go on from the newest checkpoint."""
    once = [f"--{name}" for name in ("restart", "from_weights") if getattr(choices, name) not in (False, None)]
    resume = ", with clap.train.resume 'auto'," if run.clap.train.resume == "never" else ""
    return f"the same command{' without ' + once[0] if once else ''}{resume}"


def how_to_go_on(run: RunSettings, checkpoints: CheckpointFolder, choices: Choices, last: int) -> str:
    """After numbers that weren't finite in step `last` or before. A collective."""
    found: list[tuple[int, Path]] = on_first(checkpoints.whole)
    first, again = (found[0][0] if found else 0) + 1, same_command(run, choices)
    if (skipped := choices.skip_steps) is not None and first <= skipped[0] <= last:
        first, last = skipped[0], skipped[1] + last - skipped[0] + 1  # the batches left out, and those trained on since
    saved = (
        f"Nothing of it is saved: {again} goes on from step {found[0][0]}"
        if found
        else f"Nothing has been saved: {again} begins anew"
    )
    earlier = f"; go back further (clap.train.resume {str(found[1][1])!r})" if len(found) > 1 else ""
    return (
        f"{saved}. If that ends alike, leave out the batches (--skip_steps {first}-{max(first, last)}), take a lower learning"
        f" rate (optimizer.params.lr), a longer warm-up or gradient_clipping{earlier}"
    )
