"""What a job asks SLURM about itself, with `scontrol` and `squeue` played by scripts."""

from pathlib import Path

import pytest

from clap_ds.launch.slurm_job import enough_nodes, gpus_by_host, parse_gpus, requeue, seconds_used_and_left

SHOWN = """\
JobId=42 JobName=bench
   Priority=1 Nice=0 Account=mine QOS=normal
   NodeList=n[1-3],login7
   BatchHost=n1
   NumNodes=4 NumCPUs=64 NumTasks=4 CPUs/Task=4 ReqB:S:C:T=0:0:*:*
   JOB_GRES=gpu:h100:9
     Nodes=n[1-2] CPU_IDs=0-15 Mem=0 GRES=gpu:h100:3(IDX:0-1,3)
     Nodes=n3 CPU_IDs=0-15 Mem=0 GRES=gpu:h100:2(IDX:2,5),gpu:a100:1(IDX:7),nvme:1(IDX:0)
     Nodes=login7 CPU_IDs=0-15 Mem=0 GRES=
   MinCPUsNode=4 MinMemoryNode=0 MinTmpDiskNode=0
   TresPerNode=gres:gpu:3
"""
EXPECTED = {"n1": ["0", "1", "3"], "n2": ["0", "1", "3"], "n3": ["2", "5", "7"]}


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for commands of SLURM that comes first on the PATH; this is job 42."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    monkeypatch.setenv("SLURM_JOB_ID", "42")
    return tmp_path


def _play(folder: Path, name: str, script: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\necho \"$*\" >> '{folder}/calls'\n{script}\n")
    (folder / name).chmod(0o755)


def _calls(folder: Path) -> list[str]:
    return (folder / "calls").read_text().splitlines()


def test_gpus_of_several_groups_of_nodes() -> None:
    assert parse_gpus(SHOWN) == EXPECTED
    assert parse_gpus(SHOWN.replace("(IDX:0-1,3)", "(IDX:N/A)")) == {"n3": EXPECTED["n3"]}
    assert parse_gpus("") == {}


def test_gpus_are_asked_for_in_a_job(commands: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _play(commands, "scontrol", f"cat <<'END'\n{SHOWN}END")
    assert gpus_by_host() == EXPECTED
    assert _calls(commands) == ["show job --details 42"]
    _play(commands, "scontrol", "exit 1")
    assert gpus_by_host() == {}
    monkeypatch.delenv("SLURM_JOB_ID")
    (commands / "calls").unlink()
    assert gpus_by_host() == {}
    assert not (commands / "calls").exists()


@pytest.mark.parametrize(
    ("shown", "expected"),
    [("1:30 1-00:00:00", (90, 86400)), ("1:30 UNLIMITED", None), ("1:30 INVALID", None), ("", None)],
)
def test_time_used_and_left(commands: Path, shown: str, expected: tuple[int, int] | None) -> None:
    _play(commands, "squeue", f"echo {shown}")
    assert seconds_used_and_left() == expected
    assert _calls(commands) == ["-h -j 42 -o %M %L"]


def test_another_start(commands: Path) -> None:
    _play(commands, "scontrol", "")
    assert requeue([]) is None
    assert _calls(commands) == ["requeue 42"]


def test_another_start_without_some_hosts(commands: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _play(commands, "scontrol", "")
    assert requeue(["n1", "n3"]) is None
    expected = ["requeuehold 42", "update JobId=42 ExcNodeList=n1,n3", "release 42"]
    assert _calls(commands) == expected
    # It is let go all the same where the hosts can't be excluded: it would be held for ever.
    (commands / "calls").unlink()
    _play(commands, "scontrol", '[ "$1" != update ] || { echo no right >&2; exit 1; }')
    assert requeue(["n1", "n3"]) is None
    assert _calls(commands) == expected
    assert "warning: scontrol update JobId=42 ExcNodeList=n1,n3: no right" in capsys.readouterr().err


def test_why_there_is_no_other_start(commands: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _play(commands, "scontrol", "echo job requeue disabled >&2; exit 1")
    assert requeue(["n1"]) == "scontrol requeuehold 42: job requeue disabled"
    assert len(_calls(commands)) == 1
    (commands / "scontrol").unlink()
    monkeypatch.setenv("PATH", str(commands))
    assert requeue([]) == "scontrol requeue 42: No such file or directory"


def test_a_job_needs_nodes_beside_those_it_is_to_do_without(commands: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _play(commands, "sinfo", "echo 'gpu*|3|gpu:4|infinite'; echo 'gpu*|1|gpu:2|infinite'; echo 'cpu|9|(null)|infinite'")
    monkeypatch.setenv("SLURM_JOB_PARTITION", "gpu")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "3")
    assert enough_nodes(["n1"])
    assert not enough_nodes(["n1", "n2"])
    _play(commands, "sinfo", "exit 1")
    assert enough_nodes(["n1", "n2"]), "nobody knows"
