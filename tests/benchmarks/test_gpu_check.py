"""States of steps and results of a call of the GPU check, with a micro model on CPUs."""

import fnmatch
import json
import os
import shlex
import signal
import subprocess
import sys
import tarfile
from contextlib import nullcontext
from pathlib import Path

import pytest

from benchmarks import gpu_check
from benchmarks.common import changed
from benchmarks.gpu_check import CALLS, Check
from clap_ds.config.settings import load_run
from clap_ds.run_records.schema import RECORD_FILES
from tests.processes import ROOT

MICRO = "clap.model.preset=micro train_micro_batch_size_per_gpu=4 clap.context_length=16 clap.cpu_kernels=off"


TABLE = Path("runs", "gpu_check", "h100-80gb-hbm3", "call1", "table.json")


@pytest.fixture
def work_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Run checks in this folder, with a micro model on CPUs that counts as a GPU."""
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        # Restored afterwards.
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    gpu = "NVIDIA H100 80GB HBM3, 81559 MiB, 550.54.15"
    monkeypatch.setattr(gpu_check, "nvidia_smi", lambda: [gpu])
    monkeypatch.setattr(gpu_check, "choose_accelerator", lambda: "cuda")
    monkeypatch.setattr(gpu_check, "SHORT", f"{gpu_check.SHORT} {MICRO}")
    monkeypatch.setattr(gpu_check, "work_folder", lambda: tmp_path)
    monkeypatch.setattr(gpu_check, "exit_on_sigterm", lambda: None)
    return tmp_path


def set_steps(monkeypatch: pytest.MonkeyPatch, *codes: str, most_s: float = 60) -> None:
    """Make call 1 run these Python codes."""
    steps = {}
    for number, code in enumerate(codes):
        steps[f"step{number}"] = Check(most_s, command=f"-c {shlex.quote(code)}")
    monkeypatch.setattr(gpu_check, "CALLS", {1: steps})


GOOD = """
import os
print('{folder} has rows', flush=True)
open('{folder}/rows.md', 'w').write('row')
open('{folder}/shard.tar', 'w')
open(os.environ['TRITON_CACHE_DIR'] + '/../{folder.name}', 'w')
"""


@pytest.mark.parametrize(
    ("code", "state", "note"),
    [
        ("import time; time.sleep(60)", "stopped after 5 s", "has rows"),
        ("raise ValueError('a|b')", "exit code 1", "ValueError: a/b"),
        # The whole call is ended.
        ("import time; os.kill(PID_OF_TEST, 15); time.sleep(60)", "interrupted", ""),
    ],
)
def test_step_that_ends_badly_is_a_row_and_all_results_are_saved(
    work_dir, monkeypatch, capfd, code, state, note
):
    bad_step = GOOD + code.replace("PID_OF_TEST", str(os.getpid()))
    set_steps(monkeypatch, GOOD, bad_step, GOOD, most_s=5)
    (work_dir / "cache" / "clap_ds" / "gpu_check" / "triton").mkdir(parents=True)
    is_interrupted = state == "interrupted"
    handler = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        with pytest.raises(SystemExit) if is_interrupted else nullcontext():
            assert gpu_check.main(["1", "--output", str(work_dir / "out")]) == 1
    finally:
        signal.signal(signal.SIGTERM, handler)
    rows = json.loads((work_dir / TABLE).read_text())
    states = ["completed", state] if is_interrupted else ["completed", state, "completed"]
    assert [row["state"] for row in rows] == states
    assert note in rows[1].get("note", "")
    printed = capfd.readouterr().out
    restored = work_dir / "restored"
    gpu_check.restore((work_dir / "out").glob("*.tar.xz"), restored)
    for number, state in enumerate(states):
        assert f"step{number} has rows" in printed
        assert state in (work_dir / "out" / "call1.md").read_text()
        step = restored / "call1" / f"step{number}"
        assert (step / "rows.md").read_text() == "row"
        assert not (step / "shard.tar").exists()
        assert (restored / "gpu_check" / f"step{number}").exists()


@pytest.mark.parametrize(("num_gpus", "steps"), [(1, ["one"]), (4, ["one", "all"])])
def test_all_gpus_are_compared_if_there_are_several(work_dir, monkeypatch, num_gpus, steps):
    gpus = gpu_check.nvidia_smi() * num_gpus
    monkeypatch.setattr(gpu_check, "nvidia_smi", lambda: gpus)
    checks = {
        "one": Check(60, command="-c pass"),
        "all": Check(60, command='-c "assert {num_gpus} == 4"', least_gpus=2),
    }
    monkeypatch.setattr(gpu_check, "CALLS", {1: checks})
    assert gpu_check.main(["1", "--output", str(work_dir / "out")]) == 0
    rows = json.loads((work_dir / TABLE).read_text())
    assert [row["step"] for row in rows] == steps


def test_configurations_of_all_calls_are_valid(tmp_path):
    for steps in CALLS.values():
        for step in steps.values():
            config, *changes = shlex.split(step.run)
            content = changed(Path(config), [*gpu_check.SHORT.split(), *changes])
            (tmp_path / "run.json").write_text(json.dumps(content))
            load_run(tmp_path / "run.json", 1)
    assert {"test_triton_kernels", "test_engine"} <= CALLS[2].keys()


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
        return (package for package in found if plain(package.name) in there)

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
def test_modules_of_all_calls_import_with_the_packages_of_a_gpu_machine():
    """Those are torch, torchaudio, transformers, what they require, and the Makefile's
    `CHECKED`."""
    command = [sys.executable, "-c", IMPORTS]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr


@pytest.mark.end_to_end
def test_profile_has_efficiencies(work_dir, monkeypatch):
    names = ("compile_off", "profile_eager", "efficiencies")
    steps = {name: CALLS[2][name]._replace(most_s=200) for name in names}
    monkeypatch.setattr(gpu_check, "CALLS", {1: steps})
    results = work_dir / "out"
    assert gpu_check.main(["1", "--output", str(results)]) == 0
    with tarfile.open(results / "call1_compile_off.tar.xz") as archive:
        run_files = fnmatch.filter(archive.getnames(), "call1/compile_off/run-*")
    assert {*RECORD_FILES, "rank0.log"} <= {Path(name).name for name in run_files}
    classes = json.loads((results / "efficiencies.json").read_text())["classes"]
    assert {"thin product", "element-wise", "narrow norm", "optimizer"} <= classes.keys()
    # A CPU's, relative to an H100's data sheet.
    assert all(0 < figures["efficiency"] < 1 for figures in classes.values())
