"""Node lists and slots, including malformed ones."""

import subprocess
import sys
from pathlib import Path

import pytest

from clap_ds.distributed.hostfile import expand, read_hostfile, slots_from_slurm
from clap_ds.launch import preflight
from clap_ds.launch.hostfile import main

ROOT = Path(__file__).resolve().parents[2]
LISTS = {
    "n1": "n1",
    "a[01-03,7],b-ib0,c2[08-11].org": "a01 a02 a03 a7 b-ib0 c208.org c209.org c210.org c211.org",
    "n[098-101]": "n098 n099 n100 n101",
    "n[99-0101]": "n99 n100 n101",
    "n[3,1-2],m,n4": "n3 n1 n2 m n4",
    "n[08-9,010-011]": "n08 n09 n010 n011",
    "n1.site.org,m_3": "n1.site.org m_3",
}


def test_expands() -> None:
    assert {nodelist: expand(nodelist) for nodelist in LISTS} == {name: hosts.split() for name, hosts in LISTS.items()}
    for nodelist in ("", "n1,,n2", "n[1-2", "n1]", "user@n1", "n1;reboot", "-oProxyCommand=x", "n[a-b]"):
        with pytest.raises(ValueError, match="expected a node list"):
            expand(nodelist)


@pytest.mark.parametrize(
    ("variables", "wanted", "slots"),
    [
        ("GPUS_ON_NODE=4", None, [4, 4]),
        ("GPUS_PER_NODE=h100:4", None, [4, 4]),
        ("TASKS_PER_NODE=4,2 NTASKS=6 GPUS_ON_NODE=4", None, [4, 2]),
        ("TASKS_PER_NODE=1(x2) NTASKS_PER_NODE=1 GPUS_ON_NODE=4", None, [4, 4]),
        # With --exclusive, SLURM allocates all GPUs and counts a task per core, which nobody requested.
        ("TASKS_PER_NODE=8(x2) GPUS_ON_NODE=4", None, [4, 4]),
        ("TASKS_PER_NODE=8(x2) GPUS_ON_NODE=4 GPUS_PER_NODE=2", 3, [3, 3]),
        ("", None, "pass --slots"),
    ],
)
def test_slots_of_two_hosts(variables: str, wanted: int | None, slots: list[int] | str) -> None:
    environment = dict(f"SLURM_{pair}".split("=") for pair in ["JOB_NODELIST=n[1-2]", *variables.split()])
    if isinstance(slots, str):
        with pytest.raises(ValueError, match=slots):
            slots_from_slurm(environment, wanted)
    else:
        assert slots_from_slurm(environment, wanted) == dict(zip(["n1", "n2"], slots, strict=True))


def test_command_writes_what_deepspeed_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "hostfile"
    assert main(["--nodelist", "n[09-10]", "--slots", "4", "--output", str(output)]) == 0
    assert output.read_text() == "n09 slots=4\nn10 slots=4\n"
    assert read_hostfile(output) == {"n09": 4, "n10": 4}
    assert main(["--nodelist", "n[1-", "--slots", "4", "--output", str(output)]) == 2
    assert "expected a node list" in capsys.readouterr().err
    assert [path.read_text() for path in tmp_path.iterdir()] == ["n09 slots=4\nn10 slots=4\n"]
    assert main(["--nodelist", "n1"]) == 2


def test_command_inside_an_allocation_needs_only_the_standard_library() -> None:
    slurm = {"SLURM_JOB_NODELIST": "n[1-2],m", "SLURM_TASKS_PER_NODE": "2(x2),1", "SLURM_NTASKS": "5"}
    command = [sys.executable, "-S", str(ROOT / "launch" / "hostfile.py")]
    environment = {**slurm, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert result.stdout == "n1 slots=2\nn2 slots=2\nm slots=1\n"


def test_outside_an_allocation_only_options_of_the_command_are_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SLURM_JOB_NODELIST", raising=False)
    assert main([]) == 2
    assert "--nodelist" in capsys.readouterr().err
    assert preflight.main([]) == 2
    message = capsys.readouterr().err
    assert "inside an allocation" in message
    assert "--nodelist" not in message


def test_hostfile_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "hostfile").write_text("n1 slots=4\nn2\n")
    with pytest.raises(ValueError, match="expected 'HOST slots=N', found 'n2'"):
        read_hostfile(tmp_path / "hostfile")
