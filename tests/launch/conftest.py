"""Fake SLURM commands: small scripts."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

SCRIPTS = {
    "sbatch": """
        if [ "$1" = --test-only ]; then
            grep '^#SBATCH' "${@: -1}" >> tested
            if [ -e refuse_test ]; then cat refuse_test >&2; exit 1; fi
            exit 0
        fi
        if [ -e refuse ]; then cat refuse >&2; exit 1; fi
        echo "$*" >> calls
        echo $((100 + $(cat calls | wc -l)))""",
    "squeue": "cat queue",
    "sinfo": """[ "$3" != %R ] || exec sed 's/[*]*|.*//' partitions
        [ "$3" != -p ] || names="${4//,/|}"; grep -E "^(${names-.*})[*]?[| ]" partitions || :""",
    "scontrol": 'if [ "$2" = show ]; then cat job; else echo "$*" >> asked; fi',
    "sacct": "cat accounting",
}


@dataclass
class FakeSlurm:
    """Commands print files of `folder`: `queue` (squeue), `accounting` (sacct), `partitions`
    (sinfo), `job` (scontrol). `refuse_test` is the error of `sbatch --test-only`, `refuse` that of
    sbatch."""

    folder: Path

    def write(self, name: str, text: str = "") -> None:
        (self.folder / name).write_text(text)

    def write_program(self, name: str, script: str) -> None:
        """Write a command for bash, which runs in the folder."""
        (self.folder / name).write_text(f"#!/bin/bash\ncd '{self.folder}'\n{script}\n")
        (self.folder / name).chmod(0o755)

    def lines(self, name: str) -> list[str]:
        """Read `calls` (sbatch's command lines), `tested` (#SBATCH lines it checked) or `asked`
        (scontrol's)."""
        return (self.folder / name).read_text().splitlines()


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    """A fake SLURM with partitions gpu (nodes with 4 GPUs) and cpu; `python3` is the Python of the
    tests."""
    folder = tmp_path / "fake_slurm"
    folder.mkdir()
    fake = FakeSlurm(folder)
    for name, script in SCRIPTS.items():
        fake.write_program(name, script)
    gpu_nodes = "gpu*|gpu:h100:4(S:0-1)|1-00:00:00|4\ngpu*|gpu:h100:4|1-00:00:00|2\n"
    fake.write("partitions", gpu_nodes + "cpu|(null)|infinite|9\n")
    for name in ("queue", "calls", "tested", "asked"):
        fake.write(name)
    paths = [str(folder), str(Path(sys.executable).parent), os.environ["PATH"]]
    monkeypatch.setenv("PATH", os.pathsep.join(paths))
    monkeypatch.setattr("clap_ds.launch.slurm.RETRY_PAUSE_S", 0.0)
    return fake
