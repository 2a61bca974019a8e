"""Files are replaced atomically, and untrusted ones are read within limits."""

import os
from pathlib import Path

import pytest

from clap_ds.utils.files import parse_json, read_bytes, read_lines, show_results, write_atomically


def test_write_that_fails_leaves_the_old_file_alone(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    write_atomically(path, "old\n")
    monkeypatch.setattr(os, "fsync", lambda descriptor: os.pwrite(-1, b"", 0))
    with pytest.raises(OSError, match="Bad file"):
        write_atomically(path, "new\n")
    assert path.read_text() == "old\n"
    assert [*tmp_path.iterdir()] == [path]
    # Root could replace /dev/null, for all programs of its host.
    with pytest.raises(OSError, match="expected a file outside"):
        write_atomically("/dev/null-of-a-test", "")


def test_results_are_printed_as_text_or_json(capsys):
    show_results("| a |", {"a": 1}, None)
    show_results("| a |", {"a": 1}, Path("-"))
    assert capsys.readouterr().out == '| a |\n{\n "a": 1\n}\n'


def test_read_of_other_kinds_of_files_is_refused(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    link = tmp_path / "link"
    link.symlink_to("/dev/zero")
    for path in (pipe, link, tmp_path):
        with pytest.raises(OSError, match="regular file"):
            read_bytes(path)


def test_read_of_large_file_is_refused(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"12345678")
    assert read_bytes(path, most=8) == b"12345678"
    with pytest.raises(OSError, match="more than 7 bytes"):
        read_bytes(path, most=7)


def test_lines_end_at_the_first_long_one(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"a\nbc\r\n" + b"x" * 20 + b"\nd\n")
    assert [*read_lines(path, longest=20)] == [b"a", b"bc"]


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        # no float holds these
        "9" * 5000,
        "-1e999",
        "[NaN]",
        # half a surrogate pair
        '"\\ud800"',
        # UTF-16
        b"\xff\xfe1\x00",
    ],
)
def test_json_that_cannot_be_written_again_is_refused(text):
    # Each has a message of its own.
    with pytest.raises(ValueError):  # noqa: PT011
        parse_json(text)


def test_json_with_byte_order_mark_or_allowed_nan_is_read():
    assert parse_json('\ufeff["\\ud83d\\ude00"]'.encode()) == ["\N{GRINNING FACE}"]
    assert str(parse_json("[NaN, 1e999, -Infinity, 2]", allow_nan=True)) == "[nan, inf, -inf, 2]"
