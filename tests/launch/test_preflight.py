"""Evaluation of ranks' reports, and command lines of the launchers, parsed by DeepSpeed's own parser.
tests/cluster/ runs preflight on a real SLURM."""

import json
import shlex
from pathlib import Path

import pytest
from deepspeed.launcher.runner import parse_args

from clap_ds.distributed.hostfile import PORTS
from clap_ds.launch.cluster_profile import ClusterProfile
from clap_ds.launch.launchers import launch_command
from clap_ds.launch.preflight import evaluate

SLOTS = {"n1": 1, "n2": 1, "n3": 1}
REFUSED = "Unable to create step for job 79: More processors requested than permitted"


def _write_reports(folder: Path, hosts: list[str], **odd_software: str) -> None:
    """Write the report of a rank on each of these hosts. `odd_software`: that of n2."""
    for rank, host in enumerate(hosts):
        software = {"commit": "dd3a5b2a", "code": "abc", "torch": "2.13.0"}
        if host == "n2":
            software |= odd_software
        report = {"host": host, "gpus": {f"GPU-{rank}": "H100"}, "faults": [], "software": software}
        (folder / f"rank-{rank:05}.json").write_text(json.dumps(report))


def test_hosts_are_described_and_those_that_differ_or_have_wrong_sums_named(tmp_path):
    _write_reports(tmp_path, ["n1", "n2", "n3"], code="x")
    measured = {"bus_gb_per_s": 1.5, "seconds": 0.25, "num_wrong": [0, 0, 5]}
    (tmp_path / "measured.json").write_text(json.dumps(measured))
    problems, lines = evaluate(SLOTS, 1, tmp_path)
    assert problems == [
        "problem: n2: code: x, elsewhere abc",
        "problem: n3: rank 2 has 5 wrong elements after an all-reduce",
    ]
    assert "n1  GPUs 1 × H100, torch 2.13.0, code dd3a5b2a" in "\n".join(lines)
    assert "all-reduce: 1.50 GB/s, 0.250 s" in lines


@pytest.mark.parametrize(
    ("hosts", "output", "problem"),
    [
        (["n1", "n3"], "", "n2: unreachable"),
        ([], "srun: error: n2: task 1: Exited with exit code 2\n", "n2: task 1: Exited"),
        ([], f"srun: error: {REFUSED}\n", REFUSED),
    ],
)
def test_host_that_starts_no_rank_is_named_unless_slurm_refuses_all(
    tmp_path, hosts, output, problem
):
    _write_reports(tmp_path, hosts)
    (tmp_path / "output").write_text(output)
    problems, _ = evaluate(SLOTS, 1, tmp_path)
    assert problem in "\n".join(problems)
    assert ("unreachable" in str(problems)) == bool(hosts)


SLOTS_OF_FOUR = {"n1": 4, "n3": 4}
WORDS = ["clap_ds/bench.py", "--deepspeed_config", "my run.json"]


def test_deepspeeds_launcher_starts_one_srun_on_these_hosts():
    profile = ClusterProfile(srun=["--mpi=none", "--cpu-bind=cores"], cpus_per_task=8)
    command = launch_command(profile, "py", SLOTS_OF_FOUR, Path("H"), WORDS, "7.0")
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


def test_torchrun_has_one_task_on_a_host_with_all_its_cores():
    container = ["apptainer", "exec", "a.sif"]
    profile = ClusterProfile(launcher="torchrun", cpus_per_task=8, wrapper=container)
    command = launch_command(profile, "python3", SLOTS_OF_FOUR, Path("H"), WORDS)
    assert command[0] == "srun"
    step = "--ntasks=2 --ntasks-per-node=1 --cpus-per-task=32 --nodelist=n1,n3"
    agent = "--nnodes=2 --nproc_per_node=4 --rdzv_backend=static"
    assert {*step.split(), *agent.split()} <= {*command}
    assert "apptainer exec a.sif python3 -u -m" in " ".join(command)
