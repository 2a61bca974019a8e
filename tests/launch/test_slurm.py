"""SLURM's times, partitions and states as its commands print them."""

import pytest

from clap_ds.config.errors import UserError
from clap_ds.launch import slurm as commands
from clap_ds.launch.slurm import (
    find_job,
    gpus_asked_for,
    of_partition,
    partitions,
    refusal,
    seconds_of,
    states_of,
    time_of,
)
from tests.launch.conftest import FakeSlurm


def test_times() -> None:
    times = {"2": 120, "1:30": 90, "00:15:00": 900, "1-0": 86400, "1-12:30": 131400, "2-00:00:01": 172801}
    assert {text: seconds_of(text) for text in times} == times
    assert [time_of(seconds) for seconds in (90, 900, 86400, 172801)] == [
        "00:01:30",
        "00:15:00",
        "1-00:00:00",
        "2-00:00:01",
    ]
    for wrong in ("", "soon", "0", "1:2:3:4", "-5", "1-", "infinite"):
        with pytest.raises(UserError, match="expected a"):
            seconds_of(wrong)


def test_partitions(slurm: FakeSlurm) -> None:
    slurm.write("partitions", "a*|2|gpu:h100:4(S:0-1),nvme:1|1-00:00:00\na*|1|gpu:2|1-00:00:00\nb|3|(null)|infinite\n")
    first, second, other = partitions()
    assert (first.gpus, second.gpus, other.gpus) == (4, 2, 0)
    assert (first.limit_s, other.limit_s) == (86400, None)
    assert of_partition([first, second, other], None) == [first, second]
    assert of_partition([first, second, other], "b,a") == [first, second, other]


@pytest.mark.parametrize(
    ("option", "gpus"),
    [
        ("--gres=gpu:2", 2),
        ("--gres=gpu", 1),
        ("--gres=gpu:h100", 1),
        ("--gres=nvme:3,gpu:h100:2,gres/gpu:a100:1", 3),
        ("--gres=gpu:2(S:0)", 2),
        ("--gres=gpus_of_old:2", None),
        ("--gres=none", None),
        ("--gpus-per-node=2", 2),
        ("--gpus-per-node=h100:2,a100:2", 4),
        ("--gpus-per-task=3", 3),
        ("--gpus=8", None),  # of all nodes
        ("--exclusive", None),
    ],
)
def test_gpus_that_options_ask_for(option: str, gpus: int | None) -> None:
    assert gpus_asked_for(option) == gpus


def test_accounting_is_asked_for_what_the_queue_forgot(slurm: FakeSlurm) -> None:
    slurm.write("queue", "7 RUNNING\n8_1 PENDING\n")
    assert states_of(["7", "9"]) == {"7": "RUNNING", "8_1": "PENDING"}
    slurm.write("accounting", "9|CANCELLED by 1000\n")
    assert states_of(["7", "9"])["9"] == "CANCELLED"
    assert states_of(["7"]) == {"7": "RUNNING", "8_1": "PENDING"}


def test_jobs_by_name(slurm: FakeSlurm) -> None:
    slurm.write("names", "12 one\n13 another-one\n")
    assert find_job("one", "2026-11-22T08:00:00") == "12"
    assert find_job("none", "2026-11-22T08:00:00") is None


def test_a_command_that_fails_or_is_missing_is_an_error(slurm: FakeSlurm) -> None:
    slurm.write("sinfo", "#!/bin/sh\necho broken >&2\nexit 1\n")
    with pytest.raises(UserError, match=r"sinfo .*: broken"):
        partitions()
    with pytest.raises(UserError, match="why: no_such_program: No such file"):
        commands.ask(["no_such_program"], "why: ")
    slurm.remove("sacctmgr")
    assert commands.accounts() is None or isinstance(commands.accounts(), set)  # of the machine's own, if it has one


def test_what_sbatch_would_refuse(slurm: FakeSlurm) -> None:
    assert refusal("#!/bin/bash\n#SBATCH --nodes=2\n") is None
    assert slurm.tested == ["#SBATCH --nodes=2"]
    slurm.write("refuse_test", "sbatch: unrecognized option '--exclsive'\nTry \"sbatch --help\" for more information\n")
    assert refusal("") == "unrecognized option '--exclsive'"
    slurm.write("refuse_test", "sbatch: error: one\nallocation failure: Invalid qos specification\n")
    assert refusal("") == "one; Invalid qos specification"
    slurm.write("refuse_test", "allocation failure: Unable to contact slurm controller (connect failure)\n")
    with pytest.raises(UserError, match="Unable to contact"):
        refusal("")
    slurm.write("sbatch", "#!/bin/sh\nexec sleep 60\n")
    with pytest.raises(UserError, match="no answer in 0 s"):
        refusal("", timeout_s=0.1)
