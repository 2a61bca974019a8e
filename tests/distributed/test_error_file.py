"""Error files."""

from pathlib import Path

import pytest

from clap_ds.distributed import error_file
from clap_ds.distributed.error_file import ERROR, LOST_PEER, STOPPED, UNREACHABLE, read_errors, write_error_file


def test_what_a_word_says_and_which_replaces_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(error_file.this_rank, "folder", None)
    write_error_file(ERROR, "nobody asks", 1)
    error_file.set_error_dir(tmp_path, 3, "n2")
    write_error_file(STOPPED, "stopped by SIGTERM", 143)
    write_error_file(LOST_PEER, "closed by peer", 1)  # a cause replaces an error file, a consequence doesn't
    assert [word.message for word in read_errors(tmp_path)] == ["stopped by SIGTERM"]
    try:
        raise KeyError("caption")
    except KeyError as error:
        write_error_file(UNREACHABLE, f"two\nlines: {error}\n", 1, hosts=["n7"])
    (word,) = read_errors(tmp_path)
    assert (word.message, word.rank, word.host, word.kind) == ("two; lines: 'caption'", 3, "n2", "unreachable")
    assert (word.ranks, word.hosts) == ([], ["n7"])
    assert "test_error_file.py" in word.stack
