"""The run directory, also of a failed run, and its lines of JSON."""

import io
import json
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from clap_ds.run_records.run_dir import JsonlWriter, RunDirectory, Tee


def test_run_that_has_ended_keeps_its_first_ending(tmp_path):
    """A rank that runs out of memory records it before the launcher terminates the others."""
    record = RunDirectory(tmp_path)
    record.update_summary(state="running")
    record.finish("out_of_memory", "rank 3: out of memory at micro-batch 616")
    RunDirectory(tmp_path).finish("terminated", "stopped by SIGTERM")
    summary = record.summary()
    assert summary["state"] == "out_of_memory"
    assert summary["error"] == "rank 3: out of memory at micro-batch 616"


class BrokenStream(io.StringIO):
    """A closed terminal, or a file on a full disk."""

    def write(self, text: str) -> int:
        raise BrokenPipeError

    def flush(self) -> None:
        raise BrokenPipeError


def test_tee_with_broken_stream_writes_to_the_other_and_logs_no_progress_bar():
    terminal = io.StringIO()
    log = io.StringIO()
    for tee in (Tee(terminal, BrokenStream()), Tee(BrokenStream(), log)):
        tee.write("error: no space left\n")
        tee.write("\r 50 %")
        tee.flush()
    assert terminal.getvalue() == "error: no space left\n\r 50 %"
    assert log.getvalue() == "error: no space left\n"


def append_steps(path: Path, steps: range, start: int) -> None:
    """Write lines of a start, the last of which is cut by a kill."""
    writer = JsonlWriter(path)
    for step in steps:
        writer.append({"step": step, "start": start, "train_s": 10.0 * step})
    writer.close()
    with path.open("a") as file:
        file.write('{"step": 2, "lo')


def test_history_of_restarted_run_has_each_step_once(tmp_path):
    path = tmp_path / "history.jsonl"
    assert JsonlWriter(path).truncate_after(0) == 0
    append_steps(path, range(1, 5), start=1)
    # Training that is repeated counts, too.
    assert JsonlWriter(path).truncate_after(3) == 40
    append_steps(path, range(4, 8), start=2)
    lines = [json.loads(line) for line in path.read_text().splitlines()[:-1]]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6, 7]
    assert [line["start"] for line in lines] == [1, 1, 1, 2, 2, 2, 2]


@contextmanager
def limited_file_size(size: int) -> Iterator[None]:
    """Simulate a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)


def test_line_that_does_not_fit_on_the_disk_is_dropped_with_one_warning(tmp_path, capsys):
    path = tmp_path / "metrics.jsonl"
    writer = JsonlWriter(path)
    writer.append({"step": 1})
    with limited_file_size(15):
        writer.append({"step": 2})
        writer.append({"step": 3})
    writer.append({"step": 4})
    assert path.read_text() == '{"step": 1}\n{"step": 4}\n'
    assert capsys.readouterr().err.count(f"warning: {path} can't be written") == 1
