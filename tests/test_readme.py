"""The commands of README and docs/ work as typed: each is run here, or has its configuration checked, or names the test that
runs it. A command that stands there and not in this table fails the test.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from clap_ds.config.settings import load_run
from clap_ds.training.checks import problems_for_training

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    name: (ROOT / name).read_text(encoding="utf-8")
    for name in ("README.md", "docs/cluster.md", "docs/data.md", "docs/training.md", "docs/numbers.md")
}
BLOCKS, JSON_BLOCKS = (
    [
        block
        for page in PAGES.values()
        for block in re.findall(rf"^```{kind}\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    ]
    for kind in ("console", "json")
)
COMMANDS = [
    re.split(r"\s{2,}#", line)[0].removeprefix("$ ").strip()
    for block in BLOCKS
    for line in block.splitlines()
    if line.startswith("$ ")
]

RUN = "run here, in the pages' order"
LOAD = "full-sized: its programs, script and configuration are checked"
BY_HAND = "installs from the network, or is the test run itself"
NEWCOMER = "tests/training/test_newcomer_path.py::test_from_sounds_to_an_exported_model"
SWEEP = "tests/launch/test_sweep.py::test_status_and_resume"
REPORT = "tests/analysis/test_report.py"

TABLE = {
    "make bench": "tests/dist/test_accelerator.py::test_make_bench_on_the_cpus",
    "make test": BY_HAND,
    "python3 -m venv .venv": BY_HAND,
    ".venv/bin/pip install torch==2.13.0 torchaudio==2.11.0 --index-url URL": BY_HAND,
    "make setup": BY_HAND,
    "make setup && source .venv/bin/activate": BY_HAND,
    "deepspeed --hostfile H clap_ds/bench.py --deepspeed_config ds_configs/htsat_tiny.json": LOAD,
    "deepspeed clap_ds/bench.py --deepspeed_config ds_configs/htsat_base_amp.json": LOAD,
    "torchrun --standalone --nproc_per_node 4 clap_ds/bench.py --deepspeed_config ds_configs/htsat_tiny.json": LOAD,
    "python clap_ds/bench.py --deepspeed_config ds_configs/htsat_tiny.json": LOAD,
    "python -m benchmarks.variants ds_configs/htsat_tiny.json --vary clap.compile=off,step"
    " --vary clap.model.attention=auto,triton": "tests/benchmarks/test_variants.py::test_all_combinations_in_order",
    "python -m examples.synthetic_sounds runs/sounds --clips 64 --shards 4": RUN,
    "deepspeed --num_gpus 2 clap_ds/bench.py --deepspeed_config ds_configs/htsat_tiny_shards_cpu.json": LOAD,
    "git clone URL clap-ds && cd clap-ds": BY_HAND,
    "cp launch/clusters/generic.json launch/clusters/mine.json": RUN,
    "python launch/sites.py check mine": RUN,
    "salloc -N2 --gpus-per-node=4 --ntasks-per-node=4 python launch/preflight.py --site mine": (
        "tests/cluster/test_preflight_on_cluster.py::test_healthy_cluster"
    ),
    "python launch/sweep.py --site mine --config ds_configs/htsat_tiny.json --nodes 1 2 4 8 --repeats 3": (
        "tests/cluster/test_sweep_on_cluster.py::test_three_scales_status_and_resume"
    ),
    "python launch/sweep.py status runs/sweeps/htsat_tiny-…": SWEEP,
    "python launch/sweep.py resume runs/sweeps/htsat_tiny-…": SWEEP,
    "pip install --no-index --find-links wheelhouse 'clap-ds[train,analysis]'": (
        "tests/test_wheelhouse.py::test_installs_and_runs_without_an_index"
    ),
    "deepspeed --hostfile H clap_ds/train.py --deepspeed_config my_run.json": LOAD,
    "sbatch --nodes=8 --gres=gpu:4 launch/train.sbatch --site mine --config my_run.json": (
        "tests/cluster/test_training_on_cluster.py::test_a_job_told_to_stop_saves_and_the_next_one_goes_on"
    ),
    "python -m clap_ds.data.build clips.csv shards --held_out 0.1 --shards 16": NEWCOMER,
    "deepspeed clap_ds/train.py --deepspeed_config my_run.json": NEWCOMER,
    "python clap_ds/evaluate.py runs/my_run-checkpoints --retrieval 'shards/held_out-*.tar'": NEWCOMER,
    "python -m clap_ds.weights.export runs/my_run-checkpoints my_clap": NEWCOMER,
    "python analysis/efficiency.py runs/* --csv table.csv": RUN,
    "python analysis/plot_scaling.py table.csv --output scaling.png": RUN,
    "python analysis/project.py table.csv --output projection.png": RUN,
    "python analysis/compare.py runs/before runs/after": RUN,
    "python analysis/cost.py table.csv --samples 2e9 --price_per_gpu_hour 2.5 --deadline_hours 48": RUN,
    'make report RUNS="runs/…"': REPORT,
}


def test_every_command_is_accounted_for() -> None:
    assert [command for command in COMMANDS if command not in TABLE] == [], "say in TABLE how these are tested"
    assert [command for command in TABLE if command not in COMMANDS] == [], "no longer there"
    # A line of another sort would go unseen.
    assert all(line.startswith("$ ") for block in BLOCKS for line in block.splitlines())


@pytest.mark.parametrize("test", sorted({test for test in TABLE.values() if test.startswith("tests/")}))
def test_the_tests_named_are_there(test: str) -> None:
    path, _, name = test.partition("::")
    assert f"def {name or 'test_'}" in (ROOT / path).read_text(encoding="utf-8")


def test_pins_are_those_of_the_constraints() -> None:
    constraints = (ROOT / "constraints.txt").read_text().split()
    pins = [word for command in COMMANDS for word in command.split() if re.fullmatch(r"[\w-]+==[\w.]+", word)]
    assert pins
    assert set(pins) <= set(constraints)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout, as cloned, but for the runs that README's analysis is of."""
    folder = tmp_path_factory.mktemp("clone") / "clap-ds"
    left_out = shutil.ignore_patterns(".*", "runs", "wheelhouse", "build", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, folder, symlinks=True, ignore=left_out)
    for block in JSON_BLOCKS:
        (folder / "my_run.json").write_text(block)  # at last the one for training
    recorded = ROOT / "tests" / "analysis" / "data" / "record_2ranks"
    for name, num_nodes in {"nodes1": 1, "nodes2": 2, "nodes4": 4, "before": 1, "after": 1}.items():
        shutil.copytree(recorded, folder / "runs" / name)
        summary = json.loads((recorded / "summary.json").read_text())
        summary |= {"num_nodes": num_nodes, "world_size": 2 * num_nodes, "global_batch": 8 * num_nodes}
        (folder / "runs" / name / "summary.json").write_text(json.dumps(summary))
    return folder


def active_environment() -> dict[str, str]:
    """As `source .venv/bin/activate` leaves it."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}


def test_links_lead_somewhere() -> None:
    broken = [
        (name, target)
        for name, page in PAGES.items()
        for target in re.findall(r"\]\(([^)#:]+)\)", page)
        if not (ROOT / name).parent.joinpath(target).exists()
    ]
    assert broken == []


@pytest.mark.end_to_end
def test_commands_run_one_after_the_other(checkout: Path) -> None:
    environment = {**active_environment(), "PYTHONPATH": str(checkout)}
    for command in (command for command in COMMANDS if TABLE.get(command) == RUN):
        done = subprocess.run(
            ["bash", "-c", command], cwd=checkout, env=environment, capture_output=True, text=True, timeout=60
        )
        shown = f"$ {command}\n{done.stdout}{done.stderr}"
        assert done.returncode == 0, shown
        assert "Traceback" not in shown
        for output in re.findall(r"--(?:output|csv) (\S+)", command):
            assert (checkout / output).stat().st_size > 0, shown
    heavy = "ds_configs/htsat_tiny_shards_cpu.json"
    data = load_run(checkout / heavy).clap.data
    assert list(checkout.glob(str(getattr(data, "shards", None)))), f"{heavy} finds no shards where README makes them"


@pytest.mark.parametrize("command", [command for command, how in TABLE.items() if how == LOAD])
def test_programs_scripts_and_configurations_are_there(command: str, checkout: Path) -> None:
    program, *arguments = shlex.split(command)
    found = shutil.which(program, path=active_environment()["PATH"])
    assert found is not None
    assert Path(found).parent == Path(sys.executable).parent
    script = next(word for word in arguments if word.endswith(".py"))
    assert (checkout / script).exists()
    run = load_run(checkout / arguments[arguments.index("--deepspeed_config") + 1])
    if script.endswith("train.py"):
        assert problems_for_training(run) == []


def test_configurations_shown_are_valid(tmp_path: Path) -> None:
    assert len(JSON_BLOCKS) == 2
    for block in JSON_BLOCKS:
        (tmp_path / "run.json").write_text(block)
        load_run(tmp_path / "run.json")
