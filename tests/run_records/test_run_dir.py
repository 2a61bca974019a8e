"""The run directory, also of a failed run.

JSON lines: always whole, continuous over restarts, and a full disk doesn't end the run.
"""

import io
import json
import os
import resource
import signal
from pathlib import Path

import pytest

from clap_ds.run_records.run_dir import JsonlWriter, RunDirectory, Tee


def test_first_ending_stays(tmp_path: Path) -> None:
    """A rank that runs out of memory records it before the launcher terminates the others."""
    record = RunDirectory(tmp_path)
    record.update_summary(state="running")
    record.finish("out_of_memory", "rank 3: out of memory at micro-batch 616")
    RunDirectory(tmp_path).finish("terminated", "stopped by SIGTERM")
    found = record.summary()
    assert (found["state"], found["error"]) == (
        "out_of_memory",
        "rank 3: out of memory at micro-batch 616",
    )


def test_what_one_of_them_does_not_take_the_other_gets_and_no_progress_bar_is_logged() -> None:
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

        def flush(self) -> None:
            self.write("")

    terminal = io.StringIO()
    log = io.StringIO()
    for tee in (Tee(terminal, Full()), Tee(Full(), log)):
        tee.write("error: no space left\n")
        tee.write("\r 50 %")
        tee.flush()
    assert terminal.getvalue() == "error: no space left\n\r 50 %"
    assert log.getvalue() == "error: no space left\n"


def test_a_restart_goes_on_where_it_resumes(tmp_path: Path) -> None:
    lines = tmp_path / "history.jsonl"
    for first, resumed, train_s in ((1, 0, 0.0), (4, 3, 40.0)):  # repeated training counts, too
        each = JsonlWriter(lines)
        assert each.truncate_after(resumed) == train_s
        for step in range(first, first + 4):
            each.append({"step": step, "loss": first + step / 10, "train_s": 10.0 * step})
        each.close()
        with lines.open("a") as file:
            file.write('{"step": 2, "lo')  # cut by a kill
    expected = [(step, 1 + step / 10) for step in (1, 2, 3)] + [
        (step, 4 + step / 10) for step in (4, 5, 6, 7)
    ]
    found = [json.loads(line) for line in lines.read_text().splitlines()[:-1]]
    assert [(line["step"], line["loss"]) for line in found] == expected


def test_a_full_disk_costs_lines_and_is_said_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file size limit simulates a full disk."""
    each = JsonlWriter(tmp_path / "metrics.jsonl")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    each.append({"step": 1})
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (15, limits[1]))
    try:
        for step in (2, 3):
            each.append({"step": step})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    each.append({"step": 4})
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\n{"step": 4}\n'
    assert (
        capsys.readouterr().err.count(f"warning: {tmp_path}{os.sep}metrics.jsonl can't be written")
        == 1
    )
