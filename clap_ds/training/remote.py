"""Copies of checkpoints in another place, made while training goes on: any folder or URL that fsspec can write to.

Files go first and the manifest last, so that an upload that breaks off is never taken for a checkpoint; coming back, a
checkpoint is checked before it gets its name. Whatever goes wrong there is told and never stops training. Packages for a
protocol (s3fs, gcsfs, …) and credentials are the user's: the latter from the environment alone, never from a URL, which
would end up in logs and records.
"""

from __future__ import annotations

import posixpath
import queue
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec

from clap_ds.data.shard_files import check_url, is_remote
from clap_ds.weights import checkpoint_files
from clap_ds.weights.manifest import MANIFEST, DamagedError, Manifest

FIELD = "clap.checkpoint.sync_to"
ATTEMPTS = 6
LONGEST_WAIT_S = 60.0


def check_target(url: str, folder: Path) -> None:
    """Refuse what can't be a target for the checkpoints in `folder`, without connecting.

    Raises:
        ValueError: credentials in the URL, a protocol fsspec doesn't know, or one whose package isn't installed, or the folder
            itself.
    """
    if is_remote(url):
        try:
            check_url(url)
        except ValueError as error:
            raise ValueError(f"{FIELD}: {error}") from None
    if Path(url.removeprefix("file://")).absolute() == folder:
        raise ValueError(f"{FIELD}: {url} is the folder of the checkpoints itself")


class RemoteFolder:
    """A folder of checkpoints on any file system of fsspec's.

    Every method raises what the file system raises, of whatever type.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self._fs, self._root = fsspec.url_to_fs(url)
        self._root = self._root.rstrip("/")

    def read_all(self) -> tuple[dict[str, Manifest], list[str]]:
        """Manifests by name, and what is wrong with those that can't be read. A folder that isn't there has none."""
        manifests, problems = {}, []
        for name in self._names():
            if self._fs.exists(self._path(name, MANIFEST)):
                try:
                    manifests[name] = Manifest.from_json(
                        self._fs.cat_file(self._path(name, MANIFEST)), f"{self.url}/{name}"
                    )
                except DamagedError as error:
                    problems.append(str(error))
        return manifests, problems

    def upload(self, checkpoint: Path) -> None:
        """Copy a checkpoint there, unless it is there already."""
        manifest = Manifest.read(checkpoint)
        there, _ = self.read_all()
        if there.get(checkpoint.name) == manifest:
            return
        self.delete(checkpoint.name)
        for name, record in manifest.files.items():
            target = self._path(checkpoint.name, name)
            self._fs.makedirs(posixpath.dirname(target), exist_ok=True)
            self._fs.put_file(str(checkpoint / name), target)
            size = self._fs.info(target)["size"]
            if size != record.bytes:
                raise OSError(f"{self.url}: {name} arrived with {size} of {record.bytes} bytes")
        self._fs.pipe_file(self._path(checkpoint.name, MANIFEST), manifest.to_json().encode())

    def delete(self, name: str) -> None:
        """Delete a checkpoint, its manifest first, so that it is none from then on. None there: nothing happens."""
        self._fs.invalidate_cache()
        if self._fs.exists(self._path(name, MANIFEST)):
            self._fs.rm_file(self._path(name, MANIFEST))
        if self._fs.exists(self._path(name)):
            self._fs.rm(self._path(name), recursive=True)

    def rotate(self, *, keep_last: int, keep_best: int, best_by: str) -> None:
        """Delete superfluous checkpoints, and what uploads that broke off left behind."""
        manifests, _ = self.read_all()
        doomed = checkpoint_files.superfluous(manifests, keep_last=keep_last, keep_best=keep_best, best_by=best_by)
        for name in [*doomed, *(name for name in self._names() if name not in manifests)]:
            self.delete(name)

    def download_newest(self, folder: Path, warn: Callable[[str], None]) -> Path | None:
        """Bring the newest good checkpoint into a local folder; None if there is none.

        Those that turn out damaged are warned of and passed over.
        """
        manifests, problems = self.read_all()
        for problem in problems:
            warn(f"passed over: {problem}")
        for name in checkpoint_files.newest_first(manifests):
            free_name = checkpoint_files.checkpoint_name(manifests[name].step, folder)
            partial = checkpoint_files.partial_of(folder, free_name)
            shutil.rmtree(partial, ignore_errors=True)
            try:
                for file in manifests[name].files:
                    (partial / file).parent.mkdir(parents=True, exist_ok=True)
                    self._fs.get_file(self._path(name, file), str(partial / file))
                return checkpoint_files.publish(partial, manifests[name])
            except (DamagedError, FileNotFoundError) as error:
                warn(f"passed over: {self.url}/{name}: {error}")
            finally:
                shutil.rmtree(partial, ignore_errors=True)
        return None

    def _names(self) -> list[str]:
        self._fs.invalidate_cache()
        if not self._fs.exists(self._root):
            return []
        names = (posixpath.basename(path.rstrip("/")) for path in self._fs.ls(self._root, detail=False))
        return sorted(name for name in names if checkpoint_files.is_name(name))

    def _path(self, *parts: str) -> str:
        return "/".join((self._root, *parts))


class BackgroundSync:
    """Copies finished checkpoints from a thread, one after the other.

    Args:
        url: where to.
        keep_last, keep_best, best_by: which of the copies stay, as locally.
        warn: told what goes wrong.
        first_wait_s: before the second attempt; doubles up to a minute from one to the next.
    """

    def __init__(
        self,
        url: str,
        *,
        keep_last: int,
        keep_best: int,
        best_by: str,
        warn: Callable[[str], None],
        first_wait_s: float = 2.0,
    ) -> None:
        self.url = url
        self.busy_with: Path | None = None
        self._rule: dict[str, Any] = {"keep_last": keep_last, "keep_best": keep_best, "best_by": best_by}
        self._warn = warn
        self._first_wait_s = first_wait_s
        self._queue: queue.Queue[Path | None] = queue.Queue()
        self._waiting: list[Path] = []
        self._failed: list[Path] = []
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._work, name="checkpoint sync", daemon=True)
        self._thread.start()

    def submit(self, checkpoint: Path) -> None:
        """Copy this checkpoint when its turn comes. If it has been rotated away by then, it is left out."""
        self._waiting.append(checkpoint)
        self._queue.put(checkpoint)

    def close(self, limit_s: float) -> list[Path]:
        """Wait for what is under way and give back the checkpoints that aren't there."""
        self._queue.put(None)
        self._thread.join(limit_s)
        self._stopping.set()
        left = [*self._failed, *self._waiting]
        if left:
            names = ", ".join(path.name for path in left)
            late = f" within {limit_s:,.0f} s" if self._waiting else ""
            self._warn(f"{len(left)} checkpoints have not been copied to {self.url}{late}: {names}")
        return left

    def _work(self) -> None:
        while (checkpoint := self._queue.get()) is not None:
            self.busy_with = checkpoint
            if checkpoint.exists():
                self._copy(checkpoint)
            self.busy_with = None
            self._waiting.remove(checkpoint)

    def _copy(self, checkpoint: Path) -> None:
        wait_s = self._first_wait_s
        for attempt in range(1, ATTEMPTS + 1):
            try:
                remote = RemoteFolder(self.url)
                remote.upload(checkpoint)
                remote.rotate(**self._rule)
                return
            except Exception as error:  # of whatever type the file system's package has
                again = attempt < ATTEMPTS and not self._stopping.is_set()
                what_next = f"next attempt in {wait_s:,.0f} s" if again else "given up; training goes on"
                self._warn(
                    f"copying {checkpoint.name} to {self.url} failed ({type(error).__name__}: {error}); {what_next}"
                )
                if not again:
                    break
            self._stopping.wait(wait_s)
            wait_s = min(2 * wait_s, LONGEST_WAIT_S)
        self._failed.append(checkpoint)
