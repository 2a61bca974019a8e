"""Copy shards to a disk of the host when they are first read, for `clap.data.stage_to`.

All ranks of a host, and their workers, share one copy of each shard. Copies are named by the
source's path, size and time of change, so a changed shard is copied again. They are never deleted
here: SLURM or the user removes the folder.
"""

import fcntl
import os
import re
import shutil
import sys
from pathlib import Path
from typing import TextIO

from clap_ds.data.remote_files import NO_SPACE
from clap_ds.data.shard_io import OpenFile, open_copy, open_shard
from clap_ds.distributed.hostfile import this_host
from clap_ds.utils.errors import printable
from clap_ds.utils.paths import make_private

FIELD = "clap.data.stage_to"
# of the disk, which copies leave free for others
FREE_FRACTION = 0.01


class StagingFolder:
    """A folder of copies on this host's disk. A full disk is no error: shards without a copy are
    read from their source."""

    def __init__(self, stage_to: str) -> None:
        """Create the folder. Raises ValueError if a variable isn't set on this host, or if the
        folder can't be written."""
        where = f"{FIELD}: {stage_to!r} on {this_host()}"
        path = os.path.expanduser(os.path.expandvars(stage_to))
        if unset := re.search(r"\$(\w+|\{[^}]*\})", path):
            raise ValueError(
                f"{where}: {unset[0]} isn't set; name a folder on the host's disk, or set "
                "it for all ranks"
            )
        if not os.path.isabs(path):
            raise ValueError(f"{where}: expected an absolute path, found {path!r}")
        # Others may share the disk, as in /tmp.
        self.folder = Path(path) / f"clap_ds-shards-{os.geteuid()}"
        self._copies = self.folder / "shards"
        self._locks = self.folder / "locks"
        try:
            for folder in (self.folder, self._copies, self._locks):
                make_private(folder)
        except OSError as error:
            folder_name = error.filename or path
            raise ValueError(f"{where}: {folder_name} can't be written: {error.strerror}") from None
        self._has_quota_left = True
        self._warning_lock: TextIO | None = None

    def free_bytes(self) -> float:
        """Return how many bytes may still be copied."""
        disk = shutil.disk_usage(self.folder)
        return max(0.0, disk.free - FREE_FRACTION * disk.total)

    def check_room(self, needed_bytes: float) -> None:
        """Warn if the shards that this host's ranks read need more room than there is, copies of
        earlier runs included."""
        copied_bytes = sum(copy.stat().st_size for copy in self._copies.glob("*.tar"))
        room_bytes = self.free_bytes() + copied_bytes
        if needed_bytes > room_bytes:
            self._warn(
                f"shards need {needed_bytes / 1e9:,.3f} GB, and there is room for "
                f"{room_bytes / 1e9:,.3f} GB"
            )

    def open(self, shard: str, cache_bytes: float) -> OpenFile:
        """Open a shard's copy, copying the shard if it is new, or the shard itself if that fails.
        Raises OSError."""
        try:
            return open_copy(shard, self._copies, self._locks, self._limit)
        # any error of the file system package
        except Exception as error:
            file = open_shard(shard, cache_bytes)
            # Of a quota nothing tells how much is left: don't copy until it ends again for each
            # shard.
            if getattr(error, "errno", None) in NO_SPACE:
                self._has_quota_left = False
            self._warn(f"{shard} can't be copied: {error}")
            return file

    def _limit(self, size: int | None) -> float:
        return self.free_bytes() if self._has_quota_left else -1

    def _warn(self, problem: str) -> None:
        """Print a problem, unless a process of this host already printed one: it holds the lock
        until it ends."""
        if self._warning_lock is not None:
            return
        try:
            # Opened here, because a file that forked workers share has one lock for all of them.
            self._warning_lock = (self._locks / "warning").open("w")
            fcntl.flock(self._warning_lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return
        text = (
            f"{FIELD}: {this_host()}: {self.folder}: {problem}. Shards without a copy are "
            "read from their source"
        )
        print(f"warning: {printable(text)}", file=sys.stderr, flush=True)
