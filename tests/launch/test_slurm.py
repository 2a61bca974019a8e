"""Parsing of SLURM's times, partitions and states, failing commands, and requeueing."""

import pytest

from clap_ds.launch.slurm import (
    Partition,
    find_jobs,
    list_partitions,
    parse_seconds,
    requeue,
    require_commands,
    run_slurm,
    without_spares,
)
from clap_ds.utils.errors import UserError
from tests.launch.conftest import FakeSlurm


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("2", 120), ("1:30", 90), ("00:15:00", 900), ("1-12:30", 131400)],
)
def test_time_of_slurm_in_seconds(text, seconds):
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "soon", "0", "1:2:3:4"])
def test_malformed_time_is_rejected(text):
    with pytest.raises(UserError, match="expected a"):
        parse_seconds(text)


def test_partition_has_the_most_gpus_of_its_nodes(slurm):
    a = "a*|gpu:h100:4(S:0-1),nvme:1|1-00:00:00|6\na*|gpu:2|1-00:00:00|1\n"
    slurm.write("partitions", f"{a}b|(null)|infinite|3\n")
    assert list_partitions(None) == [Partition(4, 7, "1-00:00:00")]
    assert list_partitions("b") == [Partition(0, 3, None)]
    assert len(list_partitions("b,a")) == 2


def test_failing_command_is_tried_three_times(slurm):
    slurm.write_program("squeue", "echo >> tries; echo 'error: no route' >&2; exit 1")
    with pytest.raises(UserError, match="no route"):
        run_slurm(["squeue", "-h"])
    assert len(slurm.lines("tries")) == 3
    slurm.write_program(
        "squeue", "echo >> tries; [ $(wc -l < tries) = 6 ] && echo '7|RUNNING|None'"
    )
    assert find_jobs([])["7"].state == "RUNNING", "one of three tries must succeed"


def test_controller_that_is_down_is_named(slurm):
    slurm.write_program("sinfo", "echo 'Unable to contact slurm controller' >&2; exit 1")
    with pytest.raises(UserError, match="scontrol ping"):
        list_partitions(None)


def test_command_that_setup_has_hidden_is_named(slurm, monkeypatch):
    monkeypatch.setenv("PATH", str(slurm.folder))  # without srun and scancel
    with pytest.raises(UserError, match=r"^srun, scancel: not in PATH on .* after `setup`"):
        require_commands()


def test_error_without_slurm_names_the_login_node(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match=r"sinfo not found.*login node.*deepspeed --hostfile"):
        list_partitions(None)


@pytest.fixture
def job(slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    """A fake SLURM with this process's job, in its second start."""
    monkeypatch.setenv("SLURM_JOB_ID", "42")
    slurm.write("job", "JobId=42 JobState=RUNNING Requeue=1 Restarts=1 BatchFlag=1")
    slurm.write("queue", "n[8-9]\n")
    slurm.write("partitions", "n1 idle\nn3 down*\n")
    return slurm


@pytest.mark.parametrize("answer", ["JobState=RUNNING Restarts=2", "JobState=CANCELLED Restarts=1"])
def test_start_that_slurm_has_ended_requeues_nothing(job, answer):
    job.write("job", f"JobId=42 {answer} BatchFlag=1")
    assert "has ended start 1" in str(requeue(1, []))
    assert job.lines("asked") == []


@pytest.mark.parametrize(
    ("excluded", "changes", "updates"),
    [
        ([], "", []),
        # SLURM itself avoids hosts that are down.
        (["n1", "n3"], "", ["update JobId=42 ExcNodeList=n[8-9],n1"]),
        (["n3"], without_spares(2, 4), ["update JobId=42 NumNodes=2 NumTasks=8 NumCPUs=1"]),
    ],
)
def test_requeue_comes_before_changes_of_the_job(job, excluded, changes, updates):
    assert requeue(1, excluded, changes) is None
    assert job.lines("asked") == ["requeue 42", *updates]


def test_error_of_requeueing_is_returned(job):
    script = '[ "$1" != requeue ] || { echo disabled >&2; exit 1; }; cat job'
    job.write_program("scontrol", script)
    assert requeue(1, ["n1"]) == "scontrol requeue 42: disabled"
