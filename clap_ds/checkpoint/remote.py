"""Copy checkpoints in the background to a folder or URL that fsspec can write, and checkpoints and
other weights from URLs.

The manifest is uploaded last, so an interrupted upload is never taken for a checkpoint. Until then,
a marker file names the run whose upload it is. Complete uploads aren't moved, because object stores
would copy every byte. Failures cause warnings and never stop training. Credentials come from the
environment, because URLs are logged.
"""

import fnmatch
import hashlib
import math
import os
import sys
import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any

from clap_ds.checkpoint import checkpoint_files as files
from clap_ds.checkpoint.checkpoint_files import MANIFEST, CheckpointFolder, DamagedError, Manifest
from clap_ds.checkpoint.train_state import HISTORY
from clap_ds.config.schema import CheckpointSettings
from clap_ds.config.urls import LOCAL, check_url, is_remote, last_part
from clap_ds.data.remote_files import RemoteFiles
from clap_ds.data.shard_io import hold_lock
from clap_ds.utils.errors import printable, warn, warn_once
from clap_ds.utils.files import MOST_BYTES, RefusedFileError, create_folder_atomically
from clap_ds.utils.paths import cache_folder
from clap_ds.weights.open_clip_weights import WEIGHTS as OPEN_CLIP_WEIGHTS

# Suffix of the file that marks a run's upload or deletion under way. Before it stands a hash of the
# run's id.
PARTIAL = ".partial"
MOST_HISTORY_BYTES = 2**30
# Suffixes of files of weights.
WEIGHT_FILES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt")
# What is downloaded of a model's folder, on the Hub and elsewhere.
FILES_OF_A_MODEL = ["*.json", "*.txt", "model*.safetensors"]


def try_target(url: str) -> None:
    """Write and delete a small file at `url`; ValueError if that fails."""
    try:
        remote = RemoteFiles(url)
        # A name that nothing else has.
        name = f".probe-{os.urandom(8).hex()}"
        remote.write(name, b"clap")
        remote.remove(name)
    # Its type depends on the file system's package.
    except Exception as error:
        raise ValueError(
            f"clap.checkpoint.remote_sync: {url} can't be written"
            f" ({type(error).__name__}: {error}); set credentials in the environment"
        ) from error


class RemoteFolder:
    """A folder of checkpoints on an fsspec file system. Methods raise whatever errors that file
    system raises."""

    def __init__(self, url: str) -> None:
        """Open the folder at a URL, or of the single checkpoint there."""
        # URLs end in a folder or in `step-…`.
        folder, _, name = url.rstrip("/").rpartition("/")
        self._only = name if files.NAME.fullmatch(name) else None
        self.url = folder if self._only else url
        self._remote = RemoteFiles(self.url)

    def read_all(self, damaged: dict[str, str] | None = None) -> dict[str, Manifest]:
        """Return the manifests by name, newest first; `damaged` receives why others can't be
        read."""

        def read(name: str) -> Manifest:
            content = self._remote.read_start(f"{name}/{MANIFEST}", MOST_BYTES)
            return Manifest.from_json(content, f"{self.url}/{name}")

        return files.newest_first(self._list_names(), read, {} if damaged is None else damaged)

    def upload(self, checkpoint: Path, settings: CheckpointSettings) -> None:
        """Upload a checkpoint. Delete its run's interrupted uploads, and its checkpoints that
        `settings` don't keep."""
        manifest = Manifest.read(checkpoint)
        # The hash makes a file name of the id, which may be a path.
        marker = blake2b(manifest.run.encode(), digest_size=8).hexdigest() + PARTIAL
        self._clear_interrupted(marker)
        manifests = self.read_all()
        # An earlier start of the run may have copied it.
        if manifest not in manifests.values():
            name = self._upload_files(checkpoint, manifest, marker)
            manifests = {name: manifest, **manifests}
        of_run = {name: other for name, other in manifests.items() if other.run == manifest.run}
        for name in files.to_delete(of_run, settings):
            # With the marker, an interrupted deletion is continued.
            self._remote.write(f"{name}/{marker}", b"")
            # Without its manifest it is no checkpoint.
            self._remote.remove(f"{name}/{MANIFEST}")
            self._remote.remove(name, recursive=True)

    def _upload_files(self, checkpoint: Path, manifest: Manifest, marker: str) -> str:
        """Upload a checkpoint's files to a new folder, the manifest last. Return the folder's
        name."""
        name = files.free_name(manifest.step, self._remote.ls())
        self._remote.write(f"{name}/{marker}", b"")
        # Two runs may have chosen the same name at the same time.
        if [*self._remote.ls(name)] != [marker]:
            raise FileExistsError(f"another run has just begun {name}")
        for file in (*manifest.files, MANIFEST):
            self._remote.upload(checkpoint.parent, f"{checkpoint.name}/{file}", f"{name}/{file}")
        self._remote.remove(f"{name}/{marker}")
        return name

    def _clear_interrupted(self, marker: str) -> None:
        """Delete uploads with this marker. Warn of other folders without a manifest, such as other
        runs' uploads under way."""
        for name in self._list_names():
            contents = self._remote.ls(name)
            if MANIFEST in contents:
                continue
            # Several markers are of runs that chose the name at the same time.
            markers = [file for file in contents if file.endswith(PARTIAL)]
            if markers == [marker]:
                self._remote.remove(name, recursive=True)
            else:
                warn_once(
                    f"{self.url}/{name} has no {MANIFEST}: another run's upload, or another"
                    " program's folder. It stays"
                )

    def upload_logs(self, sources: Iterable[Path], uploaded: dict[Path, Any] | None = None) -> None:
        """Upload files, and folders with all their regular files, under their names.

        Warn of links, which aren't followed. Files that have the size and time of change in
        `uploaded` are left out; it receives those of the others.
        """
        uploaded = {} if uploaded is None else uploaded
        for source in sources:
            for path in [source, *source.rglob("*")]:
                if path.is_symlink() or not path.is_file():
                    continue
                # Logs grow, and TensorBoard's old files stay.
                status = path.stat()
                version = (status.st_size, status.st_mtime_ns)
                if uploaded.get(path) == version:
                    continue
                name = str(path.relative_to(source.parent))
                try:
                    self._remote.upload(source.parent, name, name)
                    uploaded[path] = version
                except RefusedFileError as error:
                    warn_once(f"{path} isn't copied to {self.url}: {error}")

    def download_newest(
        self, folder: Path, damaged: dict[str, str], *, best: bool = False
    ) -> Path | None:
        """Download the newest valid checkpoint, or the `best` one by its `best_metric`, into a
        local folder unless it is there.

        Return it or None. `damaged` receives by name why others aren't valid; if one is, they are
        warned about.
        """
        local = {
            manifest.serial: CheckpointFolder(folder / name, manifest)
            for name, manifest in files.read_all(folder).items()
        }
        manifests = self.read_all(damaged)
        names = [*manifests]
        if best and manifests:
            names = files.best_first(manifests, manifests[names[0]].best_metric or "")
        for name in names:
            manifest = manifests[name]
            # The URL may be of a single checkpoint.
            if self._only not in (None, name):
                continue
            if manifest.serial in local:
                # A damaged one is downloaded again.
                with suppress(DamagedError):
                    local[manifest.serial].verify()
                    return local[manifest.serial].path
            try:
                with files.atomic_dir(folder, manifest.step) as draft:
                    self._download_files(name, manifest, draft)
                    CheckpointFolder(draft, manifest).verify()
                    self._download_history(draft / HISTORY, folder / HISTORY)
            except (DamagedError, FileNotFoundError, RefusedFileError) as error:
                # Errors name the draft's hidden path, which is gone.
                damaged[name] = f"{self.url}/{name}: {str(error).removeprefix(f'{draft}: ')}"
            else:
                files.warn_of_damaged(damaged)
                return folder / draft.name
        return None

    def _download_files(self, name: str, manifest: Manifest, draft: Path) -> None:
        files.write_file(draft / MANIFEST, manifest.to_json().encode())
        for file, record in manifest.files.items():
            (draft / file).parent.mkdir(exist_ok=True)
            self._remote.download(f"{name}/{file}", draft / file, record.bytes)

    def _download_history(self, draft: Path, target: Path) -> None:
        """Download the history by way of a private folder, unless it is there; warn if it is a link
        or too large."""
        if target.exists():
            return
        try:
            self._remote.download(HISTORY, draft, MOST_HISTORY_BYTES)
            draft.replace(target)
        except FileNotFoundError:
            # The history wasn't copied.
            pass
        except RefusedFileError as error:
            warn(f"{self.url}/{HISTORY} isn't copied: {error}")

    def _list_names(self) -> list[str]:
        """Return the names of complete and partial checkpoints that aren't links."""
        listing = self._remote.ls()
        return sorted(
            name for name, is_link in listing.items() if files.NAME.fullmatch(name) and not is_link
        )


def find_or_download(folder: Path, url: str | None, remote_sync: str | None) -> Path | None:
    """Return the newest valid checkpoint at a URL or, without one, in a folder or at `remote_sync`.

    Those at URLs are downloaded into the folder. Raises ValueError if a URL can't be read or has
    none, or if all are damaged.
    """
    damaged: dict[str, str] = {}
    if url is None:
        newest = files.latest_valid(folder, damaged)
        if newest is not None:
            return newest.path
    source = url or remote_sync
    damaged_at_source: dict[str, str] = {}
    if source is not None:
        try:
            path = RemoteFolder(source).download_newest(folder, damaged_at_source)
        # Its type depends on the file system's package.
        except Exception as error:
            raise ValueError(f"{source} can't be read ({type(error).__name__}: {error})") from error
        if path is not None:
            return path
    reasons = [*damaged.values(), *damaged_at_source.values()]
    if reasons:
        listed = "".join(f"\n  {reason}" for reason in reasons)
        raise ValueError(
            f"{folder}: all {len(reasons)} checkpoints are damaged; nothing was started or"
            f" deleted:{listed}\n"
            "  Rerun the same command, or pass --restart to move them aside and start from scratch"
        )
    if url is not None:
        raise ValueError(f"{url}: no checkpoint found")
    return None


def find_weights(source: str | Path, *, best: bool = False) -> Path:
    """Return a path, or the path of this host's copy of the weights at a URL.

    These are a file, a model's folder, a checkpoint, or the newest (`best`) complete one of a
    folder of checkpoints. Raises ValueError for a URL that can't be read.
    """
    url = str(source)
    if url.startswith(LOCAL):
        return Path(url.removeprefix(LOCAL))
    if not is_remote(url):
        return Path(source)
    check_url(url)
    folder = cache_folder("weights")
    name = hashlib.sha256(url.encode()).hexdigest()[:32]
    try:
        with hold_lock(folder / f"{name}.lock"):
            return _copy_weights(url, folder / name, best=best)
    except ValueError:
        raise
    # Its type depends on the file system's package.
    except Exception as error:
        raise ValueError(f"{url} can't be read ({type(error).__name__}: {error})") from error


def _copy_weights(url: str, folder: Path, *, best: bool) -> Path:
    """Return the path of the weights at a URL in a local folder of copies."""
    remote = RemoteFiles(url)
    names = [""]
    if Path(last_part(url)).suffix not in WEIGHT_FILES:
        listing = remote.ls()
        if any(name == MANIFEST or files.NAME.fullmatch(name) for name in listing):
            damaged: dict[str, str] = {}
            path = RemoteFolder(url).download_newest(folder, damaged, best=best)
            if path is None:
                raise ValueError(f"{url}: no good checkpoint found: {'; '.join(damaged.values())}")
            return path
        patterns = [*FILES_OF_A_MODEL, OPEN_CLIP_WEIGHTS]
        names = []
        for pattern in patterns:
            names += fnmatch.filter(sorted(listing), pattern)
    if not names:
        raise ValueError(
            f"{url}: no weights there; expected a folder or a file ({', '.join(WEIGHT_FILES)})"
        )
    version = repr([remote.info(name) for name in names])
    path = folder / hashlib.sha256(version.encode()).hexdigest()[:8] / last_part(url)
    if not path.parent.exists():
        print(printable(f"copying {url} to {path}"), file=sys.stderr, flush=True)
        with create_folder_atomically(path.parent) as draft:
            if names != [""]:
                (draft / path.name).mkdir()
            for name in names:
                remote.download(name, draft / path.name / name, math.inf)
    return path


class BackgroundSync:
    """Copies of finished checkpoints and logs to a URL, made one at a time, in a thread that does
    not keep the process alive.

    Args:
        folder: the checkpoints' folder, which also has logs.
        logs: another folder of logs.
    """

    def __init__(
        self, url: str, settings: CheckpointSettings, folder: Path, logs: Path | None = None
    ) -> None:
        self._url = url
        self._settings = settings
        self._logs = [folder / HISTORY, folder / "tensorboard"]
        if logs is not None:
            self._logs.append(logs)
        self._last: Path | None = None
        # Time of the last copy.
        self._copied_s = -math.inf
        self._uploaded_logs: dict[Path, Any] = {}
        self._copies: dict[Path, Future[bool]] = {}
        self._thread = ThreadPoolExecutor(1, "checkpoint sync")

    def submit(self, checkpoint: Path) -> None:
        """Queue this checkpoint for copying unless one was less than `remote_sync_every_minutes`
        ago. It is skipped if it has been deleted by then."""
        self._last = checkpoint
        if time.monotonic() - self._copied_s >= 60 * self._settings.remote_sync_every_minutes:
            self._copied_s = time.monotonic()
            self._queue(checkpoint)

    def _queue(self, checkpoint: Path) -> None:
        self._copies[checkpoint] = self._thread.submit(self._copy, checkpoint)

    def is_copying(self, checkpoint: Path) -> bool:
        """Return whether it is being read now."""
        return checkpoint in self._copies and self._copies[checkpoint].running()

    def close(self, limit_s: float) -> list[Path]:
        """Copy the last checkpoint, wait for pending copies, warn about checkpoints that were not
        copied, and return them."""
        if self._last is not None and self._last not in self._copies:
            self._queue(self._last)
        if not all(copy.done() for copy in self._copies.values()):
            text = f"copying checkpoints to {self._url}, for at most {limit_s:,.0f} s"
            print(printable(text), flush=True)
        wait(self._copies.values(), limit_s)
        # Copies that failed, and those that aren't done.
        missing = []
        for path, copy in self._copies.items():
            is_copied = copy.done() and copy.result()
            # The run has deleted old ones.
            if not is_copied and path.exists():
                missing.append(path)
        self._thread.shutdown(wait=False, cancel_futures=True)
        if missing:
            paths = ", ".join(map(str, missing))
            warn(
                f"not copied to {self._url}: {paths}. If you copy a folder by hand, copy its"
                f" {MANIFEST} last"
            )
        return missing

    def _copy(self, checkpoint: Path) -> bool:
        """Return whether the checkpoint was copied or no longer exists."""
        try:
            remote = RemoteFolder(self._url)
            if checkpoint.exists():
                remote.upload(checkpoint, self._settings)
            remote.upload_logs(self._logs, self._uploaded_logs)
        # Its type depends on the file system's package.
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
            warn(f"copying {checkpoint.name} to {self._url} failed ({problem}); training continues")
            return False
        return True
