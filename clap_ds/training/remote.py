"""Copies of checkpoints in another place, made while training goes on: any folder or URL that fsspec can write to.

Files go first and the manifest last, so that an upload that breaks off is never taken for a checkpoint; coming back, a
checkpoint is checked before it gets its name. Whatever goes wrong there once training has begun is warned of and never stops
it. Packages for a protocol (s3fs, gcsfs, …) and credentials are the user's: the latter from the environment alone, never from a
URL, which would end up in logs and records.
"""

import posixpath
import shutil
import threading
import uuid
from collections.abc import Container
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

import fsspec
from fsspec.implementations.dirfs import DirFileSystem

from clap_ds.config.files import MOST_BYTES
from clap_ds.config.sections import CheckpointSettings
from clap_ds.ranks.agreement import on_first
from clap_ds.ranks.limits import within
from clap_ds.weights import checkpoint_files as files
from clap_ds.weights.checkpoint_files import MANIFEST, DamagedError, Manifest, warn

WAITS_S = (2, 4, 8, 16, 32, 0)
"""After each attempt that failed, beyond those that file systems' packages make by themselves."""
TRY_S = 30.0
"""Longest that a target may take for a first file, before training."""


def try_target(url: str | None) -> None:
    """Write a small file there on rank 0 and delete it; ValueError where that isn't possible, or takes longer than `TRY_S`.
    Nothing where there is no target. A collective."""
    if url is not None:
        on_first(lambda: _try_target(url))


def _try_target(url: str) -> None:
    try:
        within(TRY_S, lambda: RemoteFolder(url).try_writing())
    except Exception as error:  # of whatever type the file system's package has
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(
            f"clap.checkpoint.sync_to: {url} can't be written ({reason}); credentials come from the environment. Name a place"
            " that can be written, or leave sync_to out"
        ) from error


class RemoteFolder:
    """A folder of checkpoints on any file system of fsspec's. Every method raises what that raises, of whatever type."""

    def __init__(self, url: str) -> None:
        self.url = url
        fs, root = fsspec.url_to_fs(url)
        self._fs = DirFileSystem(root.rstrip("/"), fs)

    def read_all(self, damaged: dict[str, str] | None = None) -> dict[str, Manifest]:
        """Manifests, the newest first, by name; `damaged` gets why others can't be read."""

        def read(name: str) -> Manifest:
            self._check(f"{name}/{MANIFEST}", range(MOST_BYTES))
            return Manifest.from_json(self._fs.cat_file(f"{name}/{MANIFEST}"), f"{self.url}/{name}")

        return files.newest_first(self._names(), read, {} if damaged is None else damaged)

    def upload(self, checkpoint: Path) -> None:
        """Copy a checkpoint there, unless it is there already; by another name where another run has one of that."""
        manifest, damaged = Manifest.read(checkpoint), dict[str, str]()
        there = self.read_all(damaged)
        if manifest in there.values():
            return
        begun = _begun_by(manifest.run)
        own = {name for name, other in there.items() if other.run == manifest.run}
        free = {name for name in self._names() if name in own or self._fs.exists(f"{name}/{begun}")}
        to = files.free_name(manifest.step, {*self._names()} - free)
        self.delete(to)
        self._write(f"{to}/{begun}", b"")
        for name, record in manifest.files.items():
            target = f"{to}/{name}"
            self._fs.makedirs(posixpath.dirname(target), exist_ok=True)
            self._fs.put_file(str(checkpoint / name), target)
            size = self._fs.info(target)["size"]
            if size != record.bytes:
                raise OSError(f"{self.url}: {name} arrived with {size} of {record.bytes} bytes")
        self._write(f"{to}/{MANIFEST}", manifest.to_json().encode())
        self._fs.rm_file(f"{to}/{begun}")

    def try_writing(self) -> None:
        """Write a small file and delete it."""
        name = f".probe-{uuid.uuid4().hex}"
        self._write(name, b"clap")
        self._fs.rm_file(name)

    def delete(self, name: str) -> None:
        """Delete a checkpoint, if it is there, its manifest first, so that it is none from then on."""
        self._fs.invalidate_cache()
        for path in (f"{name}/{MANIFEST}", name):
            if self._fs.exists(path):
                self._fs.rm(path, recursive=True)

    def rotate(self, rule: CheckpointSettings, run: str) -> None:
        """Delete a run's superfluous checkpoints, and what uploads of its that broke off left behind."""
        there = self.read_all()
        own = {name: manifest for name, manifest in there.items() if manifest.run == run}
        others = (name for name in self._names() if name not in there)
        broken_off = [name for name in others if self._fs.exists(f"{name}/{_begun_by(run)}")]
        for name in [*files.superfluous(own, rule), *broken_off]:
            self.delete(name)

    def download_newest(self, folder: Path, damaged: dict[str, str]) -> Path | None:
        """Bring the newest good checkpoint into a local folder; None if there is none. `damaged` gets why others, by name, were
        passed over, of which one that is found warns."""
        for name, manifest in self.read_all(damaged).items():
            partial = files.begin(folder, manifest.step)
            try:
                for file, record in manifest.files.items():
                    self._check(f"{name}/{file}", [record.bytes])
                    (partial / file).parent.mkdir(exist_ok=True)
                    self._fs.get_file(f"{name}/{file}", str(partial / file))
                found = files.publish(partial, manifest)
                files.warn_of(damaged)
                return found
            except (DamagedError, FileNotFoundError) as error:
                damaged[name] = f"{self.url}/{name}: {error}"
            finally:
                shutil.rmtree(partial, ignore_errors=True)
        return None

    def _check(self, path: str, sizes: Container[int]) -> None:
        """DamagedError for what isn't a file of one of these sizes, and might have no end; FileNotFoundError: nothing there."""
        info = self._fs.info(path)
        if info["type"] != "file" or not (info["size"] is None or info["size"] in sizes):
            raise DamagedError(f"{self.url}/{path}: not a file of the expected size")

    def _write(self, path: str, content: bytes) -> None:
        self._fs.makedirs(posixpath.dirname(path), exist_ok=True)
        self._fs.pipe_file(path, content)

    def _names(self) -> list[str]:
        """Of what can be a checkpoint, even half of one."""
        self._fs.invalidate_cache()
        if not self._fs.exists(""):
            return []
        names = (posixpath.basename(path.rstrip("/")) for path in self._fs.ls("", detail=False))
        return sorted(filter(files.NAME.fullmatch, names))


def _begun_by(run: str) -> str:
    """Name of an empty file that is there while a run copies a checkpoint."""
    return f"uploading-{run}"


class BackgroundSync:
    """Copies finished checkpoints to a URL from a thread, one after the other; copies are rotated by `rule`, as locally. A run
    ends without waiting for threads."""

    def __init__(self, url: str, rule: CheckpointSettings) -> None:
        self._url, self._rule = url, rule
        self._copies: dict[Path, Future[bool]] = {}
        self._thread = ThreadPoolExecutor(1, "checkpoint sync")
        self._closed = threading.Event()

    def submit(self, checkpoint: Path) -> None:
        """Copy this checkpoint when its turn comes. If it has been rotated away by then, it is left out."""
        self._copies[checkpoint] = self._thread.submit(self._copy, checkpoint)

    def is_copying(self, checkpoint: Path) -> bool:
        """Whether it is being read at this moment."""
        return checkpoint in self._copies and self._copies[checkpoint].running()

    def close(self, limit_s: float) -> list[Path]:
        """Wait for what is under way, say what isn't there, and give back those checkpoints."""
        pending = [path.name for path, copy in self._copies.items() if not copy.done()]
        if pending:
            print(f"copying {', '.join(pending)} to {self._url}, for {limit_s:,.0f} s at most", flush=True)
        wait(self._copies.values(), limit_s)
        left = [path for path, copy in self._copies.items() if not (copy.done() and copy.result())]
        self._closed.set()
        self._thread.shutdown(wait=False, cancel_futures=True)
        if left:
            names = ", ".join(map(str, left))
            warn(f"not copied to {self._url}: {names}. To copy a folder by hand, its {MANIFEST} comes last")
        return left

    def _copy(self, checkpoint: Path) -> bool:
        """Whether it is there, or needn't be."""
        for wait_s in WAITS_S:
            try:
                if checkpoint.exists():
                    remote = RemoteFolder(self._url)
                    remote.upload(checkpoint)
                    remote.rotate(self._rule, Manifest.read(checkpoint).run)
                return True
            except Exception as error:  # of whatever type the file system's package has
                next_step = f"next attempt in {wait_s:g} s" if wait_s else "given up; training goes on"
                warn(f"copying {checkpoint.name} to {self._url} failed ({type(error).__name__}: {error}); {next_step}")
            if self._closed.wait(wait_s):
                break
        return False
