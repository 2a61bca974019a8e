"""The commands of README and docs/ work as typed: each is run here, or has its configuration checked, or names the test that
runs it. A command for which no rule stands here fails the test.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import fsspec
import pytest

from clap_ds.config.settings import load_run
from clap_ds.launch.sites import load_site
from clap_ds.training.checks import problems_for_training

ROOT = Path(__file__).resolve().parents[1]
NAMES = ("README.md", "docs/cluster.md", "docs/data.md", "docs/training.md", "docs/coming_from.md", "docs/numbers.md")
ELSEWHERE = ("docs/recipes.md", "docs/using.md")  # typed by test_recipes, and by inference's and the commands' tests
PAGES = {name: (ROOT / name).read_text(encoding="utf-8") for name in (*NAMES, *ELSEWHERE)}
WALKTHROUGH = r"^## From clone to scaling plot\n.*?(?=^## )"
"""tests/cluster/test_walkthrough.py types its lines on a cluster."""


def _blocks(kind: str, *pages: str) -> list[str]:
    text = re.sub(WALKTHROUGH, "", "\n".join(PAGES[name] for name in pages), flags=re.MULTILINE | re.DOTALL)
    return re.findall(rf"^```{kind}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


BLOCKS, SITES = _blocks("console", *NAMES), _blocks("json", "docs/cluster.md")
JSON_BLOCKS = _blocks("json", *(name for name in NAMES if name != "docs/cluster.md"))
LINES = [line for block in BLOCKS for line in block.splitlines()]
COMMANDS = [re.split(r"\s{2,}#", line)[0].removeprefix("$ ").strip() for line in LINES]

RUN = "run here, in the pages' order"
LOAD = "full-sized: its programs, script and configuration are checked"
BY_HAND = "installs from the network, or is the test run itself"
RULES = {
    r"make (test|setup.*)|python3 -m venv \S+|\.venv/bin/pip install .*|git clone .*": BY_HAND,
    r"(deepspeed|torchrun|python) .*clap_ds/(bench|train)\.py --deepspeed_config \S+": LOAD,
    r"python analysis/.*|python -m examples\.synthetic_sounds .*|clap-shards (prepare|size|measure) .*": RUN,
    "salloc .*|clap-hostfile .*": "tests/cluster/test_jobs.py::test_deepspeeds_own_line",
    "(tar -cf|mkdir -p) .*clap-env.*": "tests/cluster/test_jobs.py::test_ranks_start_from_an_environment_on_their_nodes",
    "make bench": "tests/ranks/test_accelerator.py::test_make_bench_on_the_cpus",
    r"python -m benchmarks\.variants .*": "tests/benchmarks/test_variants.py::test_all_combinations_in_order",
    r"tar -xf results/.*|python -m benchmarks\.plan_validation .*": (
        "tests/benchmarks/test_plan_validation.py::test_every_class_has_the_share"
    ),
    r"python launch/submit\.py .*": "tests/launch/test_submit.py::test_everything_of_the_site_is_in_the_script",
    r"python launch/sweep\.py --site .* --train .*": "tests/launch/test_sweep.py::test_training_runs_for_a_day_or_as_",
    r"python launch/sweep\.py (status|resume) \S+( --.*)?": "tests/launch/test_sweep.py::test_status_and_resume",
    "pip install --no-index .*": "tests/test_wheelhouse.py::test_installs_and_runs_without_an_index",
    r"python launch/sweep\.py --site jupiter .*": "tests/launch/test_sweep.py::test_both_published_models_on_1_to_128_",
    r"clap-shards build .*|python (-m clap_ds\.weights\.export|clap_ds/evaluate\.py) .*": (
        "tests/training/test_newcomer_path.py::test_from_sounds_to_an_exported_model"
    ),
    "(apptainer|docker|enroot) .*": "tests/test_containers.py::test_both_recipes_install_the_same_by_constraints",
    r"SBATCH_TIMELIMIT=.* launch/shards\.sh .*": "tests/data/test_shard_parts.py::test_the_scripts_jobs_make_what_one",
    r'make report RUNS=".*"': "tests/analysis/test_report.py::test_",
}
HOW = {command: [how for rule, how in RULES.items() if re.fullmatch(rule, command)] for command in COMMANDS}


def test_every_command_is_accounted_for() -> None:
    assert {command: how for command, how in HOW.items() if len(how) != 1} == {}, "say in RULES how these are tested"
    assert {*RULES.values()} == {each for how in HOW.values() for each in how}, "no longer there"
    assert all(line.startswith("$ ") for line in LINES)
    for test in (how for how in RULES.values() if how.startswith("tests/")):
        path, _, name = test.partition("::")
        assert f"def {name}" in (ROOT / path).read_text(encoding="utf-8")


def test_pins_are_those_of_the_constraints() -> None:
    constraints = (ROOT / "constraints.txt").read_text().split()
    pins = [word for command in COMMANDS for word in command.split() if re.fullmatch(r"[\w-]+==[\w.]+", word)]
    assert pins
    assert set(pins) <= set(constraints)


def test_links_lead_somewhere() -> None:
    broken = [
        (name, target)
        for name, page in PAGES.items()
        for target in re.findall(r"\]\(([^)#:]+)\)", page)
        if not (ROOT / name).parent.joinpath(target).exists()
    ]
    assert broken == []


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the checkout, as cloned, but for the runs that README's analysis is of."""
    folder = tmp_path / "clap-ds"
    left_out = shutil.ignore_patterns(".*", "runs", "wheelhouse", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, folder, symlinks=True, ignore=left_out)
    recorded = ROOT / "tests" / "analysis" / "data" / "record_2ranks"
    for name, num_nodes in {"nodes1": 1, "nodes2": 2, "nodes4": 4, "before": 1, "after": 1}.items():
        shutil.copytree(recorded, folder / "runs" / name)
        summary = json.loads((recorded / "summary.json").read_text())
        summary |= {"num_nodes": num_nodes, "world_size": 2 * num_nodes, "global_batch": 8 * num_nodes}
        (folder / "runs" / name / "summary.json").write_text(json.dumps(summary))
    return folder


@pytest.mark.end_to_end
def test_commands_run_one_after_the_other(checkout: Path) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    own = {"PATH": path, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    for command in (command for command in COMMANDS if HOW[command] == [RUN]):
        shell = ["bash", "-c", command]
        done = subprocess.run(shell, cwd=checkout, env=os.environ | own, capture_output=True, text=True, timeout=300)
        shown = f"$ {command}\n{done.stdout}{done.stderr}"
        assert done.returncode == 0, shown
        assert "Traceback" not in shown
        for output in re.findall(r"--(?:output|csv) (\S+)", command):
            assert (checkout / output).stat().st_size > 0, shown
    heavy = "ds_configs/htsat_tiny_shards_cpu.json"
    data = load_run(checkout / heavy).clap.data
    assert list(checkout.glob(str(getattr(data, "shards", None)))), f"{heavy} finds no shards where README makes them"


@pytest.mark.parametrize("command", [command for command, how in HOW.items() if how == [LOAD]])
def test_programs_scripts_and_configurations_are_there(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fsspec, "get_filesystem_class", lambda protocol: None)  # as if s3:// had its package
    program, *words = shlex.split(command)
    assert (Path(sys.executable).parent / program).exists()
    script, config = next(word for word in words if word.endswith(".py")), words[words.index("--deepspeed_config") + 1]
    assert (ROOT / script).exists()
    (tmp_path / "my_run.json").write_text(JSON_BLOCKS[-1])  # the one for training
    run = load_run((tmp_path if config == "my_run.json" else ROOT) / config)
    assert not script.endswith("train.py") or problems_for_training(run) == []


def test_configurations_shown_are_valid(tmp_path: Path) -> None:
    assert (len(JSON_BLOCKS), len(SITES)) == (2, 4)
    for block in JSON_BLOCKS:
        (tmp_path / "run.json").write_text(block)
        load_run(tmp_path / "run.json")
    for block in SITES:
        (tmp_path / "site.json").write_text(block)
        load_site(str(tmp_path / "site.json"))
