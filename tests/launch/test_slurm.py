"""Parsing of SLURM's times, partitions and states, failing commands, and requeueing."""

import pytest

from clap_ds.config.errors import UserError
from clap_ds.launch.slurm import ask, partition_nodes, requeue, seconds_of, states_of
from tests.launch.conftest import FakeSlurm


def test_times() -> None:
    times = {"2": 120, "1:30": 90, "00:15:00": 900, "1-0": 86400, "1-12:30": 131400, "2-00:00:01": 172801}
    assert {text: seconds_of(text) for text in times} == times
    for wrong in ("", "soon", "0", "1:2:3:4", "-5", "1-", "infinite"):
        with pytest.raises(UserError, match="expected a"):
            seconds_of(wrong)


def test_partitions(slurm: FakeSlurm) -> None:
    slurm.write("partitions", "a*|gpu:h100:4(S:0-1),nvme:1|1-00:00:00\na*|gpu:2|1-00:00:00\nb|(null)|infinite\n")
    assert partition_nodes(None) == [(4, "1-00:00:00"), (2, "1-00:00:00")]
    assert partition_nodes("b") == [(0, None)]
    assert len(partition_nodes("b,a")) == 3


def test_accounting_is_asked_for_what_the_queue_forgot(slurm: FakeSlurm) -> None:
    slurm.write("queue", "7 RUNNING\n8_1 PENDING\n")
    assert states_of(["7", "9"]) == {"7": "RUNNING", "8_1": "PENDING"}
    slurm.write("accounting", "9|CANCELLED by 1000\n")
    assert states_of(["7", "9"])["9"] == "CANCELLED"
    assert states_of(["7"]) == {"7": "RUNNING", "8_1": "PENDING"}


def test_what_fails_is_asked_three_times(slurm: FakeSlurm) -> None:
    count = f"#!/bin/sh\ncd '{slurm.folder}'\necho >> count\n"
    slurm.write("squeue", f"{count}echo 'slurm_load_jobs error: no controller' >&2\nexit 1\n")
    with pytest.raises(UserError, match="no controller"):
        ask(["squeue", "-h"])
    assert len(slurm.lines("count")) == 3
    slurm.write("squeue", f"{count}[ $(wc -l < count) = 6 ] && echo 7 RUNNING\n")
    assert states_of([]) == {"7": "RUNNING"}, "one of three tries must succeed"


def test_another_start(slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "42")
    assert requeue([]) is None
    assert requeue(["n1", "n3"]) is None
    expected = ["requeuehold 42", "update JobId=42 ExcNodeList=n1,n3", "release 42"]
    assert slurm.lines("asked") == ["requeue 42", *expected]
    # If hosts can't be excluded, it is released anyway: else it would be held forever.
    slurm.write("scontrol", '#!/bin/sh\n[ "$1" != update ] || { echo no right >&2; exit 1; }\n')
    assert requeue(["n1", "n3"]) is None
    assert "warning: scontrol update JobId=42 ExcNodeList=n1,n3: no right" in capsys.readouterr().err
    slurm.write("scontrol", "#!/bin/sh\necho job requeue disabled >&2\nexit 1\n")
    assert requeue(["n1"]) == "scontrol requeuehold 42: job requeue disabled"
