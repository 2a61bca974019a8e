"""The GPU check's bookkeeping: how every step ended, what is kept of it, and all of it once with a micro model on CPUs."""

import json
import os
import shlex
import tarfile
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks import common, gpu_check
from benchmarks.gpu_check import CALLS, Step
from clap_ds.config.changes import parse_assignment, read_config, with_field
from clap_ds.config.errors import UserError
from clap_ds.config.places import work_folder
from clap_ds.config.settings import load_run

MICRO = "clap.model.preset=micro train_micro_batch_size_per_gpu=4 clap.text_tokens=16 clap.cpu_kernels=off"


def names_in(path: Path) -> list[str]:
    with tarfile.open(path) as archive:
        return archive.getnames()


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a check leaves everything of what seems to be an H100: a micro model on CPUs."""
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(name, "")  # and as it was afterwards
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setattr(gpu_check, "nvidia_smi", lambda: ["NVIDIA H100 80GB HBM3, 81559 MiB, 550.54.15"])
    monkeypatch.setattr(gpu_check, "choose_accelerator", lambda: "cuda")
    monkeypatch.setattr(gpu_check, "SHORT", f"{gpu_check.SHORT} {MICRO}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(gpu_check, "work_folder", lambda: tmp_path)
    monkeypatch.setattr(gpu_check, "exit_on_sigterm", lambda: None)
    return tmp_path


@pytest.mark.parametrize(
    ("code", "limit_s", "state", "note"),
    [
        ("print('b'); print('ValueError: a|b'); raise SystemExit(3)", 60, "exit code 3", "ValueError: a/b"),
        ("import time; print('so far', flush=True); time.sleep(600)", 3, "stopped after 3 s", "so far"),
        ("import sys; open(sys.argv[1], 'w').close()", 60, "completed", None),
    ],
)
def test_steps_end_as_completed_failed_or_out_of_time(
    tmp_path: Path, code: str, limit_s: float, state: str, note: str | None
) -> None:
    step = Step(60, command=f"-c {shlex.quote(code)} {{call}}/x.json")
    row = gpu_check.run_step(step, tmp_path / "step", limit_s, "h100-sxm")
    assert (row["step"], row["state"], row.get("note")) == ("step", state, note)
    assert (tmp_path / "x.json").exists() == (state == "completed")


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


@pytest.mark.parametrize("call", CALLS)
def test_a_deadline_in_the_middle_of_a_call(here: Path, monkeypatch: pytest.MonkeyPatch, call: int) -> None:
    """What is left has a row, and each step that ran left the table and both archives as they were then."""
    limits: dict[str, float] = {}

    def run_step(step: Step, folder: Path, limit_s: float, *_: object) -> dict[str, Any]:
        if limits:
            assert folder.parent.name in names_in(here / "out" / f"call{call}.tar.xz")
            assert len((here / "out" / f"call{call}.md").read_text().splitlines()) == 6 + len(limits)
        limits[folder.name] = limit_s
        (folder / "run-x").mkdir(parents=True)
        (folder / "sounds.tar").touch()
        (here / "cache" / "clap_ds" / "gpu_check" / folder.name).touch()
        return {"step": folder.name, "state": "completed", "seconds": limit_s, "losses": [2.0, 4.0 + len(limits) / 100]}

    monkeypatch.setattr(gpu_check, "run_step", run_step)
    monkeypatch.setattr(gpu_check.time, "monotonic", lambda: sum(limits.values()))
    options = [str(call), "--output", str(here / "out"), "--minutes"]
    assert gpu_check.main([*options, "3"]) == 1
    rows = json.loads((here / "runs" / "gpu_check" / "h100-80gb-hbm3" / f"call{call}" / "table.json").read_text())
    assert [row["step"] for row in rows] == list(CALLS[call])
    assert {row["state"] for row in rows} == {"completed", "no time left"}
    assert sum(limits.values()) <= 3 * 60 - gpu_check.FEWEST_S
    if call == 2:
        assert rows[1]["loss_difference"] == pytest.approx(4.02 / 4.01 - 1)
        assert f"| {4.02 / 4.01 - 1:.1e} |" in " ".join((here / "out" / "call2.md").read_text().split())
    names = names_in(here / "out" / f"call{call}.tar.xz")
    assert f"call{call}/{next(iter(limits))}/run-x" in names
    assert not [name for name in names if name.endswith(".tar")]
    caches = here / "cache" / "clap_ds" / "gpu_check"
    for path in caches.iterdir():
        path.unlink()
    assert gpu_check.main([*options, "0"]) == 1
    assert {path.name for path in caches.iterdir()} == limits.keys()


def test_rows_say_what_runs_and_plans_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rate = {"mean": 3456.7, "low": 3400.0, "high": 3500.0}
    summary = {"samples_per_s_per_gpu": rate, "memory_peak_bytes": 1e9, "memory_reserved_peak_bytes": 1.26e9}
    summary |= {"compile_s": 41.2, "breakdown_s": {"exposed_communication": 0.0123}, "state": "running"}
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "summary.json").write_text(json.dumps(summary))
    (tmp_path / "run" / "metrics.jsonl").write_text('{"loss": 2.5}\n{"loss": 2.25}\n')
    run = Step(60, command=f'-c \'import shutil; shutil.copytree("{tmp_path}/run", "{{folder}}/run-1")\'')
    plan = {"samples_per_s_per_gpu": {"low": 1.0, "middle": 2.0, "high": 3.0}}
    plan |= {"memory_gib": {"weights": 2.0, "libraries (assumed)": 4.0}}
    monkeypatch.setattr(gpu_check, "PLAN", f"-c {shlex.quote(f'print({json.dumps(plan)!r})')}")
    steps = {"run": run, "plan": Step(60, command=gpu_check.PLAN)}
    rows = [gpu_check.run_step(step, tmp_path / "x" / name, 60, "h100-sxm") for name, step in steps.items()]
    assert rows[0]["losses"] == [2.5, 2.25]
    text = [" ".join(line.split()) for line in common.table(gpu_check.COLUMNS, rows).splitlines()[2:]]
    assert text[0].startswith("| run | completed |")
    assert text[0].endswith("| 3,456.7 | 3,400.0–3,500.0 | 1.0 | 1.3 | 41 | 0.0123 | – | – |")
    assert text[1].endswith("| 2.0 | 1.0–3.0 | 2.1 | – | – | – | – | – |")


def test_every_run_and_every_file_of_the_calls_exists(tmp_path: Path) -> None:
    for name, step in (item for steps in CALLS.values() for item in steps.items()):
        config, *changes = shlex.split(step.run)
        content = read_config(Path(config))
        for change in (*gpu_check.SHORT.split(), *changes):
            content = with_field(content, *parse_assignment(change))
        (tmp_path / "run.json").write_text(json.dumps(content))
        load_run(tmp_path / "run.json", 1)
        assert all(
            (work_folder() / word).exists() for word in shlex.split(step.command) if word.startswith("tests/")
        ), name
    assert {"test_triton_kernels", "test_compiled", "test_window_attention", "test_sources"} <= CALLS[2].keys()


def test_two_ranks_share_a_gpu_that_is_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    exec(gpu_check.GLOO.partition("import deepspeed")[0])
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "3"


@pytest.mark.end_to_end
def test_profile_and_its_shares_on_a_stand_in(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    profiled = {name: CALLS[1][name]._replace(most_s=200) for name in ("profile_eager", "efficiencies")}
    monkeypatch.setattr(gpu_check, "CALLS", {1: profiled})
    assert gpu_check.main(["1", "--output", str(here / "out")]) == 0
    assert sorted(os.listdir(here / "out")) == ["caches.tar.xz", "call1.md", "call1.tar.xz", "efficiencies.json"]
    classes = json.loads((here / "out" / "efficiencies.json").read_text())["classes"]
    assert {"thin product", "element-wise", "narrow norm", "narrow norm backward", "optimizer"} <= classes.keys()
    assert all(0 < each["efficiency"] < 1 for each in classes.values())  # a processor beside an H100's data sheet


def test_machine_without_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UserError, match="no NVIDIA GPU"):
        gpu_check.main(["1"])
