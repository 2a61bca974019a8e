"""Command lines of the launchers, and what DeepSpeed's own parser makes of them."""

import os
import shlex
from pathlib import Path

import pytest

from clap_ds.config.errors import UserError
from clap_ds.launch.launchers import Launcher, default_launcher

HOSTS = {"n1": 4, "n3": 4}
WORDS = ["clap_ds/bench.py", "--deepspeed_config", "my run.json"]


def test_slurm_is_one_srun_on_these_hosts() -> None:
    launcher = Launcher("slurm", "py", ["--mpi=none"], cpu_bind="cores", cpus_per_task=8, attempt="7.ab.0")
    command = launcher.command(HOSTS, Path("H"), 17000, WORDS)
    assert command[:3] == ["py", "-m", "deepspeed.launcher.runner"]
    assert command[-3:] == WORDS
    # As deepspeed reads it: what else is a word that begins with dashes would be an option of its own.
    from deepspeed.launcher.runner import parse_args

    read = parse_args(command[3:])
    assert (read.hostfile, read.launcher, read.force_multi, read.no_ssh_check) == ("H", "slurm", True, True)
    assert (read.master_addr, read.master_port) == ("n1", 17000)
    assert (read.user_script, read.user_args) == (WORDS[0], WORDS[1:])
    step = shlex.split(read.launcher_args)
    assert {"--nodelist=n1,n3", "--nodes=2", "--ntasks-per-node=4", "--kill-on-bad-exit=1"} <= {*step}
    assert {"--cpus-per-task=8", "--cpu-bind=cores", "--mpi=none", "--job-name=7.ab.0"} <= {*step}


def test_pdsh_binds_by_deepspeed_and_alone_takes_uneven_hosts() -> None:
    uneven = {"n1": 4, "n2": 2}
    command = Launcher("pdsh", cpu_bind="cores").command(uneven, Path("H"), 17000, WORDS)
    assert command[command.index("--launcher") + 1] == "pdsh"
    assert "--bind_cores_to_rank" in command
    assert not any(word.startswith("--launcher_args") for word in command)
    for name in ("slurm", "torchrun"):
        with pytest.raises(UserError, match="as many ranks on every host"):
            Launcher(name).command(uneven, Path("H"), 17000, WORDS)


def test_torchrun_has_one_task_on_a_host_with_all_its_cores() -> None:
    launcher = Launcher("torchrun", "python3", cpus_per_task=8, wrapper=["apptainer", "exec", "a.sif"])
    command = launcher.command(HOSTS, Path("H"), 17000, WORDS)
    assert command[0] == "srun"
    assert {"--ntasks=2", "--ntasks-per-node=1", "--cpus-per-task=32", "--nodelist=n1,n3"} <= {*command}
    at = command.index("apptainer")
    assert command[at : at + 6] == ["apptainer", "exec", "a.sif", "python3", "-u", "-m"]
    assert {"--nnodes=2", "--nproc_per_node=4", "--rdzv_endpoint=n1:17000"} <= {*command[at:]}
    assert "SIGUSR1" in next(word for word in command if word.startswith("--signals-to-handle="))


def test_only_pdsh_writes_variables_to_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIST", "Tree,Ring two; rm")
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert "DS_ENV_FILE" not in Launcher("slurm", passed=["LIST"]).environment(tmp_path)
    assert [*tmp_path.iterdir()] == []
    environment = Launcher("pdsh", passed=["LIST", "NOT_SET"]).environment(tmp_path)
    assert Path(environment["DS_ENV_FILE"]).read_text() == "LIST='Tree,Ring two; rm'\n"
    assert environment["HF_TOKEN"] == "secret"
    assert environment["PYTHONPATH"].split(os.pathsep)[0] == str(Path(__file__).resolve().parents[2])
    assert "ServerAliveInterval" in environment["PDSH_SSH_ARGS_APPEND"]


def test_default_is_slurm_where_it_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert default_launcher() == "pdsh"
    (tmp_path / "srun").touch(0o755)
    assert default_launcher() == "slurm"
