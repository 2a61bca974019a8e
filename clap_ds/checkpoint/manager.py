"""Save, find, load and delete the checkpoints of a training run. A run deletes only its own."""

import math
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from clap_ds.checkpoint import checkpoint_files as files
from clap_ds.checkpoint.checkpoint_files import (
    MANIFEST,
    RAW,
    STATE,
    TOKENIZER,
    WEIGHTS,
    Manifest,
    save_tensors,
    to_state_file,
    warn,
    write_file,
)
from clap_ds.checkpoint.remote import BackgroundSync
from clap_ds.checkpoint.restore import (
    PROGRESS,
    describe,
    engine_state,
    find_newest,
    fp32_state,
    not_finite,
    restore,
)
from clap_ds.checkpoint.train_state import SavedCheckpoint, TrainState
from clap_ds.config.model import MOST, ClapConfig
from clap_ds.config.schema import CheckpointSettings
from clap_ds.data.shard_io import is_remote
from clap_ds.distributed.collectives import gather_tensor, raise_on_all_ranks, rank, run_on_rank0
from clap_ds.distributed.watchdog import activity
from clap_ds.engine.engine import ClapEngine, NonFiniteError
from clap_ds.engine.grad_cache import random_state
from clap_ds.run_records.lock import FILE as LOCK
from clap_ds.run_records.lock import FolderLock
from clap_ds.utils.errors import some
from clap_ds.utils.files import read_bytes
from clap_ds.utils.redaction import redacted_all
from clap_ds.weights.formats import to_safetensors
from clap_ds.weights.key_mapping import State

SYNC_LIMIT_S = 600.0
NICE = 10
"""Niceness of the writing thread: on a host without a free core it gets a tenth of one."""


class Checkpointer:
    """The checkpoints of a run in one folder, which every host must see. As a context manager it
    locks the folder.

    Args:
        path: the folder; created if missing.
        tokenizer: hub name, or a folder, which is copied into every checkpoint.
        config: the run's JSON, recorded in every checkpoint.
        job: folder of the run's job, whose attempts share the lock.
        logs: the run directory, copied to `remote_sync` with every checkpoint.

    Attributes:
        last: result of the last complete save.
        run_id: run to save as; other runs' checkpoints are kept.
    """

    def __init__(
        self,
        path: str | Path,
        settings: CheckpointSettings = CheckpointSettings(),
        *,
        tokenizer: str | None = None,
        config: dict[str, Any] | None = None,
        job: Path | None = None,
        logs: Path | None = None,
    ) -> None:
        self.path = Path(path).absolute()
        self._rule = settings
        self.tokenizer = tokenizer
        self._config = config or {}
        self._job = job
        self._lock: FolderLock | None = None
        self.last: SavedCheckpoint | None = None
        self.run_id = ""
        self._sync: BackgroundSync | None = None
        if rank() == 0 and self._rule.remote_sync is not None:
            self._sync = BackgroundSync(self._rule.remote_sync, self._rule, self.path, logs)
        self._stager: Any = None
        self._thread = ThreadPoolExecutor(1, "checkpoints", initializer=_give_way)
        self._writing: Future[SavedCheckpoint] | None = None
        self._poisoned = ""
        self._started_s = time.time()

    @activity("waiting for the checkpoint folder")
    def __enter__(self) -> Self:
        """Lock the folder. A collective; UserError if another run holds it or it isn't writable."""
        self._lock = FolderLock(self.path, self._job)
        with raise_on_all_ranks():
            try:
                run_on_rank0(self._lock.acquire)
            except ValueError as error:
                raise ValueError(f"clap.checkpoint.folder: {error}") from None
        return self

    def __exit__(self, *_: object) -> None:
        self.poll(None)
        if self._lock is not None:
            self._lock.release()
        with suppress(OSError):  # a run that failed before its first checkpoint leaves no folder
            self.path.rmdir()

    def save(
        self,
        engine: ClapEngine,
        state: TrainState,
        metrics: dict[str, float] | None = None,
        *,
        wait: bool = True,
    ) -> list[SavedCheckpoint]:
        """Save the state of training: with `wait` or without `async_save` completely, else in the
          background.

        A full or failing disk causes a warning and a `problem` in the result, and no partial
          checkpoint. Non-finite `metrics`
        are left out. Raises NonFiniteError on all ranks if weights or the optimizer's state aren't
          finite. A collective.

        Returns:
            Results that weren't returned before: of the previous save, and of this one if complete;
              the same on every rank.
        """
        previous = self.finish()
        wait = wait or not self._rule.async_save
        self._start(engine, state, metrics or {}, copied=not wait)
        return [each for each in (previous, self.finish() if wait else None) if each is not None]

    @activity("saving a checkpoint")
    def _start(
        self, engine: ClapEngine, progress: TrainState, metrics: dict[str, float], *, copied: bool
    ) -> None:
        """Hand the state to the writing thread, `copied` if training changes it meanwhile."""
        begin = self._started_s = time.time()
        state = engine_state(engine)
        generators = random_state(engine.model.logit_scale.device)
        random = zip(*map(gather_tensor, generators.values()), strict=True)
        if rank():
            return
        assert self._writing is None
        found = {"state": state, **_weights(engine)}
        found = self._copied(found) if copied else found
        found["state"]["random"] = [
            dict(zip(generators, of_rank, strict=True)) for of_rank in random
        ]
        manifest = partial(
            Manifest,
            step=progress.step,
            model=engine.model.config.model_dump(mode="json"),
            engine=describe(engine),
            metrics={name: float(value) for name, value in metrics.items() if math.isfinite(value)},
            run=self.run_id,
            settings=redacted_all(self._config),
            best_metric=self._rule.best_metric,
        )
        saved = SavedCheckpoint(progress.step, begin, time.time(), stalled_s=time.time() - begin)
        model = engine.model.config
        told = progress.to_json()
        self._writing = self._thread.submit(
            lambda: self._write(saved, found, told, model, manifest)
        )

    def is_late(self) -> bool:
        """Return whether `every_minutes` have passed since the last save or, before that, the
        start."""
        minutes = self._rule.every_minutes
        return minutes is not None and time.time() - self._started_s >= 60 * minutes

    def poll(self, limit_s: float | None = 0.0) -> list[SavedCheckpoint]:
        """Return the result of saving, once, on rank 0, if it ends within `limit_s` seconds (None:
        no limit); else nothing."""
        if self._writing is None or not wait([self._writing], limit_s).done:
            return []
        writing = self._writing
        self._writing = None
        return [writing.result()]

    @activity("saving a checkpoint")
    def finish(self) -> SavedCheckpoint | None:
        """Wait for the save and return its result on all ranks. A collective; raises NonFiniteError
        as `save` does."""
        begin = time.time()
        results, poisoned = run_on_rank0(
            lambda: ([asdict(saved) for saved in self.poll(None)], self._poisoned)
        )
        if poisoned:
            raise NonFiniteError(poisoned)
        if not results:
            return None
        saved = SavedCheckpoint(**results[0])
        path = Path(saved.path) if saved.path else None
        self.last = replace(saved, path=path, stalled_s=saved.stalled_s + time.time() - begin)
        return self.last

    @activity("looking for a checkpoint")
    def find(self, place: str | None = None) -> Path | None:
        """Return the checkpoint at a path, or the newest good one in a folder: by default this one
          or, if empty, `remote_sync`.
        Those at URLs are downloaded into this folder.

        Damaged checkpoints are skipped with a warning. A collective; returns the same on every
          rank, None if there is none.
        Raises ValueError if none is at the place, a URL can't be read, or all are damaged.
        """
        if place is None or is_remote(place):
            newest = run_on_rank0(lambda: find_newest(self.path, place, self._rule.remote_sync))
            return Path(newest) if newest else None
        return Path(run_on_rank0(lambda: files.find_checkpoint(Path(place).absolute())))

    def was_begun_by(self, run_id: str) -> bool:
        """Return whether the newest checkpoint here is from this run. A collective."""
        return run_on_rank0(lambda: [each.run for each in files.read_all(self.path).values()])[
            :1
        ] == [run_id]

    def move_aside(self) -> None:
        """Move everything here into another folder. A collective."""
        aside = run_on_rank0(lambda: files.move_aside(self.path, but=LOCK))
        if aside is not None and rank() == 0:
            print(
                f"starting from scratch; moved the contents of {self.path} to {aside}", flush=True
            )

    @activity("loading a checkpoint")
    def load(
        self, folder: Path, engine: ClapEngine, *, resume_weights_only: bool = False
    ) -> TrainState:
        """Resume from a checkpoint that `find` returned. A collective; raises ValueError if a rank
          can't see it, or as
        `restore` does."""
        self.run_id = run_on_rank0(lambda: Manifest.read(folder).run)
        with raise_on_all_ranks():
            if not (folder / PROGRESS).is_file():
                raise ValueError(
                    f"can't see {folder}: put checkpoints on a file system that all hosts share"
                )
        return restore(
            folder, engine, self._config, self.tokenizer, resume_weights_only=resume_weights_only
        )

    @activity("copying checkpoints")
    def close(self, limit_s: float = SYNC_LIMIT_S) -> list[Path]:
        """Wait up to `limit_s` seconds for copies to `remote_sync`; warn about missing ones and
        return them."""
        self.poll(None)
        sync = self._sync
        self._sync = None
        return [] if sync is None else sync.close(limit_s)

    def _copied(self, state: Any) -> Any:
        """Return the state with its tensors in host memory, the same at each call: in pinned memory
          those of a GPU, if the host
        can pin as much."""
        state = tree_map_only(Tensor, Tensor.detach, state)
        self._stager = self._stager or _stager(pins=torch.cuda.is_available())
        try:
            return self._stager.stage(state)
        except RuntimeError as error:
            warn(f"checkpoints are copied without pinned memory, which takes longer: {error}")
            self._stager = _stager(pins=False)
            return self._stager.stage(state)

    def _write(
        self,
        saved: SavedCheckpoint,
        found: dict[str, Any],
        progress: str,
        model: ClapConfig,
        manifest: Any,
    ) -> SavedCheckpoint:
        """Write the checkpoint, delete superfluous ones, and start the copy to `sync_to`. Errors
        become warnings."""
        try:
            state = found.pop("state")
            if bad := not_finite({**state, "weights": found[WEIGHTS]}):
                self._poisoned = f"{some(bad)} are NaN or infinite after step {saved.step}"
                raise ValueError(self._poisoned)
            if self._lock is not None:
                self._lock.check()
            files.clear_leftovers(self.path)
            with files.begin(self.path, saved.step) as draft:
                context_length = self._config.get("clap", {}).get("context_length")
                records = {STATE: save_tensors(draft / STATE, *to_state_file(state))}
                for name, weights in found.items():
                    records[name] = save_tensors(
                        draft / name, *to_safetensors(weights, model, context_length)
                    )
                records[PROGRESS] = write_file(draft / PROGRESS, progress.encode())
                copies = {
                    name: write_file(draft / name, content)
                    for name, content in self._tokenizer_files()
                }
                newest = max(
                    (each.serial for each in files.read_all(self.path).values()), default=0
                )
                serial = max(int(time.time() * 1000), min(newest + 1, MOST))
                tokenizer = TOKENIZER if copies else self.tokenizer
                manifest = manifest(serial=serial, tokenizer=tokenizer, files=records | copies)
                write_file(draft / MANIFEST, manifest.to_json().encode())
            path = self.path / draft.name
        except Exception as error:  # training can continue without a checkpoint
            if not self._poisoned:
                warn(
                    f"the checkpoint of step {saved.step} could not be saved: {error}; training continues"
                )
            return replace(saved, end=time.time(), problem=str(error))
        self._delete_superfluous()
        if self._sync is not None:
            self._sync.submit(path)
        return replace(
            saved,
            end=time.time(),
            path=path,
            bytes=sum(each.bytes for each in manifest.files.values()),
        )

    def _tokenizer_files(self) -> Iterator[tuple[str, bytes]]:
        if (
            self.tokenizer is not None and Path(self.tokenizer).is_dir()
        ):  # makes the checkpoint self-contained
            for path in sorted(Path(self.tokenizer).iterdir()):
                name = f"{TOKENIZER}/{path.name}"
                if path.is_file() and files.FILE_NAME.fullmatch(name):
                    yield name, read_bytes(path)

    def _delete_superfluous(self) -> None:
        own = {
            name: each
            for name, each in files.read_all(self.path).items()
            if each.run == self.run_id
        }
        try:
            for name in files.superfluous(own, self._rule):
                path = self.path / name
                is_used = self._sync is not None and self._sync.is_copying(path)
                if not (path.is_symlink() or is_used):  # a link may point to other runs' files
                    files.remove(path)
        except OSError as error:
            warn(f"an old checkpoint can't be deleted: {error}")


def _stager(*, pins: bool) -> Any:
    """Return torch's stager to host memory, which `pins` it."""
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

    pinned = {"use_pinned_memory": pins, "use_non_blocking_copy": pins}
    return DefaultStager(StagingOptions(use_shared_memory=False, use_async_staging=False, **pinned))


def _give_way() -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)


def _weights(engine: ClapEngine) -> dict[str, State]:
    """Return weights by file name."""
    weights = fp32_state(engine)
    return (
        {WEIGHTS: weights}
        if engine.average is None
        else {RAW: weights, WEIGHTS: weights | engine.average.weights}
    )
