"""A rank's note says what it does, in place and in words."""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from clap_ds.dist import progress
from clap_ds.engine import compiled


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where this process notes what it does, as rank 3."""
    monkeypatch.setenv("CLAP_PROGRESS", str(tmp_path))
    progress.start(3)
    yield tmp_path
    progress.forget()


def _note(folder: Path, rank: int = 3) -> dict[str, Any]:
    text = (folder / str(rank)).read_text()
    assert (len(text), text[-1]) == (256, "\n")
    note = json.loads(text)
    assert isinstance(note, dict)
    return note


def test_it_says_what_is_done_between_steps(folder: Path) -> None:
    inode = (folder / "3").stat().st_ino
    begun = _note(folder)
    assert {**begun, "at": 0} == {"rank": 3, "pid": os.getpid(), "step": 0, "made": 0, "doing": "starting", "at": 0}
    with progress.doing("loading a checkpoint"):
        assert _note(folder)["doing"] == "loading a checkpoint"
    assert _note(folder)["doing"] == "starting"
    progress.step(501)

    def fail() -> None:
        with progress.doing("evaluating"), progress.doing("decoding"):
            assert _note(folder)["doing"] == "decoding"
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    note = _note(folder)
    assert (note["step"], note["made"], note["doing"]) == (501, 1, "step")
    assert begun["at"] <= note["at"] <= time.monotonic() + 0.001  # it is rounded
    progress.ending()
    with progress.doing("copying checkpoints"):
        pass
    assert _note(folder)["doing"] == "ending"
    assert (folder / "3").stat().st_ino == inode


def test_compiling_is_said_whenever_it_is_done(folder: Path) -> None:
    said = []

    def backend(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        said.append(_note(folder)["doing"])
        return graph

    compiled._note_compilations()
    progress.step(7)
    double = torch.compile(lambda x: 2 * x, backend=backend)
    double(torch.ones(3))
    assert (said, _note(folder)["doing"]) == (["compiling"], "step")
    torch._dynamo.reset()


def test_without_the_variable_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CLAP_PROGRESS", raising=False)
    monkeypatch.chdir(tmp_path)
    progress.start(0)
    progress.step(1)
    with progress.doing("evaluating"):
        progress.ending()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_fails_ends_no_run_and_leaves_no_old_note(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with progress.doing("evaluating"):
        progress.step(1)
    assert not (folder / "3").exists()
    assert capfd.readouterr().err == f"warning: {folder}/3 can't be written: No space left on device\n"
    monkeypatch.setenv("CLAP_PROGRESS", str(folder / "nowhere"))
    progress.start(3)
    assert "nowhere can't be written: No such file or directory" in capfd.readouterr().err
