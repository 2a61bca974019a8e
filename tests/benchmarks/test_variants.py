"""Every combination is run and has its row, also those that fail."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import variants
from clap_ds.config.errors import UserError

STAND_IN = """
import json, sys, time
from pathlib import Path
run = json.loads(Path(sys.argv[1]).read_text())
kind, output = run["clap"]["compile"], run["clap"]["output"]
folder = Path(output["root"], output["label"] + "-20260101T000000Z")
if kind == "towers":
    sys.exit("error: no compiler here")
folder.mkdir()
rate = {"off": 100.0, "step": 150.0}.get(kind, 0.0) + run["train_micro_batch_size_per_gpu"]
summary = {"state": "completed", "samples_per_s_per_gpu": {"mean": rate, "low": rate - 1, "high": rate + 1, "coverage": 0.75}}
ends = {"slow": {"state": "running"}, "memory": {"state": "out_of_memory", "error": "out of memory at micro-batch 4"}}
(folder / "summary.json").write_text(json.dumps(ends.get(kind, {**summary, "memory_peak_bytes": 2e9})))
time.sleep(60 * (kind == "slow"))
sys.exit(kind == "memory")
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    (tmp_path / "config.json").write_text(json.dumps({"train_micro_batch_size_per_gpu": 4, "clap": {"compile": "off"}}))
    (tmp_path / "stand_in.py").write_text(STAND_IN)

    monkeypatch.setattr(variants, "BENCH", [sys.executable, str(tmp_path / "stand_in.py")])
    return lambda *options: variants.main([str(tmp_path / "config.json"), "--folder", str(tmp_path / "out"), *options])


def rows(folder: Path) -> list[dict[str, Any]]:
    return list(json.loads((folder / "out" / "variants.json").read_text()))


def test_all_combinations_in_order(run: Callable[..., int], tmp_path: Path) -> None:
    options = ["--vary", "clap.compile=off,step", "--vary", "train_micro_batch_size_per_gpu=8,16"]
    assert run(*options, "--set", "clap.bench.windows=3") == 0
    assert [row["samples_per_s_per_gpu"]["mean"] for row in rows(tmp_path)] == [108.0, 116.0, 158.0, 166.0]
    assert [row["settings"]["clap.compile"] for row in rows(tmp_path)] == ["off", "off", "step", "step"]
    written = json.loads((tmp_path / "out" / "03" / "config.json").read_text())
    assert (written["clap"]["compile"], written["train_micro_batch_size_per_gpu"]) == ("step", 8)
    assert (written["clap"]["bench"]["windows"], written["clap"]["bench"]["warmup_steps"]) == (3, 5)
    table = (tmp_path / "out" / "variants.md").read_text()
    assert "158.00 | 157.00–159.00 | 75.0% | 1.463 |" in " ".join(table.split())


def test_failures_are_rows_with_their_reason(run: Callable[..., int], tmp_path: Path) -> None:
    assert run("--vary", "clap.compile=off,towers,memory") == 0
    assert [(row["state"], row["note"]) for row in rows(tmp_path)] == [
        ("completed", ""),
        ("failed", "no compiler here"),
        ("out_of_memory", "out of memory at micro-batch 4"),
    ]
    shutil.rmtree(tmp_path / "out")
    assert run("--vary", "clap.compile=slow", "--limit_s", "2") == 1
    assert [(row["state"], row["note"]) for row in rows(tmp_path)] == [("failed", "stopped after 2 s")]


def test_nothing_measured_is_no_success_and_no_folder_is_used_twice(run: Callable[..., int], tmp_path: Path) -> None:
    assert run("--vary", "clap.compile=towers") == 1
    with pytest.raises(UserError, match=f"{tmp_path / 'out'}: expected a new or empty folder"):
        run("--vary", "clap.compile=towers")


def test_mistakes_are_refused_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    for config, vary, message in (
        ("no.json", "clap.compile=off", "no.json: no such file"),
        ("config.json", "a=1,1", "the same value twice"),
        *(("config.json", vary, "expected NAME=VALUE") for vary in ("a", "=1", "a=1,,2")),
    ):
        with pytest.raises((UserError, OSError), match=message):
            variants.main([str(tmp_path / config), "--folder", str(tmp_path / "out"), "--vary", vary])
    assert not (tmp_path / "out").exists()


@pytest.mark.end_to_end
def test_real_runs(write_run: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ["--vary", "clap.text=packed,wrapped"]
    options += ["--set", "clap.bench.windows=2", "--set", "clap.bench.warmup_steps=1"]
    monkeypatch.setattr(variants, "BENCH", [sys.executable, "clap_ds/bench.py", "--deepspeed_config"])
    assert variants.main([str(write_run()), "--folder", str(tmp_path / "out"), *options]) == 0
    packed, wrong = rows(tmp_path)
    assert packed["state"] == "completed"
    assert packed["samples_per_s_per_gpu"]["mean"] > 0
    assert wrong["state"] == "failed"
    assert "clap.text" in wrong["note"]
