"""Files are replaced atomically, and untrusted ones are read within limits."""

import json
import os
from pathlib import Path

import pytest

from clap_ds.utils.files import parse_json, read_bytes, read_lines, show_results, write_atomically


def test_what_is_there_stays_where_the_new_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.txt"
    write_atomically(path, "old\n")
    monkeypatch.setattr(os, "fsync", lambda number: os.pwrite(-1, b"", 0))
    with pytest.raises(OSError, match="Bad file"):
        write_atomically(path, "new\n")
    assert [(each.name, each.read_text()) for each in tmp_path.iterdir()] == [("a.txt", "old\n")]


def test_devices_are_not_replaced() -> None:
    """Root could replace /dev/null, for all programs of its host."""
    with pytest.raises(OSError, match="expected a file outside"):
        write_atomically("/dev/null-of-a-test", "")


def test_results_are_text_and_a_json_file_or_only_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    show_results("| a |", {"a": 1}, tmp_path / "a.json")
    assert capsys.readouterr().out == "| a |\n"
    assert json.loads((tmp_path / "a.json").read_text()) == {"a": 1}
    show_results("| a |", {"a": 1}, Path("-"))
    assert json.loads(capsys.readouterr().out) == {"a": 1}


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
        (sparse, "more"),
    ):
        with pytest.raises(OSError, match=reason):
            read_bytes(path)
    assert list(read_lines(small, longest=20)) == [b"a", b"bc"]  # lines after it are dropped
    assert read_bytes(small, most=29) == small.read_bytes()
    with pytest.raises(OSError, match="more than 28 bytes"):
        read_bytes(small, most=28)


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        "9" * 5000,
        "9" * 400,
        "-1e999",
        "[NaN]",
        '"\\ud800"',
        '{"\\uDFFF": 1}',
        b"\xff\xfe1\x00",
    ],
)
def test_json_that_could_not_be_written_again_is_refused(text: str | bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  (each of its own words)
        parse_json(text)
    assert parse_json('\ufeff["\\ud83d\\ude00"]'.encode()) == ["\N{GRINNING FACE}"]


def test_nan_of_former_versions_is_read_where_it_may_be() -> None:
    assert str(parse_json("[NaN, 1e999, -Infinity, 2]", allow_nan=True)) == "[nan, inf, -inf, 2]"
