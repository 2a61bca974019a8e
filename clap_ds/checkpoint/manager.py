"""Save, find, load and delete the checkpoints of a training run. A run deletes only its own.

Rank 0 writes, in a thread of its own: at ZeRO-0 it has the whole state. With `async_save`, training
continues meanwhile, and the thread writes a copy of the state in host memory.
"""

import math
import os
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from clap_ds.checkpoint import checkpoint_files as files
from clap_ds.checkpoint.checkpoint_files import (
    MANIFEST,
    PROGRESS,
    RAW,
    STATE,
    TOKENIZER,
    WEIGHTS,
    CheckpointFolder,
    FileRecord,
    Manifest,
    save_tensors,
    to_state_file,
    write_file,
)
from clap_ds.checkpoint.remote import BackgroundSync, find_or_download
from clap_ds.checkpoint.restore import (
    describe_engine,
    engine_state,
    fp32_state,
    non_finite_tensors,
    restore,
)
from clap_ds.checkpoint.train_state import SavedCheckpoint, TrainState
from clap_ds.config.model import MOST, ClapConfig
from clap_ds.config.schema import CheckpointSettings
from clap_ds.config.urls import is_remote
from clap_ds.distributed.collectives import gather_tensor, raise_on_all_ranks, rank, run_on_rank0
from clap_ds.distributed.watchdog import activity
from clap_ds.engine.engine import ClapEngine, NonFiniteError
from clap_ds.engine.grad_cache import random_state
from clap_ds.run_records.lock import FILE as LOCK
from clap_ds.run_records.lock import FolderLock
from clap_ds.utils.errors import some, warn
from clap_ds.utils.files import read_bytes
from clap_ds.utils.redaction import redact_all
from clap_ds.weights.formats import to_safetensors

# Wait at the end of a run for copies to `remote_sync`.
SYNC_LIMIT_S = 600.0
# Niceness of the writing thread: on a host without a free core it gets a tenth of one.
NICE = 10


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
        self.tokenizer = tokenizer
        self.last: SavedCheckpoint | None = None
        self.run_id = ""
        self._settings = settings
        self._config = config or {}
        self._job = job
        self._lock: FolderLock | None = None
        self._sync: BackgroundSync | None = None
        if rank() == 0 and settings.remote_sync is not None:
            self._sync = BackgroundSync(settings.remote_sync, settings, self.path, logs)
        # Buffers in host memory, allocated by the first save in the background.
        self._stager: Any = None
        # One thread, so that saves are in order.
        self._thread = ThreadPoolExecutor(1, "checkpoints", initializer=_lower_priority)
        self._writing: Future[SavedCheckpoint] | None = None
        # Why a state that isn't finite wasn't written.
        self._non_finite = ""
        # Beginning of the last save or, before that, of the run.
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
        # The thread writes to the folder until then.
        self.poll(None)
        if self._lock is not None:
            self._lock.release()
        # A run that failed before its first checkpoint leaves no folder.
        with suppress(OSError):
            self.path.rmdir()

    def save(
        self,
        engine: ClapEngine,
        state: TrainState,
        metrics: dict[str, float] | None = None,
        *,
        wait: bool = True,
    ) -> list[SavedCheckpoint]:
        """Save the state of training. A collective.

        With `wait` or without `async_save` the state is saved completely, else in the background. A
        full or failing disk causes a warning and a `problem` in the result, and no partial
        checkpoint. Metrics that aren't finite are left out.

        Returns:
            Results that weren't returned before, the same on every rank: of the previous save, and
            of this one if it is complete.

        Raises:
            NonFiniteError: on all ranks, if weights or the optimizer's state aren't finite.
        """
        in_background = self._settings.async_save and not wait
        # At most one save is under way: its copy of the state is reused.
        results = [self.finish()]
        self._start(engine, state, metrics or {}, copied=in_background)
        if not in_background:
            results.append(self.finish())
        return [result for result in results if result is not None]

    @activity("saving a checkpoint")
    def _start(
        self, engine: ClapEngine, progress: TrainState, metrics: dict[str, float], *, copied: bool
    ) -> None:
        """Hand the state to the writing thread, `copied` if training changes it meanwhile."""
        begin = self._started_s = time.time()
        state = engine_state(engine)
        generators = random_state(engine.model.logit_scale.device)
        # By generator, the state on each rank.
        by_rank = {name: gather_tensor(tensor) for name, tensor in generators.items()}
        if rank() != 0:
            return
        assert self._writing is None
        weights = fp32_state(engine)
        contents: dict[str, dict[str, Any]] = {STATE: state, WEIGHTS: weights}
        if engine.ema is not None:
            contents |= {RAW: weights, WEIGHTS: weights | engine.ema.weights}
        if copied:
            # The next step overwrites the engine's tensors.
            contents = self._copy_to_host(contents)
        # By rank, the state of each generator.
        contents[STATE]["random"] = [
            dict(zip(by_rank, states, strict=True))
            for states in zip(*by_rank.values(), strict=True)
        ]
        model = engine.model.config
        # Serial and files are known once it is written.
        manifest = Manifest(
            serial=0,
            step=progress.step,
            model=model.model_dump(mode="json"),
            engine=describe_engine(engine),
            tokenizer=self.tokenizer,
            metrics={name: float(value) for name, value in metrics.items() if math.isfinite(value)},
            files={},
            run=self.run_id,
            settings=redact_all(self._config),
            best_metric=self._settings.best_metric,
        )
        progress_json = progress.to_json()
        now = time.time()
        save = SavedCheckpoint(progress.step, begin, end=now, stalled_s=now - begin)
        self._writing = self._thread.submit(
            lambda: self._write(save, contents, progress_json, model, manifest)
        )

    def is_late(self) -> bool:
        """Return whether `every_minutes` have passed since the last save or, before that, the
        start."""
        minutes = self._settings.every_minutes
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
        # Only rank 0 has results.
        results, non_finite = run_on_rank0(
            lambda: ([asdict(save) for save in self.poll(None)], self._non_finite)
        )
        if non_finite:
            raise NonFiniteError(non_finite)
        if not results:
            return None
        save = SavedCheckpoint(**results[0])
        # JSON has made text of the path.
        path = Path(save.path) if save.path else None
        self.last = replace(save, path=path, stalled_s=save.stalled_s + time.time() - begin)
        return self.last

    @activity("looking for a checkpoint")
    def find(self, source: str | None = None, *, restart: bool = False) -> Path | None:
        """Return the checkpoint at a path, or the newest valid one in a folder. A collective.

        The default source is this folder or, if it is empty, `remote_sync`. So it is if the newest
        checkpoint here is of this run. Checkpoints at URLs are downloaded into this folder. Damaged
        ones are skipped with a warning. Raises ValueError if none is at the source, a URL can't be
        read, or all are damaged.

        Args:
            restart: move other runs' checkpoints away and return None.
        """
        path = run_on_rank0(lambda: self._find(source, restart=restart))
        return Path(path) if path else None

    def _find(self, source: str | None, *, restart: bool) -> Path | None:
        newest = self._read_newest()
        if self.run_id and newest is not None and newest.run == self.run_id:
            # This continues an earlier start of the same command.
            source = None
        elif restart:
            self._archive()
            return None
        if source is None or is_remote(source):
            return find_or_download(self.path, source, self._settings.remote_sync)
        return files.find_checkpoint(Path(source).absolute()).path

    def newest_step(self) -> int:
        """Return the step of the newest checkpoint here, or 0. A collective."""

        def read_step() -> int:
            newest = self._read_newest()
            return 0 if newest is None else newest.step

        return run_on_rank0(read_step)

    def _read_newest(self) -> Manifest | None:
        return next(iter(files.read_all(self.path).values()), None)

    def _archive(self) -> None:
        new_folder = files.archive(self.path, keep=LOCK)
        if new_folder is not None:
            message = f"moved the contents of {self.path} to {new_folder}"
            print(f"starting from scratch; {message}", flush=True)

    @activity("loading a checkpoint")
    def load(
        self, path: Path, engine: ClapEngine, *, resume_weights_only: bool = False
    ) -> TrainState:
        """Resume from a checkpoint that `find` returned. A collective; raises ValueError if a rank
        can't see it, or as `restore` does."""
        with raise_on_all_ranks():
            try:
                checkpoint = CheckpointFolder.read(path)
            except ValueError as error:
                advice = "put checkpoints on a file system that all hosts share"
                raise ValueError(f"can't see {path}: {advice} ({error})") from None
        self.run_id = checkpoint.manifest.run
        return restore(
            checkpoint,
            engine,
            self._config,
            self.tokenizer,
            resume_weights_only=resume_weights_only,
        )

    @activity("copying checkpoints")
    def close(self, limit_s: float = SYNC_LIMIT_S) -> list[Path]:
        """Wait up to `limit_s` seconds for copies to `remote_sync`; warn about missing ones and
        return them."""
        self.poll(None)
        if self._sync is None:
            return []
        sync = self._sync
        self._sync = None
        return sync.close(limit_s)

    def _copy_to_host(self, contents: Any) -> Any:
        """Return the contents with their tensors in host memory, which all calls share. Those of a
        GPU are in pinned memory, if the host can pin as much."""
        # Only values are copied, without autograd's graph.
        contents = tree_map_only(Tensor, Tensor.detach, contents)
        if self._stager is None:
            self._stager = _make_stager(pins=torch.cuda.is_available())
        try:
            return self._stager.stage(contents)
        except RuntimeError as error:
            warn(f"checkpoints are copied without pinned memory, which takes longer: {error}")
            self._stager = _make_stager(pins=False)
            return self._stager.stage(contents)

    def _write(
        self,
        save: SavedCheckpoint,
        contents: dict[str, dict[str, Any]],
        progress: str,
        model: ClapConfig,
        manifest: Manifest,
    ) -> SavedCheckpoint:
        """Write the checkpoint, delete old ones, and start the copy to `remote_sync`. Errors become
        warnings."""
        try:
            bad_tensors = non_finite_tensors({**contents[STATE], "weights": contents[WEIGHTS]})
            # A run could never leave such a state again.
            if bad_tensors:
                self._non_finite = f"{some(bad_tensors)} are NaN or infinite after step {save.step}"
                raise ValueError(self._non_finite)
            # Another run may have replaced the lock of a process that seemed gone.
            if self._lock is not None:
                self._lock.check()
            files.clear_leftovers(self.path)
            with files.atomic_dir(self.path, save.step) as draft:
                records = self._write_contents(draft, contents, model)
                records[PROGRESS] = write_file(draft / PROGRESS, progress.encode())
                tokenizer_records = self._copy_tokenizer(draft)
                if tokenizer_records:
                    manifest = replace(manifest, tokenizer=TOKENIZER)
                records |= tokenizer_records
                manifest = replace(manifest, serial=self._next_serial(), files=records)
                # The last file: with it the checkpoint is complete.
                write_file(draft / MANIFEST, manifest.to_json().encode())
        except Exception as error:
            # Training can continue without a checkpoint. `finish` raises an error for numbers that
            # aren't finite.
            if not self._non_finite:
                warn(
                    f"the checkpoint of step {save.step} could not be saved: {error}; training"
                    " continues"
                )
            return replace(save, end=time.time(), problem=str(error))
        path = self.path / draft.name
        self._delete_old()
        if self._sync is not None:
            self._sync.submit(path)
        num_bytes = sum(record.bytes for record in records.values())
        return replace(save, end=time.time(), path=path, bytes=num_bytes)

    def _write_contents(
        self, draft: Path, contents: dict[str, dict[str, Any]], model: ClapConfig
    ) -> dict[str, FileRecord]:
        context_length = self._config.get("clap", {}).get("context_length")
        records = {}
        for name, content in contents.items():
            if name == STATE:
                tensors, metadata = to_state_file(content)
            else:
                tensors, metadata = to_safetensors(content, model, context_length)
            records[name] = save_tensors(draft / name, tensors, metadata)
        return records

    def _copy_tokenizer(self, draft: Path) -> dict[str, FileRecord]:
        """Copy a tokenizer's folder into the checkpoint, which makes it self-contained."""
        records: dict[str, FileRecord] = {}
        if self.tokenizer is None or not Path(self.tokenizer).is_dir():
            return records
        for path in sorted(Path(self.tokenizer).iterdir()):
            name = f"{TOKENIZER}/{path.name}"
            if path.is_file() and files.FILE_NAME.fullmatch(name):
                records[name] = write_file(draft / name, read_bytes(path))
        return records

    def _next_serial(self) -> int:
        """Return the time in ms since 1970, or a larger number if the newest checkpoint's isn't
        smaller, as clocks of hosts differ."""
        manifests = files.read_all(self.path).values()
        newest = max((manifest.serial for manifest in manifests), default=0)
        return max(int(time.time() * 1000), min(newest + 1, MOST))

    def _delete_old(self) -> None:
        """Delete this run's checkpoints that `keep_last` and `keep_best` don't keep."""
        of_run = {
            name: manifest
            for name, manifest in files.read_all(self.path).items()
            if manifest.run == self.run_id
        }
        try:
            for name in files.to_delete(of_run, self._settings):
                path = self.path / name
                is_copying = self._sync is not None and self._sync.is_copying(path)
                # A link may point to other runs' files.
                if not is_copying and not path.is_symlink():
                    files.remove(path)
        except OSError as error:
            warn(f"an old checkpoint can't be deleted: {error}")


def _make_stager(*, pins: bool) -> Any:
    """Return torch's stager to host memory, which `pins` it."""
    # An experimental package of torch, which only asynchronous saving needs.
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

    options = StagingOptions(
        use_pinned_memory=pins,
        use_shared_memory=False,
        use_async_staging=False,
        use_non_blocking_copy=pins,
    )
    return DefaultStager(options)


def _lower_priority() -> None:
    # Linux has a priority per thread.
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
