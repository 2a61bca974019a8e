"""A checkpoint as files on a disk: nothing that looks whole is half there, and nothing damaged is taken for good.

A checkpoint is a folder `step-<number>` with a manifest of the size and hash of every file. It is put together under a hidden
name, read back from the disk, and renamed; what is deleted is renamed first. So a kill at any moment leaves each checkpoint
whole or not there. What the files mean is left to `checkpoint` and `engine_state`. Imports neither torch nor DeepSpeed.
"""

from __future__ import annotations

import errno
import hashlib
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from clap_ds.weights.manifest import MANIFEST, DamagedError, FileRecord, Manifest

WEIGHTS = "weights.safetensors"
TOKENIZER = "tokenizer"
PROBE = ".probe."
"""Start of the names of files that only try the disk."""
_NAME = re.compile(r"step-\d{8,}(-\d+)?")
_HIDDEN = re.compile(r"\.(step-\d{8,}(-\d+)?)\.(partial|deleted)")


class HashedFile:
    """A new file that is hashed as it is written.

    An error of the disk doesn't interrupt the writer, whose C++ code could not be left half-way: what follows is dropped and
    `close` raises it.
    """

    def __init__(self, path: Path) -> None:
        self._hash = hashlib.blake2b(digest_size=16)
        self._hashing = ThreadPoolExecutor(1)  # while the disk is being written to
        self._bytes = 0
        self._error: OSError | None = None
        self._file = path.open("wb")

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        hashed = self._hashing.submit(self._hash.update, view)
        if self._error is None:
            try:
                self._file.write(view)
            except OSError as error:
                self._error = error
        hashed.result()
        self._bytes += len(view)
        return len(view)

    def flush(self) -> None:
        """Part of what writers expect of a file; `close` is what counts."""

    def close(self) -> FileRecord:
        """The file is on the disk.

        Raises:
            OSError: it isn't: the disk is full, a quota reached, a device failing.
        """
        self._hashing.shutdown()
        try:
            if self._error is None:
                self._file.flush()
                os.fsync(self._file.fileno())
        except OSError as error:
            self._error = error
        try:
            self._file.close()
        except OSError as error:
            self._error = self._error or error
        if self._error is not None:
            raise self._error
        return FileRecord(self._bytes, self._hash.hexdigest())


def write_file(path: Path, content: bytes) -> FileRecord:
    """A file that is on the disk when this returns.

    Raises:
        OSError: it can't be.
    """
    file = HashedFile(path)
    file.write(content)
    return file.close()


def checkpoint_name(step: int, folder: Path) -> str:
    """A free name for a checkpoint of this step."""
    name, number = f"step-{step:08d}", 1
    while (folder / (name if number == 1 else f"{name}-{number}")).exists():
        number += 1
    return name if number == 1 else f"{name}-{number}"


def partial_of(folder: Path, name: str) -> Path:
    """Where a checkpoint is put together before it has its name."""
    return folder / f".{name}.partial"


def publish(partial: Path, manifest: Manifest) -> Path:
    """Write the manifest, read everything back from the disk, and give the checkpoint its name.

    Raises:
        OSError: the disk is full or failing.
        DamagedError: what was read back isn't what was written.
    """
    write_file(partial / MANIFEST, manifest.to_json().encode())
    for folder in sorted({partial, *(partial / file for file in map(os.path.dirname, manifest.files))}):
        _sync_folder(folder)
    verify(partial)
    final = partial.with_name(partial.name.removeprefix(".").removesuffix(".partial"))
    partial.rename(final)
    _sync_folder(final.parent)
    return final


def verify(folder: Path) -> Manifest:
    """Compare every file of a checkpoint, as it is on the disk, with the manifest.

    Raises:
        DamagedError: says which file is missing, cut short or changed.
    """
    manifest = Manifest.read(folder)
    for name, record in manifest.files.items():
        try:
            size = (folder / name).stat().st_size
            if size != record.bytes:
                raise DamagedError(f"{folder}: {name} has {size:,} bytes, {record.bytes:,} were written")
            if hash_file(folder / name) != record.hash:
                raise DamagedError(f"{folder}: {name} has changed since it was written (its hash differs)")
        except OSError as error:
            raise DamagedError(f"{folder}: {name}: {error.strerror}") from error
    return manifest


def hash_file(path: Path) -> str:
    """BLAKE2b-128 of a file, read from the disk rather than from memory where the system allows it."""
    with path.open("rb") as file:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def remove(folder: Path) -> None:
    """Delete a checkpoint so that no half of it is ever taken for one.

    Raises:
        OSError: it can't be deleted.
    """
    doomed = folder.with_name(f".{folder.name}.deleted")
    shutil.rmtree(doomed, ignore_errors=True)
    folder.rename(doomed)
    shutil.rmtree(doomed)


def clear_leftovers(folder: Path) -> None:
    """Delete what a killed process left half-written or half-deleted."""
    for path in folder.iterdir():
        if _HIDDEN.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)
        elif path.name.startswith(PROBE):
            path.unlink(missing_ok=True)


def is_name(name: str) -> bool:
    """Whether a folder of this name can be a checkpoint."""
    return _NAME.fullmatch(name) is not None


def read_all(folder: Path) -> tuple[dict[str, Manifest], list[str]]:
    """Manifests by name, and what is wrong with checkpoints that have none that can be read."""
    manifests, problems = {}, []
    names = sorted(path.name for path in folder.iterdir() if is_name(path.name)) if folder.is_dir() else []
    for name in names:
        try:
            manifests[name] = Manifest.read(folder / name)
        except DamagedError as error:
            problems.append(str(error))
    return manifests, problems


def newest_first(manifests: Mapping[str, Manifest]) -> list[str]:
    return sorted(manifests, key=lambda name: manifests[name].serial, reverse=True)


def newest_good(folder: Path, warn: Callable[[str], None]) -> Path | None:
    """The newest checkpoint of a folder that is all there; those passed over are warned of with the reason."""
    manifests, problems = read_all(folder)
    for problem in problems:
        warn(f"passed over: {problem}")
    for name in newest_first(manifests):
        try:
            verify(folder / name)
        except DamagedError as error:
            warn(f"passed over: {error}")
            continue
        return folder / name
    return None


def find_checkpoint(path: Path, warn: Callable[[str], None]) -> Path:
    """`path` itself if it is a checkpoint, or the newest good one in it; checked.

    Raises:
        DamagedError: neither, or damaged; says why.
    """
    if (path / MANIFEST).exists():
        verify(path)
        return path
    found = newest_good(path, warn)
    if found is None:
        raise DamagedError(f"{path}: no good checkpoint here: no {MANIFEST}, no folder step-… with one")
    return found


def superfluous(manifests: Mapping[str, Manifest], *, keep_last: int, keep_best: int, best_by: str) -> list[str]:
    """Names to delete: neither of the last `keep_last` nor of the best `keep_best` (larger is better; the newer of equals)."""
    order = newest_first(manifests)
    scores = {name: manifests[name].metrics.get(best_by, math.nan) for name in order}
    scored = sorted((name for name in order if not math.isnan(scores[name])), key=lambda name: -scores[name])
    kept = {*order[:keep_last], *scored[:keep_best]}
    return [name for name in reversed(order) if name not in kept]


def next_serial(manifests: Iterable[Manifest]) -> int:
    """Serial of a checkpoint saved now, beside these."""
    return max([int(time.time() * 1000), *(manifest.serial + 1 for manifest in manifests)])


def _sync_folder(folder: Path) -> None:
    """Bring a folder's list of names to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems can't, and needn't
            raise
    finally:
        os.close(descriptor)
