"""Checkpoints of a training run: saved by all ranks together, rotated, found again and gone on from.

How they lie on the disk is left to `checkpoint_files` and `draft`, what DeepSpeed's engine holds to `engine_state`, copies
elsewhere to `remote`. When to save, and what a data position is, is the trainer's.
"""

from __future__ import annotations

import math
import os
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

import torch

from clap_ds.dist.agreement import gather, on_first, rank
from clap_ds.engine.engine import ClapEngine
from clap_ds.training import engine_state, random_state
from clap_ds.training.draft import PROGRESS, RANDOM_STATES, begin_draft, complete_draft
from clap_ds.training.progress import Progress, SavedCheckpoint
from clap_ds.training.remote import BackgroundSync, RemoteFolder, check_target
from clap_ds.weights import checkpoint_files
from clap_ds.weights.load import warn as print_warning
from clap_ds.weights.manifest import Manifest

__all__ = ["CheckpointFolder", "Progress", "SavedCheckpoint"]

SYNC_LIMIT_S = 600.0
_LARGEST_PROBE = 256 * 2**20

T = TypeVar("T")


class CheckpointFolder:
    """The checkpoints of a run in one folder, which every host must see. Made by all ranks together.

    Args:
        path: the folder; made where it isn't there.
        keep_last: newest checkpoints to keep.
        keep_best: checkpoints to keep beyond these for being the best by a metric.
        best_by: that metric; larger is better.
        sync_to: folder or fsspec URL that finished checkpoints are copied to in the background.
        tokenizer: of the captions: hub name, or a folder, which is copied into every checkpoint.
        warn: told what goes wrong, on rank 0; by default a line to standard error.

    Raises:
        ValueError: on all ranks: the folder can't be written, or `sync_to` can't be a target.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        keep_last: int = 3,
        keep_best: int = 1,
        best_by: str = "zero_shot_top1",
        sync_to: str | None = None,
        tokenizer: str | None = None,
        warn: Callable[[str], None] = print_warning,
    ) -> None:
        self.path = Path(path).absolute()
        self.sync_to = sync_to
        self._rule: dict[str, Any] = {"keep_last": keep_last, "keep_best": keep_best, "best_by": best_by}
        self._tokenizer = tokenizer
        self._warn = warn
        self._verified: Path | None = None
        self._sync: BackgroundSync | None = None
        if sync_to is not None:
            check_target(sync_to, self.path)
        on_first(lambda: _check_writable(self.path))
        if rank() == 0 and sync_to is not None:
            self._sync = BackgroundSync(sync_to, **self._rule, warn=warn)

    def save(
        self, engine: ClapEngine, progress: Progress, *, metrics: dict[str, float] | None = None
    ) -> SavedCheckpoint:
        """Save the state of training. A collective; every rank gets the same answer.

        A disk that is full or failing is warned of and told in the answer; nothing half-written stays behind and older
        checkpoints are left alone. What is reported as saved is on the disk and has been read back.

        Args:
            metrics: of the evaluation at this step, for `keep_best`; those that aren't finite are left out.
        """
        begin = time.time()
        step = progress.step
        random_states = gather(random_state.capture(_device(engine)))
        draft, problem = on_first(lambda: self._attempt(step, self._begin))
        if draft is None:
            return SavedCheckpoint(False, step, None, begin, time.time(), problem=problem)
        files = engine_state.HashedFiles(draft, is_first=rank() == 0)
        with files.installed(engine.deepspeed):
            client_state = {"clap_ds": asdict(progress)}
            engine.deepspeed.save_checkpoint(
                str(draft), tag=engine_state.TAG, client_state=client_state, save_latest=False
            )
        finite = {name: float(value) for name, value in (metrics or {}).items() if math.isfinite(value)}

        def complete(_: int) -> tuple[Path, Manifest]:
            return complete_draft(
                draft,
                files,
                engine,
                progress,
                random_states=random_states,
                metrics=finite,
                tokenizer=self._tokenizer,
            )

        saved, problem = on_first(lambda: self._attempt(step, complete))
        if saved is None:
            return SavedCheckpoint(False, step, None, begin, time.time(), problem=problem)
        path, manifest = saved
        if rank() == 0:
            self._verified = path
            self._after_save(path, finite)
        return SavedCheckpoint(True, step, path, begin, time.time(), manifest.total_bytes)

    def newest(self) -> Path | None:
        """The newest good checkpoint, brought here from `sync_to` if there is none; None if there is none at all.

        Damaged and half-written ones are warned of, with the reason, and passed over. A collective; every rank gets the same
        answer.

        Raises:
            ValueError: `sync_to` can't be read.
        """
        return on_first(self._find_newest)

    def load(self, path: str | Path, engine: ClapEngine) -> Progress:
        """Put the engine, and this rank's random number generators, in the state of a checkpoint. A collective.

        The world size may be another one: ranks that the checkpoint has no generators for keep theirs. DeepSpeed unpickles its
        file: go on only from checkpoints of your own.

        Args:
            path: a checkpoint, or a folder of checkpoints, whose newest good one is taken.

        Raises:
            ValueError: on all ranks: nothing there, damaged, not to be seen by every rank, or of a run this engine can't go on
                from.
        """
        folder = on_first(lambda: self._checked(Path(path).absolute()))
        blind = [number for number, seen in enumerate(gather((folder / PROGRESS).is_file())) if not seen]
        if blind:
            raise ValueError(f"rank {blind[0]} can't see {folder}: checkpoints must lie where every host sees them")
        engine_state.check_fits(folder, Manifest.read(folder), engine)
        engine_state.load(folder, engine)
        progress = Progress.from_json((folder / PROGRESS).read_text())
        engine.steps = progress.step
        states = torch.load(folder / RANDOM_STATES, map_location="cpu", weights_only=True)
        if rank() < len(states):
            random_state.restore(states[rank()], _device(engine))
        return progress

    def estimate(self, engine: ClapEngine) -> tuple[int, float]:
        """Size of a checkpoint in bytes, and seconds it takes to save one at the speed of a smaller file written here just now.

        Warns of too little space. Not a collective: ranks other than 0 don't write and get NaN seconds, as does one that can't.
        """
        num_bytes = engine_state.estimated_bytes(engine)
        if rank() != 0:
            return num_bytes, math.nan
        free = shutil.disk_usage(self.path).free
        if free < 2 * num_bytes:
            self._warn(
                f"{self.path} has {_gb(free)} free; a checkpoint takes {_gb(num_bytes)}, and the old one is deleted only"
                " after the new one is good: fewer than 2 fit"
            )
        try:
            return num_bytes, num_bytes / self._bytes_per_s(max(1, min(num_bytes // 8, free // 2, _LARGEST_PROBE)))
        except OSError as error:
            self._warn(f"the speed of {self.path} can't be measured: {error}")
            return num_bytes, math.nan

    def close(self, limit_s: float = SYNC_LIMIT_S) -> list[Path]:
        """Wait for copies to `sync_to`, at most `limit_s` seconds; gives back, and warns of, those that aren't there."""
        if self._sync is None:
            return []
        sync, self._sync = self._sync, None
        return sync.close(limit_s)

    def _attempt(self, step: int, task: Callable[[int], T]) -> tuple[T | None, str | None]:
        """What a task of saving gives, or what went wrong: told, and cleared away."""
        try:
            return task(step), None
        except Exception as error:  # whatever it is, other ranks wait for an answer, and training can go on without
            with suppress(OSError):
                checkpoint_files.clear_leftovers(self.path)
            reason = str(error) if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: {error}"
            self._warn(f"the checkpoint of step {step} could not be saved: {reason}; training goes on")
            return None, reason

    def _begin(self, step: int) -> Path:
        checkpoint_files.clear_leftovers(self.path)
        return begin_draft(self.path, step)

    def _after_save(self, path: Path, metrics: dict[str, float]) -> None:
        """The new checkpoint is good and stays: delete what it makes superfluous, and have it copied."""
        busy = None if self._sync is None else self._sync.busy_with
        try:
            manifests, _ = checkpoint_files.read_all(self.path)
            for name in checkpoint_files.superfluous(manifests, **self._rule):
                if self.path / name not in (path, busy):
                    checkpoint_files.remove(self.path / name)
        except OSError as error:
            self._warn(f"an old checkpoint can't be deleted: {error}")
        if metrics and self._rule["keep_best"] and self._rule["best_by"] not in metrics:
            found = ", ".join(sorted(metrics))
            self._warn(f"clap.checkpoint.best_by: {self._rule['best_by']!r} is not among the metrics: {found}")
        if self._sync is not None:
            self._sync.submit(path)

    def _find_newest(self) -> Path | None:
        found = checkpoint_files.newest_good(self.path, self._warn)
        if found is None and self.sync_to is not None:
            try:
                found = RemoteFolder(self.sync_to).download_newest(self.path, self._warn)
            except Exception as error:  # of whatever type the file system's package has
                raise ValueError(
                    f"clap.checkpoint.sync_to: {self.sync_to} can't be read ({type(error).__name__}: {error});"
                    " clap.train.resume 'never' starts without"
                ) from error
        self._verified = found
        return found

    def _checked(self, path: Path) -> Path:
        if path != self._verified:
            self._verified = checkpoint_files.find_checkpoint(path, self._warn)
        return self._verified

    def _bytes_per_s(self, num_bytes: int) -> float:
        """Speed of writing a file and reading it back, as checkpoints are."""
        probe = self.path / f"{checkpoint_files.PROBE}{uuid4().hex}"
        content = (os.urandom(2**20) * (num_bytes // 2**20 + 1))[:num_bytes]
        begin = time.perf_counter()
        try:
            checkpoint_files.write_file(probe, content)
            checkpoint_files.hash_file(probe)
            return num_bytes / (time.perf_counter() - begin)
        finally:
            probe.unlink(missing_ok=True)


def _device(engine: ClapEngine) -> torch.device:
    return engine.model.logit_scale.device


def _check_writable(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f"{checkpoint_files.PROBE}{uuid4().hex}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ValueError(f"clap.checkpoint.folder: {folder} can't be written: {error.strerror}") from error


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:,.2f} GB"
