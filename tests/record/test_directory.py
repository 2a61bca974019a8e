"""The run directory tells the story of a run, also of one that ended badly."""

import errno
import io
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from clap_ds.record.directory import RunDirectory, Tee


def test_first_ending_stays(tmp_path: Path) -> None:
    """A rank that runs out of memory says so before the launcher terminates the others."""
    record = RunDirectory(tmp_path)
    record.update_summary(state="running")
    record.finish("out_of_memory", "rank 3: out of memory at micro-batch 616")
    RunDirectory(tmp_path).finish("terminated", "stopped by SIGTERM")
    found = record.summary()
    assert (found["state"], found["error"]) == ("out_of_memory", "rank 3: out of memory at micro-batch 616")


def test_ranks_may_record_their_end_at_once(tmp_path: Path) -> None:
    """They do when a signal reaches all of them, and processes on different hosts have the same ids."""
    record = RunDirectory(tmp_path)
    record.update_summary(state="running")
    end = lambda turn: RunDirectory(tmp_path).update_summary(state="terminated", error="x" * turn)  # noqa: E731
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(end, range(400)))
    assert record.summary()["state"] == "terminated"
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]


@pytest.mark.parametrize("reason", [errno.ENOSPC, errno.EPIPE])
def test_what_one_of_them_does_not_take_the_other_gets_and_no_progress_bar_is_logged(reason: int) -> None:
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(reason, os.strerror(reason))

        def flush(self) -> None:
            self.write("")

    terminal, log = io.StringIO(), io.StringIO()
    for tee in (Tee(terminal, Full()), Tee(Full(), log)):
        tee.write("error: no space left\n")
        tee.write("\r 50 %")
        tee.flush()
    assert terminal.getvalue() == "error: no space left\n\r 50 %"
    assert log.getvalue() == "error: no space left\n"
