"""What training starts from: a fresh model, another one's weights, or a checkpoint of the same run."""

import glob
import uuid
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from clap_ds.config.metrics import best_metric
from clap_ds.config.sections import ShardData
from clap_ds.config.settings import RunSettings
from clap_ds.engine import session
from clap_ds.engine.engine import ClapEngine
from clap_ds.model.clap import ClapModel
from clap_ds.ranks.agreement import gather, on_first
from clap_ds.ranks.distributed import Ranks
from clap_ds.ranks.watch import doing
from clap_ds.record.directory import RunDirectory
from clap_ds.record.lock import FolderLock, HeldError
from clap_ds.record.stream import Stream
from clap_ds.training.changes import tokenizer_problem
from clap_ds.training.checkpoint import CheckpointFolder
from clap_ds.training.remote import try_target
from clap_ds.training.schedule import TrainingProgress
from clap_ds.weights.load import load_weights, locate, tokenizer_of


@dataclass(frozen=True)
class Choices:
    """What the command line decides about a run that has checkpoints.

    Attributes:
        restart: move them aside and start anew.
        from_weights: go on from the weights alone of the checkpoint of this step.
        accept_changes: resume though the run is otherwise than the checkpoint's (`clap_ds.training.changes`).
        skip_steps: first and last of the steps whose batches are left out.
    """

    restart: bool = False
    from_weights: int | None = None
    accept_changes: bool = False
    skip_steps: tuple[int, int] | None = None


class TrainingStart(session.Start):
    """`clap.train`'s initial weights, frozen towers and resumption.

    Attributes:
        progress: how far the run has come before its first step.
        checkpoints: where its checkpoints lie; there once the session is open.
        history: the whole run's log over all its starts, beside the checkpoints; on rank 0, once the session is open.
    """

    held_back = ()

    checkpoints: CheckpointFolder
    history: Stream
    _lock: FolderLock | None = None

    def __init__(self, run: RunSettings, ranks: Ranks, choices: Choices = Choices()) -> None:
        self._run, self._ranks, self.choices = run, ranks, choices
        self.progress = TrainingProgress()

    def build_model(self, run: RunSettings, device: torch.device) -> ClapModel:
        """A model with the weights of `clap.train.initial_weights`, if any, its frozen towers frozen; raises ValueError where
        there are no such weights, they are another model's or for another tokenizer, or `sync_to` can't be written. A
        collective."""
        sync_to = run.clap.checkpoint.sync_to
        if sync_to is not None:  # found here, before the work of building a model
            on_first(lambda: try_target(sync_to))
        model = session.build_model(run, device)
        weights = run.clap.train.initial_weights
        if weights is not None:
            try:
                load_weights(weights, model.config).load_into(model)
                self._check_tokenizer(weights, model)
            except ValueError as error:
                raise ValueError(f"{run.path}: clap.train.initial_weights: {error}") from None
        return model

    def _check_tokenizer(self, weights: str, model: ClapModel) -> None:
        ours, theirs = getattr(self._run.clap.data, "tokenizer", None), tokenizer_of(locate(weights))
        problem = tokenizer_problem(theirs, ours, vocab_size=model.config.text.vocab_size)
        if problem and not self.choices.accept_changes:
            raise ValueError(f"{problem}. Set clap.data.tokenizer to {theirs}, or accept it by --accept_changes")

    def prepare(self, engine: ClapEngine, record: RunDirectory) -> dict[str, Any] | None:
        """Resume from the checkpoint that `clap.train.resume` or the command line names, or that is found. A collective; raises
        ValueError where that, or the folder for new ones, can't be used."""
        run, data = self._run, self._run.clap.data
        self.folder = folder = run.checkpoint_folder
        on_first(lambda: self._take(folder))
        self.checkpoints = CheckpointFolder(
            folder,
            run.clap.checkpoint.model_copy(update={"best_by": best_metric(run)}),
            tokenizer=data.tokenizer if isinstance(data, ShardData) else None,
            lock=self._lock,
            run=run,
        )
        try:
            found = self._resume(engine)
        except ValueError as error:
            raise ValueError(f"{run.path}: clap.train.resume: {error}") from None
        if found is None and self._ranks.is_first:
            self._name_others(folder)
        progress = self.progress
        if self._ranks.is_first:
            self.history = Stream(folder / "history.jsonl")
            progress.train_s = max(progress.train_s, self.history.forget_after(progress.step))
            record.update_summary(history=str(folder / "history.jsonl"))
        if found is None or not progress.data:
            return None
        if self._ranks.is_first:
            record.update_summary(resumed_from=str(found), resumed_at_step=progress.step)
            before, now = len(progress.data), self._ranks.world_size
            ranks = "" if now == before else f", on {now} rank(s) after {before}"
            print(f"resuming from {found}: step {progress.step}, {progress.samples:,} samples{ranks}", flush=True)
        return progress.data[self._ranks.rank % len(progress.data)]

    def _name_others(self, folder: Path) -> None:
        """Say which folders of this run's label there are beside, which it doesn't resume from."""
        label, hashed = glob.escape(self._run.label), "[0-9a-f]" * 8
        patterns = (f"{label}-checkpoints", f"{label}-{hashed}-checkpoints")
        others = sorted(path.name for pattern in patterns for path in folder.parent.glob(pattern))
        if self._run.clap.checkpoint.folder is None and (others := [name for name in others if name != folder.name]):
            print(
                f"note: this run begins; {', '.join(others)} beside {folder} are of runs with another model, data, loss,"
                " seed or start. To go on from one of them, name it as clap.checkpoint.folder",
                flush=True,
            )

    def _resume(self, engine: ClapEngine) -> Path | None:
        """Load what the run resumes from into the engine and `progress`; None where it begins.

        A job makes several attempts by the same command, and people type it again: what it says of where to begin is done once,
        as far as that can be told by the id of the run that begins there.
        """
        resume, choices, checkpoints = self._run.clap.train.resume, self.choices, self.checkpoints
        is_chosen, is_path = choices.restart or choices.from_weights is not None, resume not in ("auto", "never")
        attempt = self._ranks.job_folder
        job = str(attempt.parent) if attempt else ""
        new_run = f"from {resume}" if is_path and not is_chosen else job or gather(uuid.uuid4().hex)[0]
        is_repeated = attempt is not None and attempt.name != "0" and (is_chosen or resume == "never")
        if (is_repeated or (is_path and not is_chosen)) and checkpoints.was_begun_by(new_run):
            resume, choices = "auto", replace(choices, restart=False, from_weights=None)
        checkpoints.begin(new_run)
        if choices.restart:
            aside = checkpoints.move_aside()
            if aside is not None and self._ranks.is_first:
                print(f"starting anew; what was in {checkpoints.path} is in {aside}", flush=True)
            return None
        if choices.from_weights is not None:
            found, self.progress = checkpoints.load_weights(choices.from_weights, engine)
            return found
        newest = checkpoints.newest() if resume in ("auto", "never") else Path(resume)
        if newest is not None and resume == "never":
            raise ValueError(
                f"it is 'never', but {newest} is there: a new run would mix with the one it is from; --restart moves that"
                " aside, or name another clap.checkpoint.folder"
            )
        if newest is not None:
            self.progress = checkpoints.load(newest, engine, accept_changes=choices.accept_changes)
            if resume != "auto":
                checkpoints.begin(new_run)
        return newest

    @property
    def same_command(self) -> str:
        """What to type to go on from the newest checkpoint."""
        once = [f"--{name}" for name in ("restart", "from_weights") if getattr(self.choices, name) not in (False, None)]
        resume = ", with clap.train.resume 'auto'," if self._run.clap.train.resume == "never" else ""
        return f"the same command{' without ' + once[0] if once else ''}{resume}"

    @doing("waiting for the checkpoint folder")
    def _take(self, folder: Path) -> None:
        """Keep every other run from writing the checkpoints' folder until this one closes."""
        self._lock = FolderLock(folder, self._ranks.job_folder)
        try:
            self._lock.acquire()
        except HeldError as error:
            raise ValueError(
                f"{self._run.path}: clap.checkpoint.folder: {error}. Wait until that run is over, or name another folder"
            ) from None
        except OSError as error:
            raise ValueError(f"clap.checkpoint.folder: {folder} can't be written: {error.strerror}") from error

    def close(self) -> None:
        """Leave the checkpoints' folder to other runs."""
        if self._lock is not None:
            self._lock.release()
        if hasattr(self, "history"):
            self.history.close()
