"""The GPU check's bookkeeping: how every step ended, and what is kept of it."""

import json
import shlex
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from benchmarks import common, gpu_check
from clap_ds.config.errors import UserError
from clap_ds.config.places import work_folder


@pytest.mark.parametrize(
    ("code", "limit_s", "state"),
    [
        ("raise SystemExit(3)", 60, "exit code 3"),
        ("import time; time.sleep(600)", 2, "stopped after 2 s"),
        ("import sys; open(sys.argv[1], 'w').close()", 60, "completed"),
    ],
)
def test_steps_end_as_completed_failed_or_out_of_time(tmp_path: Path, code: str, limit_s: float, state: str) -> None:
    (target := tmp_path / "kept").mkdir()
    row = gpu_check.run_step("step", f"-c {shlex.quote(code)} {{output}}/x.json", limit_s, target)
    assert row["state"] == state
    assert (target / "x.json").exists() == (state == "completed") != (target / "output.log").exists()


STUBBORN = """
trap "" TERM
setsid sh -c 'trap "" TERM; echo $$ > "$0"; sleep 600; exit' "$1" &
until test -s "$1"; do sleep 0.1; done
sleep 600
"""


def test_nothing_outlives_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A descendant in a session of its own that ignores SIGTERM and holds the output."""
    monkeypatch.setattr(common, "LAST_WORDS_S", 0.2)
    pid = tmp_path / "pid"
    ending = common.run_for(["sh", "-c", STUBBORN, "sh", str(pid)], tmp_path / "log", 5)
    assert ending == "stopped after 5 s"
    number = int(pid.read_text())
    assert not psutil.pid_exists(number) or psutil.Process(number).status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("num_gpus", [1, 8])
def test_steps_by_gpus_and_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_gpus: int) -> None:
    limits: dict[str, float] = {}

    def run_step(name: str, command: str, limit_s: float, target: Path) -> dict[str, Any]:
        limits[name] = limit_s
        return {"step": name, "state": "completed", "seconds": limit_s}

    monkeypatch.setattr(gpu_check, "run_step", run_step)
    monkeypatch.setattr(gpu_check.time, "monotonic", lambda: sum(limits.values()))
    monkeypatch.setattr(gpu_check, "exit_on_sigterm", lambda: None)
    monkeypatch.setattr(gpu_check, "nvidia_smi", lambda: ["NVIDIA H200, 143771 MiB, 580.65"])
    monkeypatch.setattr(gpu_check, "choose_accelerator", lambda: "cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    assert gpu_check.main(["--output", str(tmp_path / "x.md")]) == 1  # no time for all of it
    states = {row["step"]: row["state"] for row in json.loads((tmp_path / "x.json").read_text())}
    assert list(states) == list(gpu_check.STEPS)
    assert next(iter(limits)) == "htsat_tiny"
    assert sum(limits.values()) <= 8 * 60 - gpu_check.FEWEST_S
    assert {states[name] for name in gpu_check.SEVERAL} == {"left out: one GPU" if num_gpus == 1 else "completed"}


def test_run_directory_is_found_in_the_output_and_kept_with_its_command(tmp_path: Path) -> None:
    run, kept = tmp_path / "runs" / "x", tmp_path / "kept" / "htsat"
    run.mkdir(parents=True)
    (run / "summary.json").write_text(json.dumps({"state": "completed", "world_size": 1}))
    (run / "rank0.log").write_text("not kept")
    row = gpu_check.run_step("htsat", f"-c \"print('run directory: {run}')\"", 60, kept)
    assert (row["step"], row["state"], row["world_size"]) == ("htsat", "completed", 1)
    assert sorted(path.name for path in kept.iterdir()) == ["command.txt", "summary.json"]
    assert (kept / "command.txt").read_text().startswith("python -c")


def test_report_has_a_row_for_every_step_with_its_figures() -> None:
    rate = {"mean": 3456.7, "low": 3400.0, "high": 3500.0, "coverage": 0.9785}
    row = {"step": "tiny", "state": "completed", "seconds": 30, "samples_per_s_per_gpu": rate, "memory_peak_bytes": 1e9}
    row |= {"world_size": 1, "memory_reserved_peak_bytes": 1.26e9}
    rows = [row, {"step": "base", "state": "exit code 1", "seconds": 2.0}]
    text = " ".join(gpu_check.report("NVIDIA H200", 2, rows).split())
    assert "| tiny | completed | 30 | 3,456.7 | 3,400.0–3,500.0 | 97.9% | 1 | 1.0 | 1.3 |" in text
    assert "| base | exit code 1 | 2 | – | – | – | – | – | – |" in text
    assert "# 2 × NVIDIA H200" in text


def test_every_file_of_the_plan_exists_and_its_options_are_its_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their parsers take them; what follows is stopped at the first call."""

    def stop(*_: object, **__: object) -> None:
        raise InterruptedError

    monkeypatch.setattr("signal.signal", lambda *_: None)
    names = set()
    for words in (shlex.split(command) for _, command in gpu_check.STEPS.values()):
        for word in words:
            if word.startswith(("ds_configs/", "tests/", "clap_ds/")):
                assert (work_folder() / word).exists(), word
        if words[1].startswith("benchmarks."):
            module = __import__(words[1], fromlist=["main"])
            names.add(words[1].removeprefix("benchmarks."))
            monkeypatch.setattr(module, "try_all" if words[1].endswith("variants") else "choose_device", stop)
            with pytest.raises(InterruptedError):
                module.main(words[2:])
    assert names == {"variants", "peers", "loss_bench"}


def test_machine_without_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UserError, match="no NVIDIA GPU"):
        gpu_check.main([])
