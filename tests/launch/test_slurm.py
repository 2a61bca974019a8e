"""Parsing of SLURM's times, partitions and states, failing commands, and requeueing."""

from pathlib import Path

import pytest

from clap_ds.launch.slurm import (
    Partition,
    ask,
    find_jobs,
    partitions,
    requeue,
    require_commands,
    seconds_of,
    without_spares,
)
from clap_ds.utils.errors import UserError
from tests.launch.conftest import FakeSlurm


def test_times() -> None:
    times = {
        "2": 120,
        "1:30": 90,
        "00:15:00": 900,
        "1-0": 86400,
        "1-12:30": 131400,
        "2-00:00:01": 172801,
    }
    assert {text: seconds_of(text) for text in times} == times
    for wrong in ("", "soon", "0", "1:2:3:4", "-5", "1-", "infinite"):
        with pytest.raises(UserError, match="expected a"):
            seconds_of(wrong)


def test_partitions(slurm: FakeSlurm) -> None:
    kinds = "a*|gpu:h100:4(S:0-1),nvme:1|1-00:00:00|6\na*|gpu:2|1-00:00:00|1\nb|(null)|infinite|3\n"
    slurm.write("partitions", kinds)
    assert partitions(None) == [Partition(4, 7, "1-00:00:00")]
    assert partitions("b") == [Partition(0, 3, None)]
    assert len(partitions("b,a")) == 2


def test_accounting_is_asked_for_what_the_queue_forgot(slurm: FakeSlurm) -> None:
    slurm.write("queue", "7|RUNNING|None|mine\n8_1|PENDING|Resources|another's|name\n")
    queued = {"7": ("RUNNING", "None", "mine"), "8_1": ("PENDING", "Resources", "another's")}
    assert find_jobs(["7", "9"], ["mine"]) == queued
    slurm.write("accounting", "9|CANCELLED by 1000|None|old\n")
    assert (
        find_jobs(["7"], ["old"])["9"] == find_jobs(["7", "9"])["9"] == ("CANCELLED", "None", "old")
    )
    assert find_jobs(["7"], ["mine"]) == queued


def test_what_fails_is_asked_three_times(slurm: FakeSlurm) -> None:
    count = f"#!/bin/sh\ncd '{slurm.folder}'\necho >> count\n"
    slurm.write("squeue", f"{count}echo 'slurm_load_jobs error: no controller' >&2\nexit 1\n")
    with pytest.raises(UserError, match="no controller"):
        ask(["squeue", "-h"])
    assert len(slurm.lines("count")) == 3
    slurm.write("squeue", f"{count}[ $(wc -l < count) = 6 ] && echo '7|RUNNING|None'\n")
    assert find_jobs([])["7"].state == "RUNNING", "one of three tries must succeed"


def test_controller_that_is_down_is_named(slurm: FakeSlurm) -> None:
    problem = "slurm_load_partitions: Unable to contact slurm controller (connect failure)"
    slurm.write("sinfo", f"#!/bin/sh\necho '{problem}' >&2\nexit 1\n")
    with pytest.raises(UserError, match="scontrol ping"):
        partitions(None)


def test_commands_that_setup_has_hidden_are_named(
    slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(slurm.folder))  # without srun and scancel
    with pytest.raises(UserError, match=r"^srun, scancel: not in PATH on .* after `setup`"):
        require_commands()


def test_commands_of_slurm_that_are_not_there_say_where_to_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match=r"sinfo not found.*login node.*deepspeed --hostfile"):
        partitions(None)


RUNNING = "JobId=42 JobState=RUNNING Requeue=1 Restarts=1 BatchFlag=1"


@pytest.mark.parametrize(
    "shown", [RUNNING.replace("Restarts=1", "Restarts=2"), RUNNING.replace("RUNNING", "CANCELLED")]
)
def test_a_start_that_slurm_has_ended_requeues_nothing(
    slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, shown: str
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "42")
    slurm.write("job", shown)
    assert "has ended start 1" in str(requeue(1, []))
    assert slurm.lines("asked") == []


def test_another_start(slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requeueing ends the job, so it comes first. SLURM itself avoids hosts that are down."""
    monkeypatch.setenv("SLURM_JOB_ID", "42")
    slurm.write("queue", "n[8-9]\n")
    slurm.write("partitions", "n1 idle\nn3 down*\n")
    slurm.write("job", RUNNING)
    assert requeue(1, []) is None
    assert requeue(1, ["n1", "n3"]) is None
    assert requeue(1, ["n3"], without_spares(2, 4)) is None
    excluding = "update JobId=42 ExcNodeList=n[8-9],n1"
    fewer = "update JobId=42 NumNodes=2 NumTasks=8 NumCPUs=1"
    assert slurm.lines("asked") == ["requeue 42", "requeue 42", excluding, "requeue 42", fewer]
    monkeypatch.setenv(
        "SLURM_ARRAY_JOB_ID", "42"
    )  # `scontrol requeue 42` would restart all of the array's tasks
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    assert requeue(1, []) is None
    assert slurm.lines("asked")[-1] == "requeue 42_3"
    monkeypatch.delenv("SLURM_ARRAY_JOB_ID")
    slurm.write(
        "scontrol",
        f'#!/bin/sh\n[ "$1" != update ] || {{ echo no right >&2; exit 1; }}; echo "{RUNNING}"\n',
    )
    assert requeue(1, ["n1"]) is None
    slurm.write(
        "scontrol",
        f'#!/bin/sh\n[ "$1" != requeue ] || {{ echo requeue disabled >&2; exit 1; }}; echo "{RUNNING}"\n',
    )
    assert requeue(1, ["n1"]) == "scontrol requeue 42: requeue disabled"
