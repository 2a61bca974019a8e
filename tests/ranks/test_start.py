"""DeepSpeed's own launchers where `CUDA_VISIBLE_DEVICES` names GPUs, by ranks that only note what they were given."""

import os
import subprocess
from pathlib import Path

import pytest

from benchmarks.variants import BENCH

NOTE = (
    "import os, sys; open(os.path.join(sys.argv[2], os.environ['RANK']), 'w').write(os.environ['CUDA_VISIBLE_DEVICES'])"
)


@pytest.mark.end_to_end
@pytest.mark.parametrize(("visible", "count"), [("0", 1), ("GPU-1aa,GPU-2bb", 2), ("MIG-3cc", 1)])
def test_a_rank_starts_for_each_visible_gpu(tmp_path: Path, visible: str, count: int) -> None:
    (tmp_path / "note.py").write_text(NOTE)
    (told := tmp_path / "a b").mkdir()
    env = {**os.environ, "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": visible}
    done = subprocess.run(
        [*BENCH[:3], tmp_path / "note.py", told], env=env, capture_output=True, text=True, timeout=300
    )
    assert {path.name: path.read_text() for path in told.iterdir()} == dict.fromkeys("01"[:count], visible), done.stderr
