"""What a run tells as it goes: whole lines, one course through all restarts, and no end for want of room."""

import errno
import json
import os
from pathlib import Path

import pytest

from clap_ds.record.stream import Stream


def test_a_restart_goes_on_where_it_resumes(tmp_path: Path) -> None:
    lines = tmp_path / "history.jsonl"
    for first, resumed, train_s in ((1, 0, 0.0), (4, 3, 40.0)):  # what is trained again has been trained, too
        each = Stream(lines)
        assert each.forget_after(resumed) == train_s
        for step in range(first, first + 4):
            each.append({"step": step, "loss": first + step / 10, "train_s": 10.0 * step})
        each.close()
        with lines.open("a") as file:
            file.write('{"step": 2, "lo')  # as a kill leaves it
    expected = [(step, 1 + step / 10) for step in (1, 2, 3)] + [(step, 4 + step / 10) for step in (4, 5, 6, 7)]
    found = [json.loads(line) for line in lines.read_text().splitlines()[:-1]]
    assert [(line["step"], line["loss"]) for line in found] == expected


def test_a_full_disk_costs_lines_and_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    each, write = Stream(tmp_path / "metrics.jsonl"), os.write
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
    full = f"warning: {tmp_path}/metrics.jsonl can't be written: No space left on device; the run goes on without"
    assert capsys.readouterr().err.splitlines() == [full]
