"""A collective that one rank never joins: it fails in time, and both ranks say where they were."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.processes import ROOT, Command
from tests.ranks import free_port

STALLED = """
import sys, time
from pathlib import Path
import torch, torch.distributed as dist
from clap_ds.dist import debug
from clap_ds.dist.distributed import Ranks, initialize
from clap_ds.config.sections import DebugSettings

def waits_elsewhere():
    time.sleep(60)

settings = DebugSettings(enabled=True, collective_timeout_s=4)
debug.prepare(settings)
ranks = Ranks.from_environment()
initialize(ranks, compile_cpu_collective=False, collective_timeout_s=settings.collective_timeout_s)
with debug.watch(settings, ranks, Path(sys.argv[1])):
    if ranks.rank == 1:
        waits_elsewhere()
    dist.all_reduce(torch.ones(1))
"""


@pytest.mark.end_to_end
def test_stalled_rank_is_found_by_its_stack(tmp_path: Path) -> None:
    script = tmp_path / "stalled.py"
    script.write_text(STALLED)
    began = time.strftime("%F")
    environment = {
        **os.environ, "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }  # fmt: skip
    processes = [
        Command([script, tmp_path], env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(2)
    ]  # fmt: skip
    assert processes[0].wait() == 1, processes[0].stderr
    assert "Timed out" in processes[0].stderr
    stacks = [(tmp_path / "stacks" / f"rank{rank}.txt").read_text() for rank in range(2)]
    assert all("because rank 0: RuntimeError: " in stack for stack in stacks)
    assert "in waits_elsewhere" in stacks[1]
    assert "in waits_elsewhere" not in stacks[0]
    assert any(day in stacks[0] for day in (began, time.strftime("%F")))


def test_off_changes_nothing(tmp_path: Path) -> None:
    probe = (
        "import os, sys; before = dict(os.environ); from pathlib import Path; from clap_ds.dist import debug\n"
        "from clap_ds.dist.distributed import Ranks; from clap_ds.config.settings import DebugSettings\n"
        "debug.prepare(DebugSettings())\n"
        "with debug.watch(DebugSettings(), Ranks(0, 2, 0, 2), Path(sys.argv[1])): pass\n"
        "assert dict(os.environ) == before"
    )
    subprocess.run([sys.executable, "-c", probe, str(tmp_path)], cwd=ROOT, check=True)
    assert list(tmp_path.iterdir()) == []
