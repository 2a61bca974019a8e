"""What a run tells as it goes: whole lines, one course through all restarts, and no end for want of room."""

import errno
import json
import os
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from clap_ds.record.stream import Stream


def _scalars(folder: Path) -> list[tuple[int, float]]:
    events = EventAccumulator(str(folder))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars("train/loss")]


def test_a_restart_goes_on_where_it_resumes(tmp_path: Path) -> None:
    lines, tensorboard = tmp_path / "history.jsonl", tmp_path / "tensorboard"
    for first, resumed in ((1, 0), (4, 3)):
        each = Stream(lines, tensorboard)
        each.forget_after(resumed)
        for step in range(first, first + 4):
            each.append({"step": step, "loss": first + step / 10})
            each.add_scalars(step, train__loss=first + step / 10)
        each.close()
        with lines.open("a") as file:
            file.write('{"step": 2, "lo')  # as a kill leaves it
    expected = [(step, pytest.approx(1 + step / 10)) for step in (1, 2, 3)]
    expected += [(step, pytest.approx(4 + step / 10)) for step in (4, 5, 6, 7)]
    found = [json.loads(line) for line in lines.read_text().splitlines()[:-1]]
    assert [(line["step"], line["loss"]) for line in found] == expected
    assert _scalars(tensorboard) == expected


def test_a_full_disk_costs_lines_and_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    each, write = Stream(tmp_path / "metrics.jsonl", tmp_path / "tensorboard"), os.write
    each.append({"step": 1})

    def half(file: int, content: bytes) -> int:
        if len(content) < 8:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(file, content[:7])

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", half)
        for step in (2, 3):
            each.append({"step": step})
            each.append({})
    each.append({"step": 4})
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\n{"step": 4}\n'
    (warning,) = capsys.readouterr().err.splitlines()
    assert (
        warning
        == f"warning: {tmp_path}/metrics.jsonl can't be written: No space left on device; the run goes on without"
    )


def test_tensorboard_that_fails_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tensorboard").write_text("in the way")
    each = Stream(tmp_path / "metrics.jsonl", tmp_path / "tensorboard")
    for step in range(3):
        each.add_scalars(step, train__loss=1.0)
    each.close()
    (warning,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning")]
    assert warning.startswith(f"warning: {tmp_path}/tensorboard can't be written: ")
