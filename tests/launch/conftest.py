"""SLURM's commands played by small scripts, and waiting for what processes do."""

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

SCRIPTS = {
    "sbatch": """
        if [ "$1" = --test-only ]; then
            grep '^#SBATCH --nodes=' >> tested
            if [ -e refuse_test ]; then cat refuse_test >&2; exit 1; fi
            echo 'sbatch: Job 7 to start at 2026-11-22T08:00:00 using 4 processors on nodes n1 in partition gpu' >&2; exit 0
        fi
        if [ -e refuse ]; then cat refuse >&2; exit 1; fi
        number=$((101 + $(cat calls | wc -l)))
        echo "$*" >> calls
        if [ -e silent ]; then echo 'sbatch: error: Socket timed out on send/recv operation' >&2; exit 1; fi
        echo $number""",
    "squeue": """
        cat queue""",
    "sinfo": "case $* in *-N*) cat nodes ;; *) cat partitions ;; esac",
    "scontrol": 'echo "$*" >> asked',
    "sacct": """
        [ -e accounting ] || { echo 'Slurm accounting storage is disabled' >&2; exit 1; }
        cat accounting""",
}


def wait_for(done: Callable[[], object]) -> None:
    deadline = time.monotonic() + 180
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@dataclass
class FakeSlurm:
    """Its commands' answers are files of `folder`: `queue` (squeue), `accounting` (sacct), `partitions` (sinfo),
    `nodes` (sinfo -N).

    `refuse` makes sbatch refuse with its text, `refuse_test` already when it is asked, `silent` lose its answer;
    `asked` has scontrol's command lines.
    """

    folder: Path

    def write(self, name: str, text: str = "") -> None:
        (self.folder / name).write_text(text)

    def remove(self, name: str) -> None:
        (self.folder / name).unlink()

    @property
    def calls(self) -> list[str]:
        """Command lines of sbatch."""
        return (self.folder / "calls").read_text().splitlines()

    @property
    def tested(self) -> list[str]:
        """Number of nodes in each script that sbatch was asked about, as the script has it."""
        return (self.folder / "tested").read_text().splitlines()


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    """A SLURM with the partitions gpu, of 200 nodes with 4 GPUs, and cpu; the Python of the tests is `python3`."""
    folder = tmp_path / "fake_slurm"
    folder.mkdir()
    for name, script in SCRIPTS.items():
        (folder / name).write_text(f"#!/bin/bash\ncd '{folder}'\n{script}\n")
        (folder / name).chmod(0o755)
    fake = FakeSlurm(folder)
    fake.write("partitions", "gpu*|200|gpu:h100:4(S:0-1)|1-00:00:00\ncpu|50|(null)|infinite\n")
    for name in ("queue", "calls", "tested", "nodes", "asked"):
        fake.write(name)
    path = [str(folder), str(Path(sys.executable).parent), os.environ["PATH"]]
    monkeypatch.setenv("PATH", os.pathsep.join(path))
    monkeypatch.setattr("clap_ds.launch.slurm.PAUSE_S", 0.0)
    return fake
