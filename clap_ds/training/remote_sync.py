"""Copy checkpoints in the background to a folder or URL that fsspec can write.

The manifest is uploaded last, so an interrupted upload is never taken for a checkpoint. Failures cause warnings and never stop
training. Credentials come from the environment, because URLs are logged.
"""

import math
import os
import posixpath
import time
from collections.abc import Container, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path

import fsspec
from fsspec.implementations.dirfs import DirFileSystem

from clap_ds.config.files import MOST_BYTES
from clap_ds.config.schema import CheckpointSettings
from clap_ds.training.train_state import HISTORY
from clap_ds.weights import checkpoint_files as files
from clap_ds.weights.checkpoint_files import MANIFEST, DamagedError, Manifest, warn


def try_target(url: str) -> None:
    """Write and delete a small file at `url`; ValueError if that fails."""
    try:
        fs = RemoteFolder(url).fs
        fs.makedirs("", exist_ok=True)
        fs.pipe_file(name := f".probe-{os.urandom(8).hex()}", b"clap")
        fs.rm_file(name)
    except Exception as error:  # its type depends on the file system's package
        problem = f"{url} can't be written ({type(error).__name__}: {error}); set credentials in the environment"
        raise ValueError(f"clap.checkpoint.remote_sync: {problem}") from error


class RemoteFolder:
    """A folder of checkpoints on an fsspec file system. Methods raise whatever errors that file system raises."""

    def __init__(self, url: str) -> None:
        """Open the folder at a URL, or of the single checkpoint there."""
        folder, _, name = url.rstrip("/").rpartition("/")
        self._only = name if files.NAME.fullmatch(name) else None
        self.url = folder if self._only else url
        fs, root = fsspec.url_to_fs(self.url)
        self.fs = DirFileSystem(root.rstrip("/"), fs)

    def read_all(self, damaged: dict[str, str] | None = None) -> dict[str, Manifest]:
        """Return the manifests by name, newest first; `damaged` receives why others can't be read."""

        def read(name: str) -> Manifest:
            self._check_file(f"{name}/{MANIFEST}", range(MOST_BYTES))
            return Manifest.from_json(self.fs.cat_file(f"{name}/{MANIFEST}"), f"{self.url}/{name}")

        return files.newest_first(self._names(), read, {} if damaged is None else damaged)

    def upload(self, checkpoint: Path, rule: CheckpointSettings) -> None:
        """Upload a checkpoint, and delete its run's superfluous ones by `rule` and interrupted uploads."""
        manifest, there = Manifest.read(checkpoint), self.read_all()
        for name in self._names():
            if not self.fs.exists(f"{name}/{MANIFEST}"):
                self.fs.rm(name, recursive=True)
        if manifest not in there.values():
            to = files.free_name(manifest.step, self._names(links=True))
            self.fs.makedirs(to, exist_ok=False)  # a folder of others may contain links
            for file in (*manifest.files, MANIFEST):
                self.fs.makedirs(posixpath.dirname(f"{to}/{file}"), exist_ok=True)
                self.fs.put_file(str(checkpoint / file), f"{to}/{file}")
            there = {to: manifest, **there}
        own = {name: other for name, other in there.items() if other.run == manifest.run}
        for name in files.superfluous(own, rule):
            self.fs.rm(f"{name}/{MANIFEST}")  # from now on it is no checkpoint
            self.fs.rm(name, recursive=True)

    def upload_logs(self, sources: Iterable[Path]) -> None:
        """Upload files, and folders with all their regular files, under their names."""
        for source in sources:
            for path in [source, *source.rglob("*")]:
                if path.is_file() and not path.is_symlink():
                    name = str(path.relative_to(source.parent))
                    self.fs.makedirs(posixpath.dirname(name), exist_ok=True)
                    self.fs.put_file(str(path), name)

    def download_newest(self, folder: Path, damaged: dict[str, str]) -> Path | None:
        """Download the newest good checkpoint into a local folder unless it is there, and return it or None. `damaged` receives
        by name why others aren't good; if one is, they are warned about."""
        here = {manifest.serial: folder / name for name, manifest in files.read_all(folder).items()}
        for name, manifest in self.read_all(damaged).items():
            if self._only not in (None, name):
                continue
            with suppress(DamagedError):
                if manifest.serial in here and files.verify(here[manifest.serial]):
                    return here[manifest.serial]
            try:
                with files.begin(folder, manifest.step) as draft:
                    files.write_file(draft / MANIFEST, manifest.to_json().encode())
                    for file, record in manifest.files.items():
                        self._check_file(f"{name}/{file}", (record.bytes,))
                        (draft / file).parent.mkdir(exist_ok=True)
                        self.fs.get_file(f"{name}/{file}", str(draft / file))
                    files.verify(draft)
            except (DamagedError, FileNotFoundError) as error:
                damaged[name] = f"{self.url}/{name}: {str(error).removeprefix(f'{draft}: ')}"
            else:
                files.warn_of(damaged)
                if self.fs.isfile(HISTORY) and not (folder / HISTORY).exists():
                    self.fs.get_file(HISTORY, str(folder / HISTORY))
                return folder / draft.name
        return None

    def _check_file(self, path: str, sizes: Container[int]) -> None:
        """Raise DamagedError unless this is a regular file of one of these sizes."""
        info = self.fs.info(path)
        if info["type"] != "file" or (info["size"] is not None and info["size"] not in sizes):
            raise DamagedError(f"{self.url}/{path}: not a regular file of the size that was written")

    def _names(self, *, links: bool = False) -> list[str]:
        """Return names of complete and partial checkpoints, by default without links."""
        self.fs.invalidate_cache()
        if not self.fs.exists(""):
            return []
        kept = [each for each in self.fs.ls("") if links or not (each.get("islink") or each["type"] == "link")]
        return sorted(filter(files.NAME.fullmatch, (posixpath.basename(each["name"].rstrip("/")) for each in kept)))


class BackgroundSync:
    """Copies finished checkpoints and logs to a URL, one at a time, in a thread that does not keep the process alive.

    Args:
        folder: the checkpoints' folder, which also has logs.
        logs: another folder of logs.
    """

    def __init__(self, url: str, rule: CheckpointSettings, folder: Path, logs: Path | None = None) -> None:
        self._url, self._rule = url, rule
        self._logs = [folder / HISTORY, folder / "tensorboard", *([logs] if logs else [])]
        self._last: Path | None = None
        self._copied_s = -math.inf
        self._copies: dict[Path, Future[bool]] = {}
        self._thread = ThreadPoolExecutor(1, "checkpoint sync")

    def submit(self, checkpoint: Path) -> None:
        """Queue this checkpoint for copying unless one was less than `remote_sync_every_minutes` ago. It is skipped if it has
        been deleted by then."""
        self._last = checkpoint
        if time.monotonic() - self._copied_s >= 60 * self._rule.remote_sync_every_minutes:
            self._copied_s = time.monotonic()
            self._copies[checkpoint] = self._thread.submit(self._copy, checkpoint)

    def is_copying(self, checkpoint: Path) -> bool:
        """Return whether it is being read now."""
        return checkpoint in self._copies and self._copies[checkpoint].running()

    def close(self, limit_s: float) -> list[Path]:
        """Copy the last checkpoint, wait for pending copies, warn about checkpoints that were not copied, and return them."""
        if self._last is not None and self._last not in self._copies:
            self._copies[self._last] = self._thread.submit(self._copy, self._last)
        if any(not copy.done() for copy in self._copies.values()):
            print(f"copying checkpoints to {self._url}, for at most {limit_s:,.0f} s", flush=True)
        wait(self._copies.values(), limit_s)
        left = [path for path, copy in self._copies.items() if path.exists() and not (copy.done() and copy.result())]
        self._thread.shutdown(wait=False, cancel_futures=True)
        if left:
            paths = ", ".join(map(str, left))
            warn(f"not copied to {self._url}: {paths}. If you copy a folder by hand, copy its {MANIFEST} last")
        return left

    def _copy(self, checkpoint: Path) -> bool:
        """Return whether the checkpoint was copied or no longer exists."""
        try:
            if checkpoint.exists():
                RemoteFolder(self._url).upload(checkpoint, self._rule)
            RemoteFolder(self._url).upload_logs(self._logs)
        except Exception as error:  # its type depends on the file system's package
            problem = f"{type(error).__name__}: {error}"
            warn(f"copying {checkpoint.name} to {self._url} failed ({problem}); training continues")
            return False
        return True
