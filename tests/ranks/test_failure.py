"""A rank's last word, as torch elastic's readers and this project's expect it; and waits that are bounded."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from clap_ds.ranks import failure
from clap_ds.ranks.failure import ERROR, LOST_PEER, STOPPED, UNREACHABLE, leave_word, some
from clap_ds.ranks.limits import within
from tests.processes import ROOT


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(failure, "_place", None)
    leave_word(ERROR, "nobody asks", 1)
    failure.speak_in(tmp_path, 3, "n2")
    assert list(tmp_path.iterdir()) == []
    return tmp_path / "errors" / "rank3.json"


def _said(path: Path) -> tuple[str, dict[str, Any]]:
    message = json.loads(path.read_text())["message"]
    return message["message"], message["extraInfo"]


def test_what_it_says(path: Path) -> None:
    try:
        raise KeyError("caption")
    except KeyError as error:
        leave_word(ERROR, f"two\nlines: {error}\n", 1)
    message, extra = _said(path)
    assert message == "two; lines: 'caption'"
    assert "test_failure.py" in extra.pop("py_callstack")
    assert float(extra.pop("timestamp")) == pytest.approx(path.stat().st_mtime, abs=5)
    assert extra == {"host": "n2", "rank": 3, "kind": "error", "code": 1, "ranks": [], "missing": []}
    assert [each.name for each in path.parent.iterdir()] == ["rank3.json"]


def test_a_consequence_replaces_no_word_and_a_cause_does(path: Path) -> None:
    leave_word(STOPPED, "stopped by SIGTERM", 143)
    leave_word(LOST_PEER, "closed by peer", 1)
    assert _said(path)[0] == "stopped by SIGTERM"
    leave_word(UNREACHABLE, "n7 didn't come", 1, missing=["n7"])
    assert (_said(path)[0], _said(path)[1]["missing"]) == ("n7 didn't come", ["n7"])


def test_a_folder_that_cannot_be_written_ends_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    failure.speak_in(tmp_path / "file", 3, "n2")
    leave_word(ERROR, "it broke", 1)
    assert (tmp_path / "file").read_bytes() == b""


def test_a_line_names_eight_at_most() -> None:
    assert (some(range(8)), some(range(9))) == ("0, 1, 2, 3, 4, 5, 6, 7", "0, 1, 2, 3, 4, 5, 6, 7, …")


def test_a_task_gives_and_raises_within_its_limit() -> None:
    def own() -> None:
        raise TimeoutError("the task's own")

    assert within(30, lambda: 7) == 7
    with pytest.raises(TimeoutError, match="the task's own"):
        within(30, own)
    with pytest.raises(ZeroDivisionError):
        within(30, lambda: 1 // 0)


def test_neither_the_caller_nor_the_end_of_the_process_waits_for_what_never_answers() -> None:
    program = "import threading; from clap_ds.ranks.limits import within; within(0.1, threading.Event().wait)"
    ended = subprocess.run([sys.executable, "-c", program], cwd=ROOT, timeout=180, capture_output=True, text=True)
    assert ended.stderr.splitlines()[-1] == "TimeoutError: no answer within 0.1 s"
