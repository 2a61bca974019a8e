"""Files are replaced in one go, and what a run's end adds to its record has room on a full disk."""

import errno
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clap_ds.config.files import parse_json, read_bytes, read_json, read_lines, write_atomically


@pytest.mark.parametrize(("number", "at"), [(errno.ENOSPC, "io.open"), (errno.EDQUOT, "os.fsync")])
def test_on_a_full_disk_what_is_there_is_overwritten_as_far_as_it_has_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, at: str
) -> None:
    real: Any = {"io.open": open, "os.fsync": os.fsync}[at]

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


def test_only_regular_files_of_a_sensible_size_are_read(tmp_path: Path) -> None:
    pipe, sparse, link, small = (tmp_path / name for name in ("pipe", "sparse", "link", "small"))
    os.mkfifo(pipe)
    sparse.touch()
    os.truncate(sparse, 200 * 10**9)
    small.write_bytes(b"a\nbc\r\n" + b"x" * 20 + b"\nd\n")
    link.symlink_to("/dev/zero")
    for path, reason in (
        (pipe, "regular file"),
        (link, "regular file"),
        (tmp_path, "regular file"),
        (sparse, "has more"),
    ):
        with pytest.raises(OSError, match=reason):
            read_bytes(path)
    assert list(read_lines(sparse)) == []
    assert list(read_lines(small, longest=20)) == [b"a", b"bc"]  # what comes after it is nobody's line
    assert read_bytes(small, most=29) == small.read_bytes()
    with pytest.raises(OSError, match="more than 28 bytes"):
        read_bytes(small, most=28)


@pytest.mark.parametrize(
    "text", ["[" * 100_000, "9" * 5000, '"\\ud800"', '{"\\uDFFF": 1}', '{"a": }', b'"\xed\xa0\x80"', b"\xff\xfe1\x00"]
)
def test_json_that_could_not_be_written_again_is_refused(tmp_path: Path, text: str | bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  (each of its own words)
        parse_json(text)
    path = tmp_path / "a.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError):  # noqa: PT011
        read_json(path)


def test_json_that_is_fine_is_read() -> None:
    assert parse_json('\ufeff["\\ud83d\\ude00"]'.encode()) == ["\N{GRINNING FACE}"]


@given(st.binary(max_size=200) | st.text(alphabet='[]{}",:\\ud8x0e9-.tfn', max_size=200).map(str.encode))
def test_whatever_bytes_there_are_they_are_json_that_can_be_written_again_or_refused(content: bytes) -> None:
    with suppress(ValueError):
        json.dumps(parse_json(content), ensure_ascii=False).encode()
