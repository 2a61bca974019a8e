"""Outcomes of steps and results of a call of the GPU check, with a micro model on CPUs."""

import json
import os
import shlex
import signal
import subprocess
import sys
import tarfile
from fnmatch import fnmatch
from pathlib import Path

import pytest

from benchmarks import gpu_check
from benchmarks.common import changed
from benchmarks.gpu_check import CALLS, Check
from clap_ds.config.settings import load_run
from clap_ds.run_records.schema import RECORD_FILES
from tests.processes import ROOT

MICRO = "clap.model.preset=micro train_micro_batch_size_per_gpu=4 clap.context_length=16 clap.cpu_kernels=off"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(name, "")  # restored afterwards
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setattr(
        gpu_check, "nvidia_smi", lambda: ["NVIDIA H100 80GB HBM3, 81559 MiB, 550.54.15"]
    )
    monkeypatch.setattr(gpu_check, "choose_accelerator", lambda: "cuda")
    monkeypatch.setattr(gpu_check, "SHORT", f"{gpu_check.SHORT} {MICRO}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(gpu_check, "work_folder", lambda: tmp_path)
    monkeypatch.setattr(gpu_check, "exit_on_sigterm", lambda: None)
    return tmp_path


def test_steps_that_fail_or_find_no_time_are_rows_like_any_other(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes = {
        "good": "open('{folder}/kept', 'w'); open('{folder}/a.tar', 'w')",
        "bad": "raise ValueError('a|b')",
    }
    steps = {name: Check(60, command=f"-c {shlex.quote(code)}") for name, code in codes.items()}
    monkeypatch.setattr(gpu_check, "CALLS", {1: steps})
    assert gpu_check.main(["1", "--output", str(here / "out")]) == 1
    rows = json.loads(
        (here / "runs" / "gpu_check" / "h100-80gb-hbm3" / "call1" / "table.json").read_text()
    )
    assert [(row["step"], row["state"], row["note"]) for row in rows] == [
        ("good", "completed", ""),
        ("bad", "exit code 1", "ValueError: a/b"),
    ]
    assert "exit code 1" in (here / "out" / "call1.md").read_text()
    with tarfile.open(here / "out" / "call1_good.tar.xz") as archive:
        assert "call1/good/kept" in archive.getnames()
        assert "call1/good/a.tar" not in archive.getnames()
    assert gpu_check.main(["1", "--output", str(here / "out"), "--minutes", "0"]) == 1
    assert "no time left" in (here / "out" / "call1.md").read_text()


ENDS = {
    "hang": ("import time; time.sleep(60)", "stopped after 5 s"),
    "crash": ("raise ValueError", "exit code 1"),
    "kill": ("import os; os.kill(os.getpid(), 9)", "exit code -9"),
    "this call is ended": ("import os, time; os.kill({pid}, 15); time.sleep(60)", "interrupted"),
}


@pytest.mark.parametrize(
    ("end", "position"),
    [("hang", 1), *((end, position) for end in ENDS for position in range(3) if end != "hang")],
)
def test_whatever_ran_before_a_step_that_ends_badly_is_kept_and_printed(
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    end: str,
    position: int,
) -> None:
    code, state = ENDS[end]
    write = "print('{folder} has rows', flush=True); open('{folder}/rows.md', 'w').write('row')"
    cache = "import os; open(os.environ['TRITON_CACHE_DIR'] + '/../{folder.name}', 'w')"
    good = f"{write}; {cache}"
    codes = [good, good, good]
    codes[position] = f"{good}; {code.replace('{pid}', str(os.getpid()))}"
    steps = {
        f"step{i}": Check(60, command=f"-c {shlex.quote(each)}") for i, each in enumerate(codes)
    }
    if end == "hang":
        steps[f"step{position}"] = steps[f"step{position}"]._replace(most_s=5)
    monkeypatch.setattr(gpu_check, "CALLS", {1: steps})
    monkeypatch.setattr(
        gpu_check,
        "exit_on_sigterm",
        lambda: signal.signal(signal.SIGTERM, lambda *_: sys.exit(143)),
    )
    caches = here / "cache" / "clap_ds" / "gpu_check"
    (caches / "triton").mkdir(parents=True)
    before = signal.getsignal(signal.SIGTERM)
    try:
        if state == "interrupted":
            with pytest.raises(SystemExit):
                gpu_check.main(["1", "--output", str(here / "out")])
        else:
            assert gpu_check.main(["1", "--output", str(here / "out")]) == 1
    finally:
        signal.signal(signal.SIGTERM, before)
    started = range(position + 1) if state == "interrupted" else range(3)
    states = ["completed"] * len(started)
    states[position] = state
    printed = capfd.readouterr().out
    rows = json.loads(
        (here / "runs" / "gpu_check" / "h100-80gb-hbm3" / "call1" / "table.json").read_text()
    )
    assert [row["state"] for row in rows] == states
    table = (here / "out" / "call1.md").read_text()
    restored = here / "restored"
    gpu_check.restore((here / "out").glob("*.tar.xz"), restored)
    for i in started:
        assert f"step{i} has rows" in printed
        assert f"step{i} " in table
        assert (restored / "call1" / f"step{i}" / "rows.md").read_text() == "row"
        assert (restored / caches.name / f"step{i}").exists()


def test_every_run_of_the_calls_is_a_run(tmp_path: Path) -> None:
    for step in (step for steps in CALLS.values() for step in steps.values()):
        config, *changes = shlex.split(step.run)
        content = changed(Path(config), [*gpu_check.SHORT.split(), *changes])
        (tmp_path / "run.json").write_text(json.dumps(content))
        load_run(tmp_path / "run.json", 1)
    assert {"test_triton_kernels", "test_window_attention"} <= CALLS[2].keys()


IMPORTS = """
import importlib, importlib.metadata, pkgutil, re, sys
from importlib.machinery import PathFinder
from pathlib import Path
import clap_ds
from benchmarks.gpu_check import CALLS

def plain(name):
    return re.match("[A-Za-z0-9._-]+", name)[0].lower().replace("_", "-")

def require(name):
    if name in there:
        return
    there.add(name)
    try:
        requirements = importlib.metadata.requires(name) or ()
    except importlib.metadata.PackageNotFoundError:
        return
    for requirement in requirements:
        if "extra ==" not in requirement:
            require(plain(requirement))

there = set()
for name in ("torch", "torchaudio", "transformers", "triton"):
    require(name)
checked = re.search("^CHECKED := (.*)", Path("Makefile").read_text(), re.MULTILINE)[1]
there |= {"deepspeed", *map(plain, checked.split("|"))}
providers = importlib.metadata.packages_distributions()

finders = [*sys.meta_path]

class Finder:
    def find_spec(self, module, *place):
        if module in providers and there.isdisjoint(map(plain, providers[module])):
            return None
        return next(filter(None, (finder.find_spec(module, *place) for finder in finders)), None)

    def find_distributions(self, context):
        found = PathFinder.find_distributions(context)
        return (each for each in found if plain(each.name) in there)

sys.meta_path[:] = [Finder()]
commands = [step.command.split() for steps in CALLS.values() for step in steps.values()]
modules = {command[1] for command in commands if command[0] == "-m"} | {"clap_ds.data.webdataset", "tests.conftest"}
files = [Path(command[-1]).relative_to(Path.cwd()) for command in commands if command[1] == "pytest"]
modules |= {".".join(file.with_suffix("").parts) for file in files}
for package in ("model", "engine", "throughput_bench", "metrics", "run_records"):
    path = f"{clap_ds.__path__[0]}/{package}"
    modules |= {each.name for each in pkgutil.walk_packages([path], f"clap_ds.{package}.")}
for module in sorted(modules):
    importlib.import_module(module)
assert "tensorboard" not in sys.modules
"""


@pytest.mark.end_to_end
def test_all_modules_of_the_calls_import_with_the_packages_that_a_gpu_machine_has() -> None:
    """Those are torch, torchaudio, transformers, what they require, and the Makefile's
    `CHECKED`."""
    ended = subprocess.run(
        [sys.executable, "-c", IMPORTS], cwd=ROOT, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr


@pytest.mark.end_to_end
def test_profile_and_its_shares_on_a_stand_in(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    profiled = {
        name: CALLS[2][name]._replace(most_s=200)
        for name in ("compile_off", "profile_eager", "efficiencies")
    }
    monkeypatch.setattr(gpu_check, "CALLS", {1: profiled})
    assert gpu_check.main(["1", "--output", str(here / "out")]) == 0
    with tarfile.open(here / "out" / "call1_compile_off.tar.xz") as archive:
        archived = {
            Path(name).name
            for name in archive.getnames()
            if fnmatch(name, "call1/compile_off/run-*")
        }
    assert {*RECORD_FILES, "rank0.log"} <= archived
    archives = ["call1_efficiencies.tar.xz", "call1_profile_eager.tar.xz"]
    assert {"call1.md", "efficiencies.json", *archives} <= {*os.listdir(here / "out")}
    classes = json.loads((here / "out" / "efficiencies.json").read_text())["classes"]
    assert {"thin product", "element-wise", "narrow norm", "optimizer"} <= classes.keys()
    assert all(
        0 < each["efficiency"] < 1 for each in classes.values()
    )  # a CPU relative to an H100's data sheet
