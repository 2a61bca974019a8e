"""Checkpoints of a training run: saved by all ranks together, found again, and deleted where newer and better ones make them
superfluous or the disk is full.

Only the run's own are deleted, and none that isn't whole: what another run has written, or what can't be read, is for a person
to delete. How they lie on the disk is left to `clap_ds.weights.checkpoint_files`, copies elsewhere to `remote`, an engine's
state to `restoring`.
"""

import math
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from clap_ds.config.files import FULL, read_bytes
from clap_ds.config.sections import CheckpointSettings
from clap_ds.config.settings import RunSettings
from clap_ds.engine.cached_step import random_state
from clap_ds.engine.ending import NonFiniteError
from clap_ds.engine.engine import ClapEngine
from clap_ds.engine.state import describe, engine_state, estimated_bytes, master_weights, not_finite
from clap_ds.ranks.agreement import gather, on_first, rank
from clap_ds.ranks.watch import doing
from clap_ds.record.lock import FILE as LOCK
from clap_ds.record.lock import FolderLock, HeldError
from clap_ds.training.remote import BackgroundSync
from clap_ds.training.restoring import PROGRESS, find_newest, restore, restore_weights
from clap_ds.training.schedule import SavedCheckpoint, TrainingProgress
from clap_ds.weights import checkpoint_files as files
from clap_ds.weights.checkpoint_files import STATE, TOKENIZER, WEIGHTS, Manifest, warn, write_file
from clap_ds.weights.formats import some, to_safetensors
from clap_ds.weights.state_file import to_state_file

SYNC_LIMIT_S = 600.0
_LARGEST_PROBE = 256 * 2**20


class CheckpointFolder:
    """The checkpoints of a run in one folder, which every host must see.

    Args:
        path: the folder; made where it isn't there.
        tokenizer: of the captions: hub name, or a folder, which is copied into every checkpoint.
        lock: of the folder, on rank 0; nothing is saved there once another run has taken it over.
        run: the run's settings, which every checkpoint states and which are compared with those of one that is loaded.

    Attributes:
        most: checkpoints that can be there at a time.
    """

    def __init__(
        self,
        path: str | Path,
        settings: CheckpointSettings | None = None,
        *,
        tokenizer: str | None = None,
        lock: FolderLock | None = None,
        run: RunSettings | None = None,
    ) -> None:
        self.path = Path(path).absolute()
        self._rule = settings or CheckpointSettings()
        self.most = self._rule.keep_last + self._rule.keep_best + 1
        self._tokenizer, self._lock, self._run = tokenizer, lock, run
        self._run_id = ""
        self._damaged: dict[str, str] = {}
        self._verified: Path | None = None
        self._sync: BackgroundSync | None = None
        if rank() == 0 and self._rule.sync_to is not None:
            self._sync = BackgroundSync(self._rule.sync_to, self._rule)

    @doing("saving a checkpoint")
    def save(
        self, engine: ClapEngine, progress: TrainingProgress, *, metrics: dict[str, float] | None = None
    ) -> SavedCheckpoint:
        """Save the state of training. A collective; every rank gets the same answer.

        Where the disk is full, checkpoints of this run that aren't the best give way, the oldest first, as long as another is
        left. A disk that is full even so, or failing, is warned of and named in the answer; nothing half-written stays behind.
        What is reported as saved is on the disk and has been read back.

        Args:
            metrics: of the evaluation at this step, for `keep_best`; those that aren't finite are left out.

        Raises:
            NonFiniteError: on all ranks: weights or the optimiser's state hold NaN or infinite numbers; nothing is saved.
        """
        begin = time.time()
        state = engine_state(engine)
        if bad := on_first(lambda: not_finite({**state, "weights": master_weights(engine)})):
            raise NonFiniteError(f"{some(bad)} are NaN or infinite after step {progress.step}")
        state["random"] = gather(random_state(engine.model.logit_scale.device))
        finite = {name: float(value) for name, value in (metrics or {}).items() if math.isfinite(value)}
        try:
            path, num_bytes = on_first(lambda: self._write(engine, progress, state, finite))
        except ValueError as error:
            return SavedCheckpoint(progress.step, begin, time.time(), problem=str(error))
        if rank() == 0:
            self._verified = path
            self._delete_superfluous()
            rule = self._rule
            if finite and rule.keep_best and rule.best_by is not None and rule.best_by not in finite:
                warn(f"clap.checkpoint.best_by: {rule.best_by!r} is not among the metrics: {', '.join(sorted(finite))}")
            if self._sync is not None:
                self._sync.submit(path)
        return SavedCheckpoint(progress.step, begin, time.time(), path, num_bytes)

    @doing("looking for a checkpoint")
    def newest(self) -> Path | None:
        """The newest good checkpoint, brought here from `sync_to` if there is none; None if there is none at all.

        Damaged and half-written ones are warned of, with the reason, and passed over. A collective; every rank gets the same
        answer. Raises ValueError: `sync_to` can't be read, or there are checkpoints and not one is good.
        """
        return on_first(self._find_newest)

    def begin(self, run_id: str) -> None:
        """A new run, of this id, saves here from now on; other runs' checkpoints are left alone."""
        self._run_id = run_id

    def was_begun_by(self, run_id: str) -> bool:
        """Whether the newest checkpoint here is one of this run's. A collective; raises ValueError where that can't be told."""

        damaged: dict[str, str] = {}
        runs, why = on_first(lambda: ([each.run for each in files.read_all(self.path, damaged).values()], damaged))
        if why and run_id not in runs:
            raise ValueError(f"whether this run has begun can't be told: {'; '.join(why.values())}")
        return runs[:1] == [run_id]

    def whole(self) -> list[tuple[int, Path]]:
        """Steps and paths of the checkpoints that seem whole, the newest first. Looks at the disk of the rank that calls."""
        there = files.read_all(self.path).items()
        return [(found.step, self.path / name) for name, found in there if files.seems_whole(self.path / name)]

    def move_aside(self) -> Path | None:
        """Move everything here into another folder, given back, if there is anything. A collective."""
        return on_first(lambda: files.move_aside(self.path, but=LOCK))

    @doing("loading a checkpoint")
    def load(
        self, path: str | Path, engine: ClapEngine, *, accept_changes: bool = False, convert: bool = False
    ) -> TrainingProgress:
        """Put the engine, and this rank's random number generators, in the state of a checkpoint, or of the newest good one in
        a folder. A collective; see `restore`.

        Raises:
            ValueError: on all ranks: nothing there, damaged, not visible to every rank, or refused by `restore`.
        """
        folder, manifest = on_first(lambda: self._checked(Path(path).absolute()))
        self._run_id = manifest.run
        blind = [number for number, seen in enumerate(gather((folder / PROGRESS).is_file())) if not seen]
        if blind:
            raise ValueError(f"rank {blind[0]} can't see {folder}: checkpoints must lie where every host sees them")
        return restore(folder, engine, self._run, accept_changes=accept_changes, convert=convert)

    @doing("loading weights")
    def load_weights(self, step: int, engine: ClapEngine) -> tuple[Path, TrainingProgress]:
        """Of this folder's newest checkpoint of a step, the weights and how far training had come, whatever else of it is
        damaged. A collective; raises ValueError on all ranks: there is none whose weights are whole, or they don't fit.
        """
        folder = on_first(lambda: files.find_weights(self.path, step))
        return folder, restore_weights(folder, engine)

    @doing("measuring the speed of the checkpoint folder")
    def estimate(self, engine: ClapEngine) -> tuple[int, float]:
        """Size of a checkpoint in bytes, and seconds it takes to save one at the speed of a smaller file written here just now.

        Warns of too little space for `most`. Not a collective: ranks other than 0 don't write and get NaN seconds, as does one
        that can't.
        """
        num_bytes = estimated_bytes(engine)
        if rank() != 0:
            return num_bytes, math.nan
        free = shutil.disk_usage(self.path).free
        there = sum(record.bytes for manifest in self._own().values() for record in manifest.files.values())
        if free + there < self.most * num_bytes:
            warn(
                f"{self.path} has {free / 1e6:,.1f} MB free and {there / 1e6:,.1f} MB of this run's checkpoints; {self.most} of"
                f" {num_bytes / 1e6:,.1f} MB each can be there at a time (clap.checkpoint: keep_last + keep_best + 1, as an old"
                " one is deleted only after the new one is good). "
                + ("When it is full, the oldest is given up" if free + there > num_bytes else "Not even one has room")
            )
        content = os.urandom(max(1, min(num_bytes // 8, free // 2, _LARGEST_PROBE)))
        try:
            probe = files.begin(self.path, 0) / "probe"
            begin = time.perf_counter()
            write_file(probe, content)
            files.hash_file(probe)
            return num_bytes, num_bytes * (time.perf_counter() - begin) / len(content)
        except OSError as error:
            warn(f"the speed of {self.path} can't be measured: {error}")
            return num_bytes, math.nan
        finally:
            files.clear_leftovers(self.path)

    @doing("copying checkpoints")
    def close(self, limit_s: float = SYNC_LIMIT_S) -> list[Path]:
        """Wait for copies to `sync_to`, at most `limit_s` seconds; gives back, and warns of, those that aren't there."""
        sync, self._sync = self._sync, None
        return [] if sync is None else sync.close(limit_s)

    def release(self) -> None:
        """Leave the folder to other runs."""
        if self._lock is not None:
            self._lock.release()

    def _write(
        self, engine: ClapEngine, progress: TrainingProgress, state: dict[str, Any], metrics: dict[str, float]
    ) -> tuple[Path, int]:
        """The new checkpoint, read back, and its size; raises ValueError, warned of, whatever goes wrong."""
        try:
            if self._lock is not None:
                self._lock.check()
            files.clear_leftovers(self.path)
            while True:
                try:
                    return self._write_once(engine, progress, state, metrics)
                except OSError as error:
                    files.clear_leftovers(self.path)
                    if error.errno not in FULL or not self._make_room():
                        raise
        except Exception as error:  # whatever it is, other ranks wait for an answer, and training can go on without
            if not isinstance(error, HeldError):
                with suppress(OSError):
                    files.clear_leftovers(self.path)
            reason = str(error) if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: {error}"
            warn(f"the checkpoint of step {progress.step} could not be saved: {reason}; training goes on")
            raise ValueError(reason) from error

    def _write_once(
        self, engine: ClapEngine, progress: TrainingProgress, state: dict[str, Any], metrics: dict[str, float]
    ) -> tuple[Path, int]:
        draft = files.begin(self.path, progress.step)
        records = {}
        for name, content in self._contents(engine, progress, state):
            (draft / name).parent.mkdir(exist_ok=True)
            records[name] = write_file(draft / name, content)
        newest = max((manifest.serial for manifest in files.read_all(self.path).values()), default=0)
        manifest = Manifest(
            serial=max(int(time.time() * 1000), newest + 1),
            step=progress.step,
            model=engine.model.config.model_dump(mode="json"),
            engine=describe(engine),
            tokenizer=TOKENIZER if (draft / TOKENIZER).is_dir() else self._tokenizer,
            metrics=metrics,
            files=records,
            run=self._run_id,
            settings=self._run.resolved() if self._run is not None else {},
            best_by=self._rule.best_by,
        )
        return files.publish(draft, manifest), sum(record.bytes for record in records.values())

    def _contents(
        self, engine: ClapEngine, progress: TrainingProgress, state: dict[str, Any]
    ) -> Iterator[tuple[str, bytes | memoryview]]:
        """Name and content of every file."""
        yield STATE, to_state_file(state)
        yield PROGRESS, progress.to_json().encode()
        text_tokens = self._run.clap.text_tokens if self._run is not None else None
        yield WEIGHTS, to_safetensors(master_weights(engine), engine.model.config, text_tokens)
        if self._tokenizer is not None and Path(self._tokenizer).is_dir():  # so that the checkpoint does without it
            for path in sorted(Path(self._tokenizer).iterdir()):
                name = f"{TOKENIZER}/{path.name}"
                if path.is_file() and files.FILE_NAME.fullmatch(name):
                    yield name, read_bytes(path)

    def _find_newest(self) -> Path | None:
        self._verified = find_newest(self.path, self._rule.sync_to, self._damaged)
        return self._verified

    def _checked(self, path: Path) -> tuple[Path, Manifest]:
        """The checkpoint, or the newest good one in that folder."""
        if path != self._verified:
            self._verified = files.find_checkpoint(path)
        return self._verified, Manifest.read(self._verified)

    def _own(self) -> dict[str, Manifest]:
        """The run's whole checkpoints, the newest first, by name."""
        return {
            name: manifest
            for name, manifest in files.read_all(self.path).items()
            if manifest.run == self._run_id and name not in self._damaged and files.seems_whole(self.path / name)
        }

    def _delete_superfluous(self) -> None:
        try:
            for name in files.superfluous(self._own(), self._rule):
                if not (self._sync and self._sync.is_copying(self.path / name)):
                    files.remove(self.path / name)
        except OSError as error:
            warn(f"an old checkpoint can't be deleted: {error}")

    def _make_room(self) -> bool:
        """Give up the oldest checkpoint that is none of the best, as long as another is left; False where there is none."""
        own = self._own()
        kept = files.best(own, self._rule.best_by)[: self._rule.keep_best]
        for name in reversed(own):
            if len(own) > 1 and name not in kept and not (self._sync and self._sync.is_copying(self.path / name)):
                warn(f"the disk is full: {name} is given up for a newer checkpoint")
                files.remove(self.path / name)
                return True
        return False
