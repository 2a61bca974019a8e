"""What training starts from: others' weights, and of its own folder the checkpoint that the run resumes from."""

import glob
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from clap_ds.config.metrics import best_metric
from clap_ds.config.sections import ShardData
from clap_ds.config.settings import RunSettings
from clap_ds.engine.engine import ClapEngine
from clap_ds.model.clap import ClapModel
from clap_ds.ranks.agreement import agreed, gather, on_first
from clap_ds.ranks.distributed import Ranks
from clap_ds.ranks.watch import doing
from clap_ds.record.directory import RunDirectory
from clap_ds.record.lock import FolderLock, HeldError
from clap_ds.training.changes import tokenizer_problem
from clap_ds.training.checkpoint import CheckpointFolder
from clap_ds.training.schedule import TrainingProgress
from clap_ds.weights.load import load_weights, locate, tokenizer_of


@dataclass(frozen=True)
class Choices:
    """What the command line decides about a run that has checkpoints.

    Attributes:
        restart: move them aside and start anew.
        from_weights: go on from the weights alone of the checkpoint of this step.
        accept_changes: resume though the run is otherwise than the checkpoint's (`clap_ds.training.changes`).
        convert_checkpoint: resume from a checkpoint of format 1, whose state is a pickle.
        skip_steps: first and last of the steps whose batches are left out.
    """

    restart: bool = False
    from_weights: int | None = None
    accept_changes: bool = False
    convert_checkpoint: bool = False
    skip_steps: tuple[int, int] | None = None


def take_initial_weights(run: RunSettings, model: ClapModel, *, accept_changes: bool = False) -> None:
    """Load `clap.train.initial_weights`, if any; raises ValueError where there are none, or they are another model's or for
    another tokenizer."""
    weights, ours = run.clap.train.initial_weights, getattr(run.clap.data, "tokenizer", None)
    if weights is None:
        return
    try:
        load_weights(weights, model.config).load_into(model)
        theirs = tokenizer_of(locate(weights))
        problem = tokenizer_problem(theirs, ours, vocab_size=model.config.text.vocab_size)
        if problem and not accept_changes:
            raise ValueError(f"{problem}. Set clap.data.tokenizer to {theirs}, or accept it by --accept_changes")
    except ValueError as error:
        raise ValueError(f"{run.path}: clap.train.initial_weights: {error}") from None


@contextmanager
def opened_checkpoints(run: RunSettings, ranks: Ranks) -> Iterator[CheckpointFolder]:
    """The folder of the run's checkpoints, which no other run writes meanwhile. A collective; raises UserError where one does,
    or the folder can't be written."""
    folder, data = run.checkpoint_folder, run.clap.data
    lock = FolderLock(folder, ranks.job_folder)
    try:
        with doing("waiting for the checkpoint folder"), agreed():
            on_first(lambda: _take(lock, folder, run.path))
        settings = run.clap.checkpoint.model_copy(update={"best_by": best_metric(run)})
        tokenizer = data.tokenizer if isinstance(data, ShardData) else None
        yield CheckpointFolder(folder, settings, tokenizer=tokenizer, lock=lock, run=run)
    finally:
        lock.release()


def _take(lock: FolderLock, folder: Path, config: Path) -> None:
    try:
        lock.acquire()
    except HeldError as error:
        wait = "Wait until that run is over, or name another folder"
        raise ValueError(f"{config}: clap.checkpoint.folder: {error}. {wait}") from None
    except OSError as error:
        raise ValueError(f"clap.checkpoint.folder: {folder} can't be written: {error.strerror}") from error


def resume(
    run: RunSettings,
    ranks: Ranks,
    engine: ClapEngine,
    checkpoints: CheckpointFolder,
    record: RunDirectory,
    choices: Choices = Choices(),
) -> TrainingProgress:
    """Go on from the checkpoint that `clap.train.resume` or the command line names, or that is found: how far the run has come.

    A collective; raises UserError where that can't be used.
    """
    with agreed():
        try:
            found, progress = _load(run, ranks, engine, checkpoints, choices)
        except ValueError as error:
            raise ValueError(f"{run.path}: clap.train.resume: {error}") from None
    if ranks.is_first and found is not None and progress.data:
        record.update_summary(resumed_from=str(found), resumed_at_step=progress.step)
        before, now = len(progress.data), ranks.world_size
        on = "" if now == before else f", on {now} rank(s) after {before}"
        print(f"resuming from {found}: step {progress.step}, {progress.samples:,} samples{on}", flush=True)
    elif ranks.is_first and found is None and run.clap.checkpoint.folder is None:
        _name_others(run.label, checkpoints.path)
    return progress


def _name_others(label: str, folder: Path) -> None:
    """Say which folders of this run's label there are beside, which it doesn't resume from."""
    patterns = (f"{glob.escape(label)}-checkpoints", f"{glob.escape(label)}-{'[0-9a-f]' * 8}-checkpoints")
    others = sorted(path.name for pattern in patterns for path in folder.parent.glob(pattern) if path != folder)
    if others:
        print(
            f"note: this run begins; {', '.join(others)} beside {folder} are of runs with another model, data, loss,"
            " seed or start. To go on from one of them, name it as clap.checkpoint.folder",
            flush=True,
        )


def _load(
    run: RunSettings, ranks: Ranks, engine: ClapEngine, checkpoints: CheckpointFolder, choices: Choices
) -> tuple[Path | None, TrainingProgress]:
    """The checkpoint that was loaded, None where the run begins, and how far it had come.

    A job makes several attempts by the same command, and people type it again: what it says of where to begin is done once,
    as far as that can be told by the id of the run that begins there.
    """
    wanted = run.clap.train.resume
    is_chosen, is_path = choices.restart or choices.from_weights is not None, wanted not in ("auto", "never")
    attempt = ranks.job_folder
    job = str(attempt.parent) if attempt else ""
    new_run = f"from {wanted}" if is_path and not is_chosen else job or gather(uuid.uuid4().hex)[0]
    is_repeated = attempt is not None and attempt.name != "0" and (is_chosen or wanted == "never")
    if (is_repeated or (is_path and not is_chosen)) and checkpoints.was_begun_by(new_run):
        wanted, choices = "auto", replace(choices, restart=False, from_weights=None)
    checkpoints.begin(new_run)
    if choices.restart:
        aside = checkpoints.move_aside()
        if aside is not None and ranks.is_first:
            print(f"starting anew; what was in {checkpoints.path} is in {aside}", flush=True)
        return None, TrainingProgress()
    if choices.from_weights is not None:
        return checkpoints.load_weights(choices.from_weights, engine)
    newest = checkpoints.newest() if wanted in ("auto", "never") else Path(wanted)
    if newest is None:
        return None, TrainingProgress()
    if wanted == "never":
        raise ValueError(
            f"it is 'never', but {newest} is there: a new run would mix with the one it is from; --restart moves that"
            " aside, or name another clap.checkpoint.folder"
        )
    accepted = {"accept_changes": choices.accept_changes, "convert": choices.convert_checkpoint}
    progress = checkpoints.load(newest, engine, **accepted)
    if wanted != "auto":
        checkpoints.begin(new_run)
    return newest, progress
