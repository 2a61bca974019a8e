"""Ranks from launcher and SLURM variables, agreed errors, and signals at a rank's start."""

import json
import os
import platform
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

from clap_ds.distributed import init
from clap_ds.distributed.collectives import raise_on_all_ranks
from clap_ds.distributed.init import Ranks
from clap_ds.utils.errors import UserError
from tests import processes
from tests.conftest import ROOT
from tests.rank_pool import RankPool

PLACE = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "LOCAL_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)
STEP = {
    "SLURM_JOB_ID": "12", "SLURM_STEP_ID": "1", "SLURM_PROCID": "9", "SLURM_LOCALID": "1", "SLURM_NODEID": "2",
    "SLURM_STEP_NUM_TASKS": "10", "SLURM_STEP_NODELIST": "n[08-10]", "SLURM_STEP_TASKS_PER_NODE": "4(x2),2",
}  # fmt: skip
STEP_HOSTS = ("n08",) * 4 + ("n09",) * 4 + ("n10",) * 2
ONE_TASK = {
    **STEP, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_STEP_NODELIST": "n08",
}  # fmt: skip
BATCH_STEP = {"SLURM_JOB_ID": "12", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "8"}
ADDRESS = {"MASTER_ADDR": "n01", "MASTER_PORT": "28027"}
LAUNCHER = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", **ADDRESS}
MPIRUN = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1", "PMIX_RANK": "1"}
OTHERS = (*init.MPI_SIZES, *init.RANK_VARIABLES)
ALONE = Ranks(0, 1, 0, 1)


def set_launcher(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    """Set exactly these variables of launchers."""
    for name in [*PLACE, *OTHERS, *(name for name in os.environ if name.startswith("SLURM"))]:
        monkeypatch.setenv(name, "")  # restored after the test
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("given", "expected", "address"),
    [
        ({}, ALONE, None),
        (LAUNCHER, Ranks(3, 4, 1, 2), "n01"),  # torchrun
        (
            {**LAUNCHER, **MPIRUN},
            Ranks(3, 4, 1, 2),
            "n01",
        ),  # torchrun on each host, started by mpirun
        (
            {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_SIZE": "4", **ADDRESS},
            Ranks(5, 8, 1, 4),
            "n01",
        ),
        ({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}, ALONE, None),
        (
            {**MPIRUN, "OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0", "PMIX_RANK": "0"},
            ALONE,
            None,
        ),
        (ADDRESS, ALONE, "n01"),  # a job's script exports them
        ({**BATCH_STEP, "SLURM_STEP_ID": str(2**32 - 5)}, ALONE, None),
        (STEP, Ranks(9, 10, 1, 2, STEP_HOSTS), "n08"),
        (
            {**STEP, "PMI_SIZE": "10", "PMI_RANK": "9"},
            Ranks(9, 10, 1, 2, STEP_HOSTS),
            "n08",
        ),  # srun --mpi=pmi2
        ({**STEP, **LAUNCHER}, Ranks(3, 4, 1, 2), "n01"),  # a launcher takes precedence
        (ONE_TASK, Ranks(0, 1, 0, 1, ("n08",)), None),
        (BATCH_STEP, ALONE, None),
    ],
)
def test_place_from_launchers_and_slurm(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], expected: Ranks, address: str | None
) -> None:
    set_launcher(monkeypatch, given)
    assert Ranks.from_environment() == expected
    assert os.environ.get("MASTER_ADDR") == address
    # Every rank of a step computes the same port.
    assert os.environ.get("MASTER_PORT") == (None if address is None else "28027")
    # RANK is set only for ranks.
    assert ("RANK" in os.environ) == ("RANK" in given or given.get("SLURM_STEP_ID") == "1")


@pytest.mark.parametrize(
    ("name", "variables"),
    [
        ("OMPI_COMM_WORLD_SIZE=2", MPIRUN),
        ("PMI_SIZE=4", {"PMI_SIZE": "4", "PMI_RANK": "0"}),
        ("PMIX_RANK=1", {"PMIX_RANK": "1"}),
        ("OMPI_COMM_WORLD_SIZE=2", {**ONE_TASK, **MPIRUN}),  # mpirun in an interactive step
        ("OMPI_COMM_WORLD_SIZE=2", {**BATCH_STEP, **MPIRUN}),
        ("SLURM_NTASKS=8", {**BATCH_STEP, "SLURM_STEP_ID": "0"}),
        ("WORLD_SIZE=2", {"WORLD_SIZE": "2"}),
        ("WORLD_SIZE=x", {"WORLD_SIZE": "x"}),
        ("LOCAL_RANK=1", {"LOCAL_RANK": "1"}),
        ("WORLD_SIZE", {"RANK": "0"}),
        ("WORLD_SIZE", {**LAUNCHER, "WORLD_SIZE": "4.0"}),
        ("RANK", {**LAUNCHER, "RANK": "x"}),
        ("RANK", {**LAUNCHER, "RANK": "-1"}),
        ("RANK", {**LAUNCHER, "RANK": "4"}),
        ("LOCAL_RANK", {**LAUNCHER, "LOCAL_RANK": ""}),
        ("LOCAL_RANK", {**LAUNCHER, "LOCAL_RANK": "2"}),
        ("LOCAL_WORLD_SIZE", {**LAUNCHER, "LOCAL_WORLD_SIZE": "two"}),
        ("MASTER_ADDR", {**LAUNCHER, "MASTER_ADDR": ""}),
        ("MASTER_PORT", {**LAUNCHER, "MASTER_PORT": ""}),
        ("MASTER_PORT", {**LAUNCHER, "MASTER_PORT": "http"}),
        ("MASTER_PORT", {**LAUNCHER, "MASTER_PORT": "65536"}),
        ("SLURM_STEP_NUM_TASKS", {**STEP, "SLURM_STEP_NUM_TASKS": "many"}),
        ("SLURM_PROCID", {name: STEP[name] for name in STEP if name != "SLURM_PROCID"}),
    ],
)
def test_half_set_ranks_are_rejected_with_the_variable_and_launchers(
    monkeypatch: pytest.MonkeyPatch, name: str, variables: dict[str, str]
) -> None:
    set_launcher(monkeypatch, variables)
    with pytest.raises(UserError, match=rf"^{name}\b.*deepspeed, torchrun or srun"):
        Ranks.from_environment()


def _agree(problem_rank: int | None) -> str | None:
    try:
        with raise_on_all_ranks():
            if problem_rank in (dist.get_rank(), -1):
                raise ValueError("broken")
    except UserError as error:
        return str(error)
    return None


def test_all_ranks_stop_with_the_problem_of_one(two_ranks: RankPool) -> None:
    assert two_ranks.run(_agree, None) == [None, None]
    assert two_ranks.run(_agree, 1) == ["rank 1: broken"] * 2
    assert two_ranks.run(_agree, -1) == ["broken"] * 2


COMMAND = """
import sys
from clap_ds.utils import errors
from clap_ds.distributed import init
init.RANK_0_SPEAKS_S = 0.1
def main(ranks):
    raise getattr(errors, sys.argv[1])("broken")
init.run_command(main)
"""


@pytest.mark.parametrize(
    ("rank", "error", "message"),
    [
        (0, "UserError", "error: broken\n"),
        (
            1,
            "UserError",
            f"error: {platform.node()}: rank 1: broken\n",
        ),  # unless a launcher has ended it
        (1, "CollectiveUserError", ""),
    ],
)
def test_a_mistake_is_shown_once_and_never_lost(rank: int, error: str, message: str) -> None:
    place = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), **ADDRESS}
    done = processes.run(["-c", COMMAND, error], env={**os.environ, **place})
    assert (done.returncode, done.stderr) == (2, message)


HOOK = """
import os, resource, sys

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == os.environ["AT_IMPORT_OF"]:
            print("core dumps:", resource.getrlimit(resource.RLIMIT_CORE)[0], flush=True)
            os.kill(os.getpid(), int(os.environ["SIGNAL"]))

sys.meta_path.insert(0, Interrupt())
"""
BEFORE = "pydantic"  # `run_command` hasn't begun
IMPORTS = (
    "clap_ds.run", "torch", "torch._C", "numpy", "torch.nn", "torch.utils.data", "torch.distributed",
    "torch.distributed.distributed_c10d", "torch.testing", "deepspeed", "deepspeed.comm", "clap_ds.run",
)  # fmt: skip
"""Moments of a start, in order; torch is half imported from the second on."""


@pytest.mark.end_to_end
@pytest.mark.parametrize(
    ("number", "module"),
    [
        *((signal.SIGTERM, module) for module in (BEFORE, *IMPORTS)),
        *((signal.SIGUSR1, module) for module in IMPORTS[3:6]),
        *(
            (number, module)
            for number in (signal.SIGKILL, signal.SIGSEGV)
            for module in IMPORTS[2:7:4]
        ),
    ],
)
def test_signal_during_imports_ends_the_rank_with_its_own_code_and_no_core_file(
    tmp_path: Path, write_run: Callable[..., Path], number: signal.Signals, module: str
) -> None:
    (tmp_path / "sitecustomize.py").write_text(HOOK)
    command = [
        ROOT / "clap_ds" / "bench.py",
        "--deepspeed_config",
        write_run(),
        "--job_folder",
        tmp_path,
    ]
    environment = {
        **os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}", "DS_ACCELERATOR": "cpu", "AT_IMPORT_OF": module,
        "SIGNAL": str(int(number)),
    }  # fmt: skip
    allowed = resource.getrlimit(resource.RLIMIT_CORE)[1]
    shell = ["prlimit", f"--core={allowed}:", sys.executable, *command]
    done = subprocess.run(shell, env=environment, cwd=tmp_path, capture_output=True, text=True)
    files = [json.loads(path.read_text()) for path in (tmp_path / "errors").glob("*")]
    is_recorded = module != BEFORE and number in (signal.SIGTERM, signal.SIGUSR1)
    assert done.returncode == (128 + number if is_recorded else -number), done.stderr
    assert [(file["kind"], file["message"]) for file in files] == [
        ("stopped", f"stopped by {number.name}")
    ] * is_recorded
    assert "Traceback" not in done.stderr
    if module != BEFORE:
        assert done.stdout == "core dumps: 0\n"
