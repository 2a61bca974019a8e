"""Bisection against a linear search, and a job of several runs with a stand-in for the launcher."""

import json
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clap_ds.launch.micro_batch import largest_that_fits, main
from tests.conftest import micro_run


@settings(deadline=None)
@given(limit=st.integers(0, 5000), largest=st.sampled_from([8, 64, 1024, 4096]))
def test_bisection_finds_what_a_linear_search_does(limit: int, largest: int) -> None:
    tried: list[int] = []

    def fits(size: int) -> bool:
        tried.append(size)
        return size <= limit

    expected = max((size for size in range(8, largest + 1, 8) if size <= limit), default=None)
    assert largest_that_fits(fits, largest=largest) == expected
    assert all(size % 8 == 0 and size <= largest for size in tried)
    assert len(set(tried)) == len(tried) <= 21


STAND_IN = """
import json, sys
from pathlib import Path
folder = Path(sys.argv[1])
run = json.loads((folder / "run.json").read_text())
size = run["train_micro_batch_size_per_gpu"] if "train_batch_size" not in run else 0
kind = sys.argv[2] if len(sys.argv) > 2 else ""
if size == 40 and kind == "fail":
    sys.exit(7)
larger = {"launch": "failed", "stop": "timeout"}.get(kind, "out_of_memory")
state = "completed" if size <= 43 else larger
(folder / "run").mkdir(exist_ok=True)
summary = {"samples_per_s_per_gpu": {"mean": size * 2.0}, "memory_peak_bytes": size * 10**9, "achieved_tflops": 5.5}
(folder / "run" / "summary.json").write_text(json.dumps(summary))
(folder / "job.json").write_text(json.dumps({"state": state, "error": "why", "run_directory": str(folder / "run")}))
sys.exit(state != "completed")
"""


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    (tmp_path / "run.json").write_text(json.dumps(micro_run(train_batch_size=8)))
    (tmp_path / "stand_in.py").write_text(STAND_IN)
    options = ["--config", str(tmp_path / "run.json"), "--folder", str(tmp_path)]
    return [*options, "--", sys.executable, str(tmp_path / "stand_in.py"), "{folder}"]


def test_auto_finds_the_largest(tmp_path: Path, command: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["auto", *command]) == 0
    job = json.loads((tmp_path / "job.json").read_text())
    assert (job["state"], job["largest_micro_batch"]) == ("completed", 40)
    rows = {row["micro_batch"]: row for row in json.loads((tmp_path / "micro_batch.json").read_text())}
    assert list(rows) == [8, 16, 32, 64, 48, 40]
    measured = {"samples_per_s_per_gpu": 80.0, "tflops_per_gpu": 5.5, "memory_gb": 40.0}
    assert rows[40] == {"micro_batch": 40, **measured, "state": "completed", "note": ""}
    *_, row_8, _, _, row_40, row_48, row_64, last = capfd.readouterr().out.splitlines()
    assert row_8.startswith("micro-batch 8: 16.00 ")
    assert row_40 == "micro-batch 40: 80.00 samples/s/GPU, 5.50 TFLOPS/GPU, 40.00 GB"
    assert [row_48, row_64] == [f"micro-batch {size}: out of memory" for size in (48, 64)]
    assert last == "largest micro-batch that fits: 40"


def test_any_failure_above_a_size_that_completed_is_too_large(
    tmp_path: Path, command: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["auto", *command, "launch"]) == 0
    assert capfd.readouterr().out.splitlines()[-1] == "largest micro-batch that fits: 40 (48 failed: why)"
    assert main(["auto", *command, "stop"]) == 1
    assert "error: micro-batch 64: timeout: why" in capfd.readouterr().err
    assert json.loads((tmp_path / "job.json").read_text())["state"] == "timeout"


def test_range_keeps_rows_that_do_not_fit_and_a_failure_at_the_smallest_ends_it(
    tmp_path: Path, command: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["24:56:32", *command]) == 0
    rows = json.loads((tmp_path / "micro_batch.json").read_text())
    assert [(row["micro_batch"], row["state"]) for row in rows] == [(24, "completed"), (56, "out_of_memory")]
    assert main(["8:56:32", *command, "fail"]) == 0
    rows = json.loads((tmp_path / "micro_batch.json").read_text())
    assert [(row["micro_batch"], row["state"]) for row in rows] == [(8, "completed"), (40, "failed")]
    assert main(["40:56:8", *command, "fail"]) == 1
    assert json.loads((tmp_path / "job.json").read_text())["state"] == "failed"
    assert "error: micro-batch 40: failed: the job left no job.json" in capfd.readouterr().err
