"""Files are replaced in one go, and what a run's end adds to its record has room on a full disk."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from clap_ds.config.files import write_atomically


@pytest.mark.parametrize(("number", "at"), [(errno.ENOSPC, "builtins.open"), (errno.EDQUOT, "os.fsync")])
def test_on_a_full_disk_what_is_there_is_overwritten_as_far_as_it_has_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, at: str
) -> None:
    real: Any = {"builtins.open": open, "os.fsync": os.fsync}[at]

    def full(file: Any, *rest: Any, **more: Any) -> Any:
        """A temporary file can't be opened, or not be brought to the disk; what is there already can."""
        if Path(os.readlink(f"/proc/self/fd/{file}") if isinstance(file, int) else str(file)).name.startswith("."):
            raise OSError(number, os.strerror(number))
        return real(file, *rest, **more)

    roomy, plain = tmp_path / "roomy", tmp_path / "plain"
    write_atomically(roomy, "old\n", spare=8000)
    assert roomy.read_bytes() == b"old".ljust(8003) + b"\n"
    write_atomically(plain, "long enough\n")
    monkeypatch.setattr(at, full)
    write_atomically(roomy, "ä" * 3000 + "\n", spare=0)
    assert roomy.read_text() == "ä" * 3000 + " " * 2003 + "\n"
    for path, text, spare in ((roomy, "x" * 8005, 0), (tmp_path / "none", "new\n", 0), (plain, "new\n", None)):
        with pytest.raises(OSError, match=os.strerror(number)):  # no room, no file, readers that can't do with spaces
            write_atomically(path, text, spare=spare)
    assert plain.read_text() == "long enough\n"
    number = errno.EIO  # another failure
    with pytest.raises(OSError, match="Input/output error"):
        write_atomically(roomy, "new\n", spare=0)
    assert roomy.read_text().strip() == "ä" * 3000
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plain", "roomy"]
