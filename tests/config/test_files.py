"""A file is replaced whole or not at all; on a full disk one with room for it is overwritten."""

import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clap_ds.config.files import BLOCK, write_atomically
from tests import needs


def _no_room_for_new_files(monkeypatch: pytest.MonkeyPatch, number: int, *, at: str) -> None:
    """A temporary file can't be opened, or not be brought to the disk; what is there already can."""
    real: Any = {"builtins.open": open, "os.fsync": os.fsync}[at]

    def full(file: Any, *rest: Any, **more: Any) -> Any:
        path = os.readlink(f"/proc/self/fd/{file}") if isinstance(file, int) else str(file)
        if Path(path).name.startswith("."):
            raise OSError(number, os.strerror(number))
        return real(file, *rest, **more)

    monkeypatch.setattr(at, full)


@pytest.mark.parametrize("at", ["builtins.open", "os.fsync"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_on_a_full_disk_what_is_there_is_overwritten_as_far_as_it_has_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, at: str
) -> None:
    roomy, small, long = (tmp_path / name for name in ("roomy", "small", "long"))
    write_atomically(roomy, "old\n", spare=BLOCK)
    assert roomy.read_bytes() == b"old".ljust(BLOCK + 3) + b"\n"
    write_atomically(small, "old\n", spare=BLOCK - 4)  # which its one block has
    assert small.read_bytes() == b"old\n"
    write_atomically(long, "old " * 10 + "\n")
    _no_room_for_new_files(monkeypatch, number, at=at)
    new = "ä" * 3000 + "\n"
    write_atomically(roomy, new, spare=0)
    assert roomy.read_text().split() == ["ä" * 3000]
    assert roomy.stat().st_size == 6001
    write_atomically(small, "newer\n", spare=0)  # the block that it has will do
    assert small.read_text() == "newer\n"
    with pytest.raises(OSError, match=os.strerror(number)):
        write_atomically(small, new, spare=BLOCK)
    assert small.read_text() == "newer\n"
    with pytest.raises(OSError, match=os.strerror(number)):
        write_atomically(long, "new\n")  # whose readers can't do with spaces
    with pytest.raises(OSError, match=os.strerror(number)):
        write_atomically(tmp_path / "none", "new\n", spare=0)
    assert long.read_text() == "old " * 10 + "\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["long", "roomy", "small"]


def test_another_failure_leaves_the_file_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_atomically(tmp_path / "file", "old\n", spare=BLOCK)
    _no_room_for_new_files(monkeypatch, errno.EIO, at="os.fsync")
    with pytest.raises(OSError, match="Input/output error"):
        write_atomically(tmp_path / "file", "new\n", spare=0)
    assert (tmp_path / "file").read_text().strip() == "old"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    needs.root("a file system is mounted")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", tmp_path], check=True)
    yield tmp_path
    subprocess.run(["umount", tmp_path], check=True)


def test_on_a_disk_that_is_full(small_disk: Path) -> None:
    write_atomically(small_disk / "summary", "running\n", spare=BLOCK)
    with pytest.raises(OSError, match="No space left"):
        (small_disk / "checkpoint").write_bytes(bytes(2**17))
    with pytest.raises(OSError, match="No space left"):
        write_atomically(small_disk / "other", "text\n")
    write_atomically(small_disk / "summary", "completed " * 700 + "\n", spare=0)
    assert (small_disk / "summary").read_text().split() == ["completed"] * 700
    assert sorted(path.name for path in small_disk.iterdir()) == ["checkpoint", "summary"]
