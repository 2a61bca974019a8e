"""What training starts from: a fresh model, another one's weights, or a checkpoint of the same run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from clap_ds.config.sections import ShardData
from clap_ds.config.settings import RunSettings
from clap_ds.dist.distributed import Ranks
from clap_ds.engine import session
from clap_ds.engine.engine import ClapEngine
from clap_ds.model.clap import ClapModel
from clap_ds.record.directory import RunDirectory
from clap_ds.training.checkpoint import CheckpointFolder
from clap_ds.training.progress import Progress
from clap_ds.weights.load import load_weights


class TrainingStart(session.Start):
    """`clap.train`'s initial weights, frozen towers and resumption.

    Attributes:
        progress: how far the run has come before its first step.
        checkpoints: where its checkpoints lie; there once the session is open.
        resumed_from: the checkpoint it goes on from.
    """

    checkpoints: CheckpointFolder

    def __init__(self, run: RunSettings, ranks: Ranks) -> None:
        self._run = run
        self._ranks = ranks
        self.progress = Progress(step=0, samples=0, epoch=0.0, data=[], world_size=ranks.world_size)
        self.resumed_from: Path | None = None

    def build_model(self, run: RunSettings) -> ClapModel:
        """A model with the weights of `clap.train.initial_weights`, if any, its frozen towers frozen.

        Raises:
            ValueError: there are no such weights, or they are another model's.
        """
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
        """Go on from the checkpoint that `clap.train.resume` names or finds. A collective.

        Raises:
            ValueError: that checkpoint, or the folder for new ones, can't be used.
        """
        settings, resume = self._run.clap.checkpoint, self._run.clap.train.resume
        data = self._run.clap.data
        self.checkpoints = CheckpointFolder(
            settings.folder or Path(self._run.clap.output.root) / f"{self._run.label}-checkpoints",
            keep_last=settings.keep_last,
            keep_best=settings.keep_best,
            best_by=settings.best_by,
            sync_to=settings.sync_to,
            tokenizer=data.tokenizer if isinstance(data, ShardData) else None,
        )
        found = self.checkpoints.newest() if resume in ("auto", "never") else Path(resume)
        if found is not None and resume == "never":
            raise ValueError(
                f"{self._run.path}: clap.train.resume is 'never', but {found} is there: a new run would mix with the one it is"
                " from; name another clap.checkpoint.folder, or remove it"
            )
        if found is None:
            return None
        try:
            self.progress = self.checkpoints.load(found, engine)
        except ValueError as error:
            raise ValueError(f"{self._run.path}: clap.train.resume: {error}") from None
        self.resumed_from = found
        same_ranks = len(self.progress.data) == self._ranks.world_size
        if self._ranks.is_first:
            record.update_summary(resumed_from=str(found), resumed_at_step=self.progress.step)
            told = "" if same_ranks else f", on {self._ranks.world_size} ranks after {len(self.progress.data)}"
            print(
                f"going on from {found}: step {self.progress.step}, {self.progress.samples:,} samples{told}", flush=True
            )
        return self.progress.data[self._ranks.rank % len(self.progress.data)]


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
