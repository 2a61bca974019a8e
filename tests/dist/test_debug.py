"""A collective that one rank never joins: it fails in time, and both ranks say where they were."""

import os
from pathlib import Path

import pytest

from clap_ds.config.sections import DebugSettings
from clap_ds.dist import debug
from clap_ds.dist.distributed import Ranks
from tests import processes

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
    first, _ = processes.ranks(["-c", STALLED, tmp_path], 2, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert first.wait() == 1, first.stderr
    assert "Timed out" in first.stderr
    stacks = [(tmp_path / "stacks" / f"rank{rank}-failing.txt").read_text() for rank in range(2)]
    assert all("because rank 0: RuntimeError: " in stack for stack in stacks)
    assert ["in waits_elsewhere" in stack for stack in stacks] == [False, True]


def test_off_changes_nothing(tmp_path: Path) -> None:
    before = dict(os.environ)
    debug.prepare(DebugSettings())
    with debug.watch(DebugSettings(), Ranks(0, 2, 0, 2), tmp_path):
        pass
    assert dict(os.environ) == before
    assert list(tmp_path.iterdir()) == []
