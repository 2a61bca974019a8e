"""DeepSpeed's launchers with UUIDs in `CUDA_VISIBLE_DEVICES`; ranks only record their environment."""

import os
import subprocess
from pathlib import Path

import pytest

from benchmarks.tune import BENCH
from tests.processes import ROOT

NOTE = "import os; open(os.environ['RANK'] + '.txt', 'w').write(os.environ['CUDA_VISIBLE_DEVICES'])"


@pytest.mark.end_to_end
@pytest.mark.parametrize(("visible", "count"), [("0", 1), ("GPU-1aa,GPU-2bb", 2), ("MIG-3cc", 1)])
def test_a_rank_starts_for_each_visible_gpu(tmp_path: Path, visible: str, count: int) -> None:
    (tmp_path / "note.py").write_text(NOTE)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": visible}
    done = subprocess.run([*BENCH[:3], "note.py"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    noted = {path.stem: path.read_text() for path in tmp_path.glob("*.txt")}
    assert noted == dict.fromkeys("01"[:count], visible), done.stderr
