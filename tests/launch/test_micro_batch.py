"""Bisection against a linear search, and a job of several runs with a stand-in for the launcher."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clap_ds.launch.micro_batch import format_table, largest_that_fits, main
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
    assert all(size % 8 == 0 for size in tried)
    assert max(tried) <= largest
    assert len(set(tried)) == len(tried) <= 21


STAND_IN = """
import json, sys
from pathlib import Path
folder = Path(sys.argv[1])
size = json.loads((folder / "config.json").read_text())["train_micro_batch_size_per_gpu"]
if size == 40 and len(sys.argv) > 2:
    sys.exit(7)
state = "completed" if size <= 43 else "out_of_memory"
(folder / "run").mkdir()
summary = {"samples_per_s_per_gpu": {"median": size * 2.0}, "memory_peak_bytes": size * 10**9,
"preset": "htsat_tiny_roberta_base", "text_tokens": 77}
(folder / "run" / "summary.json").write_text(json.dumps(summary))
(folder / "job.json").write_text(json.dumps({"state": state, "error": "out of memory", "run_directory": str(folder / "run")}))
sys.exit(state != "completed")
"""


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    (tmp_path / "config.json").write_text(json.dumps(micro_run()))
    (tmp_path / "stand_in.py").write_text(STAND_IN)
    return [
        "--config",
        str(tmp_path / "config.json"),
        "--folder",
        str(tmp_path),
        "--",
        sys.executable,
        str(tmp_path / "stand_in.py"),
        "{folder}",
    ]


def test_auto_finds_the_largest(tmp_path: Path, command: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["auto", *command]) == 0
    told = json.loads((tmp_path / "job.json").read_text())
    assert (told["state"], told["largest_micro_batch"]) == ("completed", 40)
    rows = {row["micro_batch"]: row for row in json.loads((tmp_path / "micro_batch.json").read_text())}
    assert list(rows) == [8, 16, 32, 64, 48, 40]
    assert rows[64]["state"] == "out_of_memory"
    # Published: 27.44 GFLOPs a sample forward at 77 tokens. An FFT front end does without the STFT's 2.08, and the last text
    # layer without 76 tokens' output projection and MLP.
    last_layer = 76 * 2 * (768 * 768 + 2 * 768 * 3072) / 1e9
    assert rows[40]["tflops_per_gpu"] == pytest.approx(3 * (27.44 - 2.08 - last_layer) * 80 / 1000, rel=0.01)
    out = capfd.readouterr().out
    assert "largest micro-batch that fits: 40" in out
    assert [line.split()[0] for line in out.splitlines() if line.endswith("out of memory")] == ["48", "64"]


def test_range_keeps_rows_that_do_not_fit(tmp_path: Path, command: list[str]) -> None:
    assert main(["8:56:16", *command]) == 0
    rows = json.loads((tmp_path / "micro_batch.json").read_text())
    assert [(row["micro_batch"], row["state"]) for row in rows] == [
        (8, "completed"), (24, "completed"), (40, "completed"), (56, "out_of_memory"),
    ]  # fmt: skip


def test_other_failures_end_it(tmp_path: Path, command: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["8:56:16", *command, "fail"]) == 1
    assert json.loads((tmp_path / "job.json").read_text())["state"] == "failed"
    assert "error: micro-batch 40: failed" in capfd.readouterr().err


def test_table_without_numbers() -> None:
    row = {
        "micro_batch": 8,
        "samples_per_s_per_gpu": None,
        "tflops_per_gpu": None,
        "memory_gb": None,
        "state": "out_of_memory",
        "note": "x",
    }
    assert format_table([row]).splitlines()[1].split() == ["8", "–", "–", "–", "out", "of", "memory"]
