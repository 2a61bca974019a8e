"""Command lines of the launchers, parsed by DeepSpeed's own parser."""

import shlex
from pathlib import Path

from clap_ds.distributed.hostfile import PORTS
from clap_ds.launch.cluster_profile import ClusterProfile
from clap_ds.launch.launchers import launch_command

SLOTS = {"n1": 4, "n3": 4}
WORDS = ["clap_ds/bench.py", "--deepspeed_config", "my run.json"]


def test_deepspeeds_launcher_starts_one_srun_on_these_hosts() -> None:
    from deepspeed.launcher.runner import parse_args

    profile = ClusterProfile(srun=["--mpi=none", "--cpu-bind=cores"], cpus_per_task=8)
    command = launch_command(profile, "py", SLOTS, Path("H"), WORDS, "7.0")
    assert command[:3] == ["py", "-m", "deepspeed.launcher.runner"]
    arguments = parse_args(command[3:])  # any other word with leading dashes would be an option
    assert (arguments.hostfile, arguments.launcher) == ("H", "slurm")
    assert arguments.force_multi
    assert arguments.no_ssh_check
    assert arguments.master_addr == "n1"
    assert arguments.master_port in PORTS
    assert [arguments.user_script, *arguments.user_args] == WORDS
    step = "--nodelist=n1,n3 --nodes=2 --ntasks-per-node=4 --kill-on-bad-exit=1 --cpus-per-task=8"
    of_profile = "--cpu-bind=cores --mpi=none --job-name=7.0"
    assert {*step.split(), *of_profile.split()} <= {*shlex.split(arguments.launcher_args)}


def test_torchrun_has_one_task_on_a_host_with_all_its_cores() -> None:
    container = ["apptainer", "exec", "a.sif"]
    profile = ClusterProfile(launcher="torchrun", cpus_per_task=8, wrapper=container)
    command = launch_command(profile, "python3", SLOTS, Path("H"), WORDS)
    assert command[0] == "srun"
    step = "--ntasks=2 --ntasks-per-node=1 --cpus-per-task=32 --nodelist=n1,n3"
    agent = "--nnodes=2 --nproc_per_node=4 --rdzv_backend=static"
    assert {*step.split(), *agent.split()} <= {*command}
    assert "apptainer exec a.sif python3 -u -m" in " ".join(command)
