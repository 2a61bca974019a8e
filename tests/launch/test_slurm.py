"""SLURM's times, partitions and states as its commands print them, lost answers, and what a job asks about itself."""

import pytest

from clap_ds.config.errors import UserError
from clap_ds.launch.slurm import (
    ask,
    enough_nodes,
    lost_nodes,
    partition_nodes,
    refusal,
    requeue,
    seconds_of,
    states_of,
    step_state,
)
from tests.launch.conftest import FakeSlurm

BUSY = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"


@pytest.fixture
def job(slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    """This is job 42, of 3 nodes of partition gpu."""
    for name, value in (("ID", "42"), ("PARTITION", "gpu"), ("NUM_NODES", "3")):
        monkeypatch.setenv(f"SLURM_JOB_{name}", value)
    return slurm


def test_times() -> None:
    times = {"2": 120, "1:30": 90, "00:15:00": 900, "1-0": 86400, "1-12:30": 131400, "2-00:00:01": 172801}
    assert {text: seconds_of(text) for text in times} == times
    for wrong in ("", "soon", "0", "1:2:3:4", "-5", "1-", "infinite"):
        with pytest.raises(UserError, match="expected a"):
            seconds_of(wrong)


def test_partitions(slurm: FakeSlurm) -> None:
    slurm.write("partitions", "a*|2|gpu:h100:4(S:0-1),nvme:1|1-00:00:00\na*|1|gpu:2|1-00:00:00\nb|3|(null)|infinite\n")
    assert partition_nodes(None) == [(2, 4, "1-00:00:00"), (1, 2, "1-00:00:00")]
    assert partition_nodes("b") == [(3, 0, None)]
    assert len(partition_nodes("b,a")) == 3


def test_accounting_is_asked_for_what_the_queue_forgot(slurm: FakeSlurm) -> None:
    slurm.write("queue", "7 RUNNING\n8_1 PENDING\n")
    assert states_of(["7", "9"]) == {"7": "RUNNING", "8_1": "PENDING"}
    slurm.write("accounting", "9|CANCELLED by 1000\n")
    assert states_of(["7", "9"])["9"] == "CANCELLED"
    assert states_of(["7"]) == {"7": "RUNNING", "8_1": "PENDING"}


@pytest.mark.parametrize(("said", "asked"), [(BUSY, 3), ("", 3), ("Invalid job id specified", 1)])
def test_what_gets_no_answer_is_asked_three_times(slurm: FakeSlurm, said: str, asked: int) -> None:
    slurm.write("squeue", f"#!/bin/sh\ncd '{slurm.folder}'\necho >> asked\necho '{said}' >&2\nexit 1\n")
    with pytest.raises(UserError, match=f"squeue -h: {said[:20] or 'failed without a word'}"):
        ask(["squeue", "-h"])
    assert (slurm.folder / "asked").read_text() == "\n" * asked
    # One answer of three will do.
    slurm.write(
        "squeue", f"#!/bin/sh\ncd '{slurm.folder}'\nrm asked && {{ echo '{BUSY}' >&2; exit 1; }}\necho 7 RUNNING\n"
    )
    assert states_of([]) == {"7": "RUNNING"}


def test_an_answer_that_never_comes(slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clap_ds.launch.slurm.ANSWER_S", 0.1)
    slurm.write("sbatch", "#!/bin/sh\nexec sleep 60\n")
    with pytest.raises(UserError, match="no answer in 0 s"):
        refusal("")
    with pytest.raises(UserError, match="no_such_program: No such file"):
        ask(["no_such_program"])


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (
            "sbatch: unrecognized option '--exclsive'\nTry \"sbatch --help\" for more",
            "unrecognized option '--exclsive'",
        ),
        ("sbatch: error: one\nallocation failure: Invalid qos specification", "one; Invalid qos specification"),
    ],
)
def test_what_sbatch_would_refuse(slurm: FakeSlurm, said: str, reason: str) -> None:
    assert refusal("#!/bin/bash\n#SBATCH --nodes=2\n") is None
    assert slurm.tested == ["#SBATCH --nodes=2"]
    slurm.write("refuse_test", f"{said}\n")
    assert refusal("") == reason
    slurm.write("refuse_test", f"allocation failure: {BUSY}\n")
    with pytest.raises(UserError, match="Unable to contact"):
        refusal("")


def test_lost_nodes(slurm: FakeSlurm) -> None:
    states = "n1 allocated\nn2 down*\nn3 idle*\nn4 failing\nn5 drained\nn1 allocated\n"
    slurm.write("nodes", states)
    assert lost_nodes(["n1", "n2", "n3", "n4", "n5", "n6"]) == {"n2": "down*", "n3": "idle*", "n4": "failing"}
    slurm.write("sinfo", f"#!/bin/sh\necho '{BUSY}' >&2\nexit 1\n")
    assert lost_nodes(["n1"]) == {}


def test_state_of_the_newest_step(job: FakeSlurm) -> None:
    assert step_state("42") is None, "no accounting"
    lines = ["42|RUNNING", "42.batch|RUNNING", "42.extern|RUNNING"]
    job.write("accounting", "\n".join(lines))
    assert step_state("42") is None
    job.write("accounting", "\n".join([*lines, "42.9|FAILED", "42.10|CANCELLED by 0"]))
    assert step_state("42") == "CANCELLED"


def test_another_start(job: FakeSlurm, capsys: pytest.CaptureFixture[str]) -> None:
    assert requeue([]) is None
    assert requeue(["n1", "n3"]) is None
    expected = ["requeuehold 42", "update JobId=42 ExcNodeList=n1,n3", "release 42"]
    assert (job.folder / "asked").read_text().splitlines() == ["requeue 42", *expected]
    # It is let go all the same where the hosts can't be excluded: it would be held for ever.
    job.write("scontrol", '#!/bin/sh\n[ "$1" != update ] || { echo no right >&2; exit 1; }\n')
    assert requeue(["n1", "n3"]) is None
    assert "warning: scontrol update JobId=42 ExcNodeList=n1,n3: no right" in capsys.readouterr().err
    job.write("scontrol", "#!/bin/sh\necho job requeue disabled >&2\nexit 1\n")
    assert requeue(["n1"]) == "scontrol requeuehold 42: job requeue disabled"


def test_a_job_needs_nodes_beside_those_it_is_to_do_without(job: FakeSlurm) -> None:
    job.write("partitions", "gpu*|3|gpu:4|infinite\ngpu*|1|gpu:2|infinite\ncpu|9|(null)|infinite\n")
    assert enough_nodes(["n1"])
    assert not enough_nodes(["n1", "n2"])
    job.write("sinfo", "#!/bin/sh\nexit 1\n")
    assert enough_nodes(["n1", "n2"]), "nobody knows"
