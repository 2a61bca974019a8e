"""Load pretrained weights, lock the checkpoint folder, and resume from its newest checkpoint."""

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from clap_ds.config.metrics import best_metric
from clap_ds.config.schema import ShardData
from clap_ds.config.settings import RunSettings
from clap_ds.distributed.collectives import raise_on_all_ranks, rank, run_on_rank0
from clap_ds.distributed.init import Ranks
from clap_ds.distributed.watchdog import activity
from clap_ds.engine.engine import ClapEngine
from clap_ds.model.clap import ClapModel
from clap_ds.run_records.lock import FolderLock
from clap_ds.run_records.run_dir import RunDirectory
from clap_ds.training.checkpoint import CheckpointFolder
from clap_ds.training.load_checkpoint import tokenizer_problem
from clap_ds.training.train_state import TrainingProgress
from clap_ds.weights.load import load_weights


@dataclass(frozen=True)
class ResumeOptions:
    """Command-line options of resuming. `skip_steps`: first and last step whose batches are skipped."""

    restart: bool = False
    resume_weights_only: bool = False
    skip_steps: tuple[int, int] | None = None


def load_pretrained(run: RunSettings, model: ClapModel, *, resume_weights_only: bool = False) -> None:
    """Load `clap.train.pretrained`, if set. ValueError if missing, or for another model or tokenizer."""
    path, tokenizer = run.clap.train.pretrained, getattr(run.clap.data, "tokenizer", None)
    if path is None:
        return
    try:
        weights = load_weights(path, model.config)
        weights.load_into(model)
        problem = tokenizer_problem(weights.tokenizer, tokenizer, model.config.text)
        if problem and not resume_weights_only:
            raise ValueError(
                f"{problem}. Set clap.data.tokenizer to {weights.tokenizer}, or pass --resume_weights_only"
            )
    except ValueError as error:
        raise ValueError(f"{run.path}: clap.train.pretrained: {error}") from None
    if rank() == 0:
        print(f"initial weights: {weights.shown}", flush=True)


@contextmanager
def opened_checkpoints(run: RunSettings, ranks: Ranks) -> Iterator[CheckpointFolder]:
    """Lock and open the run's checkpoint folder. A collective; UserError if another run holds it or it isn't writable."""
    folder, data = run.checkpoint_folder, run.clap.data
    lock = FolderLock(folder, ranks.job_folder and ranks.job_folder.parent)
    with activity("waiting for the checkpoint folder"), raise_on_all_ranks():
        try:
            run_on_rank0(lock.acquire)
        except (OSError, ValueError) as error:
            raise ValueError(f"{run.path}: clap.checkpoint.folder: {error}") from None
    try:
        settings = run.clap.checkpoint.model_copy(update={"best_metric": best_metric(run)})
        tokenizer = data.tokenizer if isinstance(data, ShardData) else None
        checkpoints = CheckpointFolder(folder, settings, tokenizer=tokenizer, lock=lock, run=run)
        try:
            yield checkpoints
        finally:
            checkpoints.poll(None)
    finally:
        lock.release()


def resume(
    run: RunSettings,
    ranks: Ranks,
    engine: ClapEngine,
    checkpoints: CheckpointFolder,
    record: RunDirectory,
    choices: ResumeOptions = ResumeOptions(),
) -> TrainingProgress:
    """Resume from the named or newest checkpoint and return the progress. A collective; raises UserError."""
    with raise_on_all_ranks():
        try:
            found, progress = _load(run, ranks, engine, checkpoints, choices)
        except ValueError as error:
            raise ValueError(f"{run.path}: clap.train.resume: {error}") from None
    if ranks.is_main_process and found is not None:
        record.update_summary(resumed_from=str(found), resumed_at_step=progress.step)
        before, now = len(progress.data), ranks.world_size
        on = "" if now == before else f", on {now} rank(s) instead of {before}"
        print(f"resuming from {found}: step {progress.step}, {progress.samples:,} samples{on}", flush=True)
    return progress


def _load(
    run: RunSettings, ranks: Ranks, engine: ClapEngine, checkpoints: CheckpointFolder, choices: ResumeOptions
) -> tuple[Path | None, TrainingProgress]:
    """Return the loaded checkpoint (None for a new run) and its progress.

    Attempts of a job and reruns repeat the same command. Its --restart or path in `clap.train.resume` takes effect only once,
    as far as the run ids in checkpoints show.
    """
    wanted, attempt = run.clap.train.resume, ranks.job_folder
    has_path = wanted != "auto" and not choices.restart
    new_run = (
        f"from {wanted}" if has_path else str(attempt.parent) if attempt else run_on_rank0(lambda: uuid.uuid4().hex)
    )
    is_repeated = has_path or (choices.restart and attempt is not None and attempt.name != "0")
    has_begun = is_repeated and checkpoints.was_begun_by(new_run)
    checkpoints.begin(new_run)
    if choices.restart and not has_begun:
        aside = checkpoints.move_aside()
        if aside is not None and ranks.is_main_process:
            print(f"starting from scratch; moved the contents of {checkpoints.path} to {aside}", flush=True)
        return None, TrainingProgress()
    path = checkpoints.find(Path(wanted) if has_path and not has_begun else None)
    if path is None:
        return None, TrainingProgress()
    progress = checkpoints.load(path, engine, resume_weights_only=choices.resume_weights_only)
    if has_path and not has_begun:
        checkpoints.begin(new_run)
    return path, progress
