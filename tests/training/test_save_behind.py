"""Faults while a checkpoint is written behind training, the next one due: no other is lost, and the run goes on as without."""

import errno
import json
from pathlib import Path
from signal import SIGKILL, SIGTERM
from typing import Any

import pytest

from clap_ds.weights.state_file import write_tensors
from tests.training import training_commands as commands
from tests.training.training_commands import RunningRanks, wait_until

pytestmark = pytest.mark.end_to_end


def write_late(path: Path, *content: Any) -> Any:
    """Writes the checkpoint of step 8 once there is `go` beside it; where that is a folder, the disk is full."""
    go = path.parents[1] / "go"
    if path.parent.name.startswith(".step-00000008"):
        wait_until(go.exists)
        if go.is_dir():
            raise OSError(errno.ENOSPC, "No space left on device")
    return write_tensors(path, *content)


def write_run(folder: Path) -> tuple[Path, Path]:
    """16 steps on two ranks, a checkpoint after each four: its JSON and the folder of checkpoints."""
    checkpoint = {"every_steps": 4, "keep_last": 9, "folder": str(folder / "saved")}
    clap = {"model": {"preset": "micro", "text_dropout": 0.2}, "train": {"samples": 128}, "checkpoint": checkpoint}
    return commands.write_training(folder, clap=clap), folder / "saved"


def losses(folder: Path) -> list[float]:
    history = map(json.loads, (folder / "history.jsonl").read_text().splitlines())
    return [line["loss"] for line in history if line["phase"] == "train"]


@pytest.mark.parametrize(
    ("rank", "number", "code", "saved"),
    [(0, SIGKILL, -9, [4]), (1, SIGTERM, 143, [4, 8, 12, 13]), (0, None, 0, [4, 12, 16])],
)
def test_a_fault_meanwhile(tmp_path: Path, rank: int, number: Any, code: int, saved: list[int]) -> None:
    config, folder = write_run(tmp_path)
    ranks = RunningRanks(config, 2, constants={"clap_ds.training.checkpoint.write_tensors": write_late})
    ranks.wait_for_step(12)
    if number:
        ranks.signal(rank, number)
    if number != SIGKILL:
        (folder / "go").touch() if number else (folder / "go").mkdir()
    assert ranks.wait()[rank] == code, ranks.outputs
    found = sorted(int(path.name[-2:]) for path in folder.glob("step-*"))
    assert found in (saved, [*saved[:-1], saved[-1] + (number == SIGTERM)])  # after the step under way or the next
    assert ("step 8 could not be saved: [Errno 28] No space left on" in ranks.outputs[0]) == (not number)
    assert f"resuming from {folder}/step-{found[-1]:08d}" in commands.train(config)
    (tmp_path / "whole").mkdir()
    whole, undisturbed = write_run(tmp_path / "whole")
    commands.train(whole)
    assert losses(folder) == losses(undisturbed)
