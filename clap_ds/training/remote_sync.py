"""Copies of checkpoints in another place, made while training goes on: any folder or URL that fsspec writes to, for one run.

Files go first and the manifest last, so that an upload that breaks off is never taken for a checkpoint. Failures are warned of
and never stop training. Credentials come from the environment, never from a URL, which would be logged.
"""

import os
import posixpath
from collections.abc import Container
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

import fsspec
from fsspec.implementations.dirfs import DirFileSystem

from clap_ds.config.files import MOST_BYTES
from clap_ds.config.schema import CheckpointSettings
from clap_ds.distributed.collectives import on_first
from clap_ds.weights import checkpoint_files as files
from clap_ds.weights.checkpoint_files import MANIFEST, DamagedError, Manifest, warn


def try_target(url: str | None) -> None:
    """Write a small file there on rank 0 and delete it; ValueError where that isn't possible. A collective."""

    def write(url: str) -> None:
        try:
            RemoteFolder(url).try_writing()
        except Exception as error:  # of whatever type the file system's package has
            problem = f"{url} can't be written ({type(error).__name__}: {error}); credentials come from the environment"
            raise ValueError(f"clap.checkpoint.remote_sync: {problem}") from error

    if url is not None:
        on_first(lambda: write(url))


class RemoteFolder:
    """A folder of checkpoints on any file system of fsspec's. Every method raises what that raises, of whatever type."""

    def __init__(self, url: str) -> None:
        self.url = url
        fs, root = fsspec.url_to_fs(url)
        self._fs = DirFileSystem(root.rstrip("/"), fs)

    def read_all(self, damaged: dict[str, str] | None = None) -> dict[str, Manifest]:
        """`clap_ds.weights.checkpoint_files.newest_first` of the folder."""

        def read(name: str) -> Manifest:
            self._check_file(f"{name}/{MANIFEST}", range(MOST_BYTES))
            return Manifest.from_json(self._fs.cat_file(f"{name}/{MANIFEST}"), f"{self.url}/{name}")

        return files.newest_first(self._names(), read, {} if damaged is None else damaged)

    def upload(self, checkpoint: Path, rule: CheckpointSettings) -> None:
        """Copy a checkpoint there and delete what its run has too many by `rule`, and uploads that broke off."""
        manifest, there = Manifest.read(checkpoint), self.read_all()
        for name in self._names():
            if not self._fs.exists(f"{name}/{MANIFEST}"):
                self._fs.rm(name, recursive=True)
        if manifest not in there.values():
            to = files.free_name(manifest.step, self._names(links=True))
            self._fs.makedirs(to, exist_ok=False)  # nobody else's, with links in it
            for file in (*manifest.files, MANIFEST):
                self._fs.makedirs(posixpath.dirname(f"{to}/{file}"), exist_ok=True)
                self._fs.put_file(str(checkpoint / file), f"{to}/{file}")
            there = {to: manifest, **there}
        own = {name: other for name, other in there.items() if other.run == manifest.run}
        for name in files.superfluous(own, rule):
            self._fs.rm(f"{name}/{MANIFEST}")  # so that it is none from then on
            self._fs.rm(name, recursive=True)

    def try_writing(self) -> None:
        """Write a small file and delete it."""
        self._fs.makedirs("", exist_ok=True)
        self._fs.pipe_file(name := f".probe-{os.urandom(8).hex()}", b"clap")
        self._fs.rm_file(name)

    def download_newest(self, folder: Path, damaged: dict[str, str]) -> Path | None:
        """Bring the newest good checkpoint into a local folder; None if there is none. `damaged` gets why others, by name,
        aren't; they are warned of where there is one."""
        for name, manifest in self.read_all(damaged).items():
            try:
                with files.begin(folder, manifest.step) as draft:
                    files.write_file(draft / MANIFEST, manifest.to_json().encode())
                    for file, record in manifest.files.items():
                        self._check_file(f"{name}/{file}", (record.bytes,))
                        (draft / file).parent.mkdir(exist_ok=True)
                        self._fs.get_file(f"{name}/{file}", str(draft / file))
                    files.verify(draft)
            except (DamagedError, FileNotFoundError) as error:
                damaged[name] = f"{self.url}/{name}: {str(error).removeprefix(f'{draft}: ')}"
            else:
                files.warn_of(damaged)
                return folder / draft.name
        return None

    def _check_file(self, path: str, sizes: Container[int]) -> None:
        """Raise DamagedError for what can't be read to an end, such as a pipe, or is of another size."""
        info = self._fs.info(path)
        if info["type"] != "file" or (info["size"] is not None and info["size"] not in sizes):
            raise DamagedError(f"{self.url}/{path}: no file, or of another size than was written")

    def _names(self, *, links: bool = False) -> list[str]:
        """Of what can be a checkpoint, even half of one; by default without links, which lead elsewhere."""
        self._fs.invalidate_cache()
        if not self._fs.exists(""):
            return []
        kept = [each for each in self._fs.ls("") if links or not (each.get("islink") or each["type"] == "link")]
        return sorted(filter(files.NAME.fullmatch, (posixpath.basename(each["name"].rstrip("/")) for each in kept)))


class BackgroundSync:
    """Copies finished checkpoints to a URL from a thread, one after the other. A run ends without waiting for threads."""

    def __init__(self, url: str, rule: CheckpointSettings) -> None:
        self._url, self._rule = url, rule
        self._copies: dict[Path, Future[bool]] = {}
        self._thread = ThreadPoolExecutor(1, "checkpoint sync")

    def submit(self, checkpoint: Path) -> None:
        """Copy this checkpoint when its turn comes. If it has been rotated away by then, it is left out."""
        self._copies[checkpoint] = self._thread.submit(self._copy, checkpoint)

    def is_copying(self, checkpoint: Path) -> bool:
        """Whether it is being read at this moment."""
        return checkpoint in self._copies and self._copies[checkpoint].running()

    def close(self, limit_s: float) -> list[Path]:
        """Wait for what is under way, say what isn't there, and give back those checkpoints."""
        if any(not copy.done() for copy in self._copies.values()):
            print(f"copying checkpoints to {self._url}, for {limit_s:,.0f} s at most", flush=True)
        wait(self._copies.values(), limit_s)
        left = [path for path, copy in self._copies.items() if path.exists() and not (copy.done() and copy.result())]
        self._thread.shutdown(wait=False, cancel_futures=True)
        if left:
            paths = ", ".join(map(str, left))
            warn(f"not copied to {self._url}: {paths}. To copy a folder by hand, its {MANIFEST} comes last")
        return left

    def _copy(self, checkpoint: Path) -> bool:
        """Whether it is there, or needn't be."""
        try:
            if checkpoint.exists():
                RemoteFolder(self._url).upload(checkpoint, self._rule)
        except Exception as error:  # of whatever type the file system's package has
            problem = f"{type(error).__name__}: {error}"
            warn(f"copying {checkpoint.name} to {self._url} failed ({problem}); training goes on")
            return False
        return True
