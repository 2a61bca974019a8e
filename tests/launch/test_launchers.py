"""Command lines of the launchers, parsed by DeepSpeed's own parser."""

import shlex
from pathlib import Path

from clap_ds.distributed.hostfile import PORTS
from clap_ds.launch.cluster_profile import ClusterProfile
from clap_ds.launch.launchers import launch_command

HOSTS = {"n1": 4, "n3": 4}
WORDS = ["clap_ds/bench.py", "--deepspeed_config", "my run.json"]


def test_slurm_is_one_srun_on_these_hosts() -> None:
    from deepspeed.launcher.runner import parse_args

    site = ClusterProfile(srun=["--mpi=none", "--cpu-bind=cores"], cpus_per_task=8)
    command = launch_command(site, "py", HOSTS, Path("H"), WORDS, "7.0")
    assert command[:3] == ["py", "-m", "deepspeed.launcher.runner"]
    read = parse_args(command[3:])  # any other word with leading dashes would be an option
    assert (read.hostfile, read.launcher, read.force_multi, read.no_ssh_check) == (
        "H",
        "slurm",
        True,
        True,
    )
    assert (read.master_addr, read.master_port in PORTS) == ("n1", True)
    assert [read.user_script, *read.user_args] == WORDS
    step = {
        "--nodelist=n1,n3",
        "--nodes=2",
        "--ntasks-per-node=4",
        "--kill-on-bad-exit=1",
        "--cpus-per-task=8",
    }
    assert step | {"--cpu-bind=cores", "--mpi=none", "--job-name=7.0"} <= {
        *shlex.split(read.launcher_args)
    }


def test_torchrun_has_one_task_on_a_host_with_all_its_cores() -> None:
    site = ClusterProfile(
        launcher="torchrun", cpus_per_task=8, wrapper=["apptainer", "exec", "a.sif"]
    )
    command = launch_command(site, "python3", HOSTS, Path("H"), WORDS)
    assert command[0] == "srun"
    assert {"--ntasks=2", "--ntasks-per-node=1", "--cpus-per-task=32", "--nodelist=n1,n3"} <= {
        *command
    }
    assert "apptainer exec a.sif python3 -u -m" in " ".join(command)
    assert {"--nnodes=2", "--nproc_per_node=4", "--rdzv_backend=static"} <= {*command}
