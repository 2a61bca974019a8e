"""The run directory, also of a failed run."""

import io
from pathlib import Path

from clap_ds.run_records.run_dir import RunDirectory, Tee


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
