"""The GPU check's bookkeeping: how every step ended, and what is kept of it."""

import json
import shlex
from pathlib import Path

import pytest

from benchmarks import gpu_check
from clap_ds.config.errors import UserError
from clap_ds.config.places import work_folder


@pytest.mark.parametrize(
    ("code", "limit_s", "state"),
    [
        ("raise SystemExit(3)", 20, "exit code 3"),
        ("print('hello', flush=True); import time; time.sleep(60)", 2, "stopped after 2 s"),
        ("print('hello'); import sys; open(sys.argv[1], 'w').close()", 20, "completed"),
    ],
)
def test_steps_end_as_completed_failed_or_out_of_time(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], code: str, limit_s: float, state: str
) -> None:
    target = tmp_path / "kept"
    target.mkdir()
    row = gpu_check.run_step("step", f"-c {shlex.quote(code)} {{output}}/x.json", limit_s, target)
    assert row["state"] == state
    assert ("\nhello" in capfd.readouterr().out) == ("hello" in code)
    assert (target / "x.json").exists() == ("argv" in code)


def test_run_directory_is_found_in_the_output_and_kept_with_its_command(tmp_path: Path) -> None:
    run, kept = tmp_path / "runs" / "x", tmp_path / "kept" / "htsat"
    run.mkdir(parents=True)
    (run / "summary.json").write_text(json.dumps({"state": "completed", "world_size": 1}))
    (run / "rank0.log").write_text("not kept")
    row = gpu_check.run_step("htsat", f"-c \"print('run directory: {run}')\"", 20, kept)
    assert (row["step"], row["state"], row["world_size"]) == ("htsat", "completed", 1)
    assert sorted(path.name for path in kept.iterdir()) == ["command.txt", "summary.json"]
    assert (kept / "command.txt").read_text().startswith("python -c")


def test_report_has_a_row_for_every_step_with_its_figures() -> None:
    rate = {"median": 3456.7, "low": 3400.0, "high": 3500.0, "coverage": 0.9785}
    row = {"step": "tiny", "state": "completed", "seconds": 30, "samples_per_s_per_gpu": rate, "memory_peak_bytes": 1e9}
    rows = [row, {"step": "base", "state": "exit code 1", "seconds": 2.0}]
    text = " ".join(gpu_check.report("NVIDIA H200", rows).split())
    assert "| tiny | completed | 30 | 3,456.7 | 3,400.0–3,500.0 | 97.9% | 1.0 |" in text
    assert "| base | exit code 1 | 2 | – | – | – | – |" in text


def test_every_configuration_and_module_of_the_plan_exists() -> None:
    words = [word for _, command in gpu_check.STEPS.values() for word in shlex.split(command)]
    files = [word for word in words if word.startswith("ds_configs/")]
    files += [f"{word.replace('.', '/')}.py" for word in words if word.startswith("benchmarks.")]
    assert len(files) >= 10
    assert all((work_folder() / file).exists() for file in files)


def test_machine_without_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UserError, match="no NVIDIA GPU"):
        gpu_check.main([])
