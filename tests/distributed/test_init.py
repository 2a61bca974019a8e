"""Ranks from launcher and SLURM variables, user errors, and signals at a rank's start."""

import json
import os
import platform
import signal
import subprocess
import sys

import pytest

from clap_ds.distributed import init
from clap_ds.distributed.init import Ranks
from clap_ds.utils.errors import UserError
from tests import processes
from tests.conftest import ROOT

STEP = {
    "SLURM_JOB_ID": "12", "SLURM_STEP_ID": "1", "SLURM_PROCID": "9", "SLURM_LOCALID": "1", "SLURM_NODEID": "2",
    "SLURM_STEP_NUM_TASKS": "10", "SLURM_STEP_NODELIST": "n[08-10]", "SLURM_STEP_TASKS_PER_NODE": "4(x2),2",
}  # fmt: skip
STEP_HOSTS = ("n08",) * 4 + ("n09",) * 4 + ("n10",) * 2
STEP_RANKS = Ranks(9, 10, 1, 2, STEP_HOSTS)
ONE_TASK = {
    **STEP, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_STEP_NODELIST": "n08",
}  # fmt: skip
BATCH_STEP = {"SLURM_JOB_ID": "12", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "8"}
ADDRESS = {"MASTER_ADDR": "n01", "MASTER_PORT": "28027"}
TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", **ADDRESS}
DEEPSPEED = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_SIZE": "4", **ADDRESS}
MPIRUN = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1", "PMIX_RANK": "1"}
SINGLE_RANK = Ranks(0, 1, 0, 1)
VARIABLES = (
    *init.MPI_SIZES, *init.RANK_VARIABLES, "WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT",
)  # fmt: skip


def set_launcher(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    """Set exactly these variables of launchers."""
    for name in [*VARIABLES, *(name for name in os.environ if name.startswith("SLURM"))]:
        monkeypatch.setenv(name, "")  # restored after the test
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("variables", "expected", "address"),
    [
        ({}, SINGLE_RANK, None),
        (TORCHRUN, Ranks(3, 4, 1, 2), "n01"),
        (DEEPSPEED, Ranks(5, 8, 1, 4), "n01"),
        ({**TORCHRUN, **STEP}, Ranks(3, 4, 1, 2), "n01"),
        (ADDRESS, SINGLE_RANK, "n01"),  # a job's script exports them
        ({**STEP, "PMI_SIZE": "10", "PMI_RANK": "9"}, STEP_RANKS, "n08"),  # srun --mpi=pmi2
        (ONE_TASK, Ranks(0, 1, 0, 1, ("n08",)), None),
        ({**BATCH_STEP, "SLURM_STEP_ID": str(2**32 - 5)}, SINGLE_RANK, None),
    ],
)
def test_ranks_from_variables_of_launchers_and_slurm(monkeypatch, variables, expected, address):
    set_launcher(monkeypatch, variables)
    assert Ranks.from_environment() == expected
    assert os.environ.get("MASTER_ADDR") == address
    # Every rank of a step computes the same port.
    assert os.environ.get("MASTER_PORT") == (None if address is None else "28027")
    # RANK is set only for ranks.
    is_step = "SLURM_STEP_NUM_TASKS" in variables
    assert ("RANK" in os.environ) == ("RANK" in variables or is_step)


@pytest.mark.parametrize(
    ("name", "variables"),
    [
        ("OMPI_COMM_WORLD_SIZE=2", MPIRUN),
        ("OMPI_COMM_WORLD_SIZE=2", {**ONE_TASK, **MPIRUN}),  # mpirun in an interactive step
        ("SLURM_NTASKS=8", {**BATCH_STEP, "SLURM_STEP_ID": "0"}),
        ("LOCAL_RANK=1", {"LOCAL_RANK": "1"}),
        ("WORLD_SIZE", {"RANK": "0"}),
        ("WORLD_SIZE", {**TORCHRUN, "WORLD_SIZE": "4.0"}),
        ("RANK", {**TORCHRUN, "RANK": "4"}),
        ("MASTER_ADDR", {**TORCHRUN, "MASTER_ADDR": ""}),
        ("SLURM_PROCID", {name: STEP[name] for name in STEP if name != "SLURM_PROCID"}),
    ],
)
def test_inconsistent_variables_are_rejected_with_name_and_launchers(monkeypatch, name, variables):
    set_launcher(monkeypatch, variables)
    with pytest.raises(UserError, match=rf"^{name}\b.*deepspeed, torchrun or srun"):
        Ranks.from_environment()


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
        # Unless a launcher has ended it.
        (1, "UserError", f"error: {platform.node()}: rank 1: broken\n"),
        (1, "CollectiveUserError", ""),
    ],
)
def test_user_error_is_printed_once(rank, error, message):
    launcher = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), **ADDRESS}
    done = processes.run(["-c", COMMAND, error], env={**os.environ, **launcher})
    assert (done.returncode, done.stderr) == (2, message)


# Prints the limit of core dumps and sends a signal at the import of a module.
HOOK = """
import os, resource, sys

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == os.environ["AT_IMPORT_OF"]:
            print("core dumps:", resource.getrlimit(resource.RLIMIT_CORE)[0], flush=True)
            os.kill(os.getpid(), int(os.environ["SIGNAL"]))

sys.meta_path.insert(0, Interrupt())
"""
BEFORE_RUN_COMMAND = "pydantic"
# torch is half imported at the first.
MODULES = ("torch._C", "deepspeed")


@pytest.mark.end_to_end
@pytest.mark.parametrize(
    ("number", "module"),
    [
        (signal.SIGTERM, BEFORE_RUN_COMMAND),
        *((signal.SIGTERM, module) for module in MODULES),
        (signal.SIGSEGV, "torch.nn"),
    ],
)
def test_signal_during_imports_ends_the_rank_without_a_core_file(
    tmp_path, write_run, number, module
):
    (tmp_path / "sitecustomize.py").write_text(HOOK)
    options = ["--deepspeed_config", write_run(), "--job_folder", tmp_path]
    environment = {
        **os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}", "DS_ACCELERATOR": "cpu", "AT_IMPORT_OF": module,
        "SIGNAL": str(int(number)),
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, ROOT / "clap_ds" / "bench.py", *options],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    errors = [json.loads(path.read_text()) for path in (tmp_path / "errors").glob("*")]
    assert "Traceback" not in done.stderr
    if module != BEFORE_RUN_COMMAND:
        assert done.stdout == "core dumps: 0\n"
    if module == BEFORE_RUN_COMMAND or number == signal.SIGSEGV:
        assert (done.returncode, errors) == (-number, [])
    else:
        assert done.returncode == 128 + number, done.stderr
        assert [error["message"] for error in errors] == [f"stopped by {number.name}"]
