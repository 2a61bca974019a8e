"""Every combination runs and has a row, even if it fails."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import tune
from clap_ds.utils.errors import UserError

STAND_IN = """
import json, sys, time
from pathlib import Path
run = json.loads(Path(sys.argv[1]).read_text())
kind, output = run["clap"]["compile"], run["clap"]["output"]
folder = Path(output["dir"], output["run_name"] + "-20260101T000000Z")
if kind == "towers":
    sys.exit("error: no compiler here")
folder.mkdir()
rate = {"off": 100.0, "step": 150.0}.get(kind, 0.0) + run["train_micro_batch_size_per_gpu"]
rates = {"mean": rate, "min": rate - 1, "max": rate + 1}
summary = {"state": "completed", "samples_per_s_per_gpu": rates, "achieved_tflops": 3.0, "hardware_tflops": 4.0}
ends = {"slow": {"state": "running"}, "memory": {"state": "out_of_memory", "error": "out of memory at micro-batch 4"}}
(folder / "summary.json").write_text(json.dumps(ends.get(kind, {**summary, "memory_peak_bytes": 2e9})))
time.sleep(60 * (kind == "slow"))
sys.exit(kind == "memory")
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    (tmp_path / "config.json").write_text(
        json.dumps({"train_micro_batch_size_per_gpu": 4, "clap": {"compile": "off"}})
    )
    (tmp_path / "stand_in.py").write_text(STAND_IN)
    monkeypatch.setattr(tune, "BENCH", [sys.executable, str(tmp_path / "stand_in.py")])
    return lambda *options: tune.main(
        ["--config", str(tmp_path / "config.json"), "--folder", str(tmp_path / "out"), *options]
    )


def rows(folder: Path) -> list[dict[str, Any]]:
    return list(json.loads((folder / "out" / "tune.json").read_text()))


def test_combinations_run_in_order(run, tmp_path):
    options = ["--vary", "clap.compile=off,step", "--vary", "train_micro_batch_size_per_gpu=8,16"]
    assert run(*options, "--set", "clap.bench.windows=3") == 0
    means = [row["samples_per_s_per_gpu"]["mean"] for row in rows(tmp_path)]
    assert means == [108.0, 116.0, 158.0, 166.0]
    config = json.loads((tmp_path / "out" / "03" / "config.json").read_text())
    assert (config["clap"]["compile"], config["train_micro_batch_size_per_gpu"]) == ("step", 8)
    assert (config["clap"]["bench"]["windows"], config["clap"]["bench"]["warmup_steps"]) == (3, 5)
    table = (tmp_path / "out" / "tune.md").read_text()
    assert "158.00 | 157.00–159.00 | 1.463 | 2.00 | 3.000 | 4.000 |" in " ".join(table.split())


def test_failed_run_is_a_row_with_its_reason(run, tmp_path):
    assert run("--vary", "clap.compile=off,towers,memory,slow", "--limit_s", "3") == 0
    assert [(row["state"], row["note"]) for row in rows(tmp_path)] == [
        ("completed", ""),
        ("exit code 1", "no compiler here"),
        ("exit code 1", "out of memory at micro-batch 4"),
        ("stopped after 3 s", "no output"),
    ]
    with pytest.raises(UserError, match="new or empty"):
        run("--vary", "clap.compile=towers")
