"""What training starts from: a fresh model, another one's weights, or a checkpoint of the same run."""

from pathlib import Path
from typing import Any

from clap_ds.config.sections import ShardData
from clap_ds.config.settings import RunSettings
from clap_ds.dist.agreement import on_first
from clap_ds.dist.distributed import Ranks
from clap_ds.dist.progress import doing
from clap_ds.engine import session
from clap_ds.engine.engine import ClapEngine
from clap_ds.model.clap import ClapModel
from clap_ds.record.directory import RunDirectory
from clap_ds.record.lock import FolderLock, HeldError
from clap_ds.training.checkpoint import CheckpointFolder
from clap_ds.training.schedule import TrainingProgress
from clap_ds.weights.load import load_weights


class TrainingStart(session.Start):
    """`clap.train`'s initial weights, frozen towers and resumption.

    Attributes:
        progress: how far the run has come before its first step.
        checkpoints: where its checkpoints lie; there once the session is open.
    """

    checkpoints: CheckpointFolder
    _lock: FolderLock | None = None

    def __init__(self, run: RunSettings, ranks: Ranks) -> None:
        self._run, self._ranks = run, ranks
        self.progress = TrainingProgress()

    def build_model(self, run: RunSettings) -> ClapModel:
        """A model with the weights of `clap.train.initial_weights`, if any, its frozen towers frozen; raises ValueError where
        there are no such weights, or they are another model's."""
        model = session.build_model(run)
        weights = run.clap.train.initial_weights
        if weights is not None:
            try:
                load_weights(weights, model.config).load_into(model)
            except ValueError as error:
                raise ValueError(f"{run.path}: clap.train.initial_weights: {error}") from None
        freeze(model, run.clap.train.freeze)
        return model

    def prepare(self, engine: ClapEngine, record: RunDirectory) -> dict[str, Any] | None:
        """Resume from the checkpoint that `clap.train.resume` names or finds. A collective; raises ValueError where that, or
        the folder for new ones, can't be used."""
        run, resume, data = self._run, self._run.clap.train.resume, self._run.clap.data
        folder = Path(run.clap.checkpoint.folder or Path(run.clap.output.root) / f"{run.label}-checkpoints").absolute()
        on_first(lambda: self._take(folder))
        self.checkpoints = CheckpointFolder(
            folder,
            run.clap.checkpoint,
            tokenizer=data.tokenizer if isinstance(data, ShardData) else None,
            lock=self._lock,
        )
        found = self.checkpoints.newest() if resume in ("auto", "never") else Path(resume)
        if found is not None and resume == "never":
            raise ValueError(
                f"{run.path}: clap.train.resume is 'never', but {found} is there: a new run would mix with the one it is"
                " from; name another clap.checkpoint.folder, or remove it"
            )
        if found is None:
            return None
        try:
            self.progress = progress = self.checkpoints.load(found, engine)
        except ValueError as error:
            raise ValueError(f"{run.path}: clap.train.resume: {error}") from None
        if self._ranks.is_first:
            record.update_summary(resumed_from=str(found), resumed_at_step=progress.step)
            before, now = len(progress.data), self._ranks.world_size
            ranks = "" if now == before else f", on {now} ranks after {before}"
            print(f"resuming from {found}: step {progress.step}, {progress.samples:,} samples{ranks}", flush=True)
        return progress.data[self._ranks.rank % len(progress.data)]

    @doing("waiting for the checkpoint folder")
    def _take(self, folder: Path) -> None:
        """Keep every other run from writing the checkpoints' folder until this one closes."""
        self._lock = FolderLock(folder)
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


def freeze(model: ClapModel, towers: list[Any]) -> None:
    """Take towers and their projections out of training.

    As in LAION's training code they stay in training mode: dropout, SpecAugment and batch norm by the batch's statistics act
    as they would otherwise, so that the other tower doesn't learn from fewer variations. A frozen audio tower keeps its running
    statistics.
    """
    for tower in towers:
        model.get_submodule(tower).requires_grad_(False)
        model.get_submodule(f"{tower}_projection").requires_grad_(False)
    if "audio" in towers:
        model.audio.batch_norm.momentum = 0.0
