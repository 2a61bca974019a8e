"""The GPU check's bookkeeping: every step's end is told, and evidence is kept."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import gpu_check
from benchmarks.gpu_check import Outcome, Step, keep, plan, report, run_step


def _python(code: str, name: str = "step", limit_s: float = 20.0) -> Step:
    return Step(name, [sys.executable, "-c", code], limit_s)


def test_steps_end_as_completed_failed_or_out_of_time(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run_step(_python("print('hello')"), 20, tmp_path).state == "completed"
    assert run_step(_python("raise SystemExit(3)"), 20, tmp_path).state == "exit code 3"
    assert run_step(_python("import time; time.sleep(60)", limit_s=0.5), 20, tmp_path).state == "stopped after 0 s"
    assert "hello" in capfd.readouterr().out


def test_run_directory_is_found_in_the_output_and_kept_with_its_command(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "x"
    run.mkdir(parents=True)
    (run / "summary.json").write_text(json.dumps({"state": "completed"}))
    (run / "rank0.log").write_text("not kept")
    outcome = run_step(_python(f"print('run directory: {run}')", name="htsat"), 20, tmp_path / "kept")
    assert keep(outcome, tmp_path / "kept") == {"state": "completed"}
    kept = sorted(path.name for path in (tmp_path / "kept" / "htsat").iterdir())
    assert kept == ["command.txt", "summary.json"]
    assert str(Path(sys.executable).parent) not in (tmp_path / "kept" / "htsat" / "command.txt").read_text()


def test_steps_that_write_files_are_told_where(tmp_path: Path) -> None:
    step = Step(
        "files", [sys.executable, "-c", "import sys; open(sys.argv[1], 'w').close()", f"{gpu_check.OUTPUT}/x.json"], 20
    )
    assert run_step(step, 20, tmp_path).state == "completed"
    assert (tmp_path / "files" / "x.json").exists()


def test_report_has_a_row_for_every_step_with_its_figures() -> None:
    step = _python("", name="htsat_tiny")
    rate = {"median": 3456.7, "low": 3400.0, "high": 3500.0}
    summary = {"state": "completed", "samples_per_s_per_gpu": rate, "memory_peak_bytes": 2**30}
    text = report("NVIDIA H200", [Outcome(step, "completed", 30.0), Outcome(step, "exit code 1", 2.0)], [summary, {}])
    assert "| htsat_tiny | completed | 30 | 3,456.7 | 3,400.0–3,500.0 | 1.0 |" in text
    assert "| htsat_tiny | exit code 1 | 2 | – | – | – |" in text


def test_every_configuration_of_the_plan_exists() -> None:
    files = [
        word for step in plan() for word in step.command if word.endswith(".json") and gpu_check.OUTPUT not in word
    ]
    assert len(files) >= 4
    assert all((gpu_check.ROOT / file).exists() for file in files)


def test_machine_without_a_gpu_is_told_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(SystemExit) as ended:
        gpu_check.device()
    assert ended.value.code == 2
    assert "no NVIDIA GPU" in capsys.readouterr().err
