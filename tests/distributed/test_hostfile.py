"""Node lists and slots, including malformed ones."""

import subprocess
import sys
from pathlib import Path

import pytest
from deepspeed.launcher.runner import fetch_hostfile

from clap_ds.distributed.hostfile import expand, expand_by_slurm, read_hostfile, slots_from_slurm
from clap_ds.launch.slurm_hostfile import main
from tests import needs
from tests.conftest import ROOT

LISTS = {
    "n1": "n1",
    "a[01-03,7],b-ib0,c2[08-11]": "a01 a02 a03 a7 b-ib0 c208 c209 c210 c211",
    "n[098-101]": "n098 n099 n100 n101",
    "n[8-011]": "n8 n9 n10 n11",
    "n[3,1-2],m,n4": "n3 n1 n2 m n4",
    "n1.site.org,m_3": "n1.site.org m_3",
    "r[2,1]-[9-10]": "r2-9 r2-10 r1-9 r1-10",
    " n1 , n2\nn3 ": "n1 n2 n3",
}
SUFFIXES = {"c[08-11].org": "c08.org c09.org c10.org c11.org"}
"""SLURM 22.05 rejects these."""
MALFORMED = [
    "", "n[]", "n[1-2", "n1]", "n[[1-2]]", "n[1,]", "n[a-b]", "n[1-2-3]", "n[1 2]", "n[5-3]", "n1,n1", "n1;reboot",
    "-oProxyCommand=x", "n\u00e91", "n[1-70000]", "a[1-300]b[1-300]", "n[0-9999999999999999999999]", "n1,,n2", "n[1, 2]",
]  # fmt: skip


@pytest.fixture
def scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Configure SLURM's commands, without which they don't answer."""
    needs.programs("scontrol")
    nodes = "ClusterName=test\nSlurmctldHost=localhost\nNodeName=n1\nPartitionName=all Nodes=ALL\n"
    (tmp_path / "slurm.conf").write_text(nodes)
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))


@pytest.mark.parametrize("nodelist", [*LISTS, *SUFFIXES])
def test_node_list_expands(nodelist):
    assert expand(nodelist) == {**LISTS, **SUFFIXES}[nodelist].split()


@pytest.mark.parametrize("nodelist", [*MALFORMED, "a[1-2]b[1-2]c[1-2]"])
def test_malformed_node_list_is_rejected(nodelist):
    with pytest.raises(ValueError, match="expected a node list"):
        expand(nodelist)


@pytest.mark.usefixtures("scontrol")
def test_expand_equals_scontrol():
    for nodelist in LISTS:
        command = ["scontrol", "show", "hostnames", nodelist]
        assert subprocess.check_output(command, text=True).split() == expand(nodelist)


@pytest.mark.usefixtures("scontrol")
def test_expand_by_slurm_adds_lists_that_only_scontrol_reads():
    assert expand_by_slurm("a[1-2]b[1]c[3]") == ["a1b1c3", "a2b1c3"]
    assert expand_by_slurm("c[1-2].org") == ["c1.org", "c2.org"]  # by either
    for nodelist in MALFORMED:
        with pytest.raises(ValueError, match="expected a node list"):
            expand_by_slurm(nodelist)


@pytest.mark.parametrize("script", ["echo n1; exit 1", "echo n1; echo 'error: x'"])
def test_expand_by_slurm_without_an_answer_is_expand(tmp_path, monkeypatch, script):
    (tmp_path / "scontrol").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert expand_by_slurm("n[1-2]") == ["n1", "n2"]


STEP = "JOB_NODELIST=n[1-4] STEP_NODELIST=n[1-2]"


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ("GPUS_ON_NODE=4", [4, 4]),
        ("GPUS_PER_NODE=a100:2,h100:4", [6, 6]),
        ("GPUS_PER_TASK=4 TASKS_PER_NODE=1(x2) NTASKS=2", [4, 4]),
        ("TASKS_PER_NODE=4,2 NTASKS=6 GPUS_ON_NODE=4", [4, 2]),
        # With --exclusive, SLURM allocates all GPUs and counts a task per core, which nobody
        # requested.
        ("TASKS_PER_NODE=8(x2) GPUS_ON_NODE=4", [4, 4]),
        ("", "pass --slots"),
        ("JOB_NODELIST=", "inside an allocation"),
        ("GPUS_ON_NODE=4,", "SLURM_GPUS_ON_NODE.*'4,'"),
        # --gpus=6 may give 4 to this host and 2 to the other. salloc tells only the total.
        ("GPUS=6 GPUS_ON_NODE=4 TASKS_PER_NODE=1(x2)", "SLURM_GPUS=6"),
        ("TASKS_PER_NODE=0(x2) NTASKS=6", r"SLURM_TASKS_PER_NODE.*'0\(x2\)'"),
        ("TASKS_PER_NODE=4(x3) NTASKS=12", r"TASKS_PER_NODE=4\(x3\) counts 3 .*NODELIST=n\[1-2\]"),
        ("JOB_NODELIST_HET_GROUP_0=n1 JOB_NODELIST_HET_GROUP_1=n2", "heterogeneous"),
        # srun -N2 -n3 in a job of four hosts, and with fewer GPUs than the job.
        (f"{STEP} STEP_TASKS_PER_NODE=2,1 TASKS_PER_NODE=2,1 NTASKS=3 GPUS_PER_NODE=4 GPUS_ON_NODE=1", [2, 1]),
        (f"{STEP} STEP_TASKS_PER_NODE=1(x2) TASKS_PER_NODE=1(x2) NTASKS=2 GPUS_PER_NODE=4 GPUS_ON_NODE=1", [1, 1]),
        # salloc's shell in an interactive step on the first host.
        ("STEP_NODELIST=n1 STEP_TASKS_PER_NODE=1 TASKS_PER_NODE=2(x2) NTASKS=4 GPUS_ON_NODE=4", [2, 2]),
    ],
)  # fmt: skip
def test_slots_of_an_allocation_or_step(variables, expected):
    pairs = [f"SLURM_{pair}".split("=") for pair in ["JOB_NODELIST=n[1-2]", *variables.split()]]
    environment = dict(pairs)
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=expected):
            slots_from_slurm(environment)
    else:
        assert slots_from_slurm(environment) == dict(zip(["n1", "n2"], expected, strict=True))
        assert slots_from_slurm(environment, 3) == {"n1": 3, "n2": 3}


def test_hostfile_of_the_command_is_read_by_deepspeed(tmp_path, capsys):
    output = tmp_path / "hostfile"
    options = ["--slots", "4", "--output", str(output)]
    assert main(["--nodelist", "n[09-10]", *options]) == 0
    assert output.read_text() == "n09 slots=4\nn10 slots=4\n"
    assert read_hostfile(output) == fetch_hostfile(str(output)) == {"n09": 4, "n10": 4}
    assert main(["--nodelist", "n[1-", *options]) == 2
    assert "expected a node list" in capsys.readouterr().err
    assert [path.read_text() for path in tmp_path.iterdir()] == ["n09 slots=4\nn10 slots=4\n"]


@pytest.mark.parametrize(
    ("content", "options", "expected"),
    [
        # A host's lines needn't follow each other.
        ("n2.site.org\nn1\nn2.site.org\n\n", [], "n2.site.org slots=2\nn1 slots=1\n"),
        ("n2\nn1\nn2\n", ["--slots", "4"], "n2 slots=4\nn1 slots=4\n"),
        ("", [], ""),
        ("n1\n-oProxyCommand=x\n", [], ""),
    ],
)
def test_nodefile_of_pbs_or_lsf_has_a_line_per_slot(tmp_path, capsys, content, options, expected):
    (tmp_path / "nodes").write_text(content)
    code = main(["--nodefile", str(tmp_path / "nodes"), *options])
    output, error = capsys.readouterr()
    assert (code, output) == (0 if expected else 2, expected)
    assert expected or "a host's name for each slot" in error


def test_hostfile_command_needs_only_the_standard_library():
    slurm = {
        "SLURM_JOB_NODELIST": "n[1-2],m",
        "SLURM_TASKS_PER_NODE": "2(x2),1",
        "SLURM_NTASKS": "5",
    }
    command = [sys.executable, "-S", str(ROOT / "launch" / "slurm_hostfile.py")]
    output = subprocess.check_output(command, env={**slurm, "PYTHONPATH": str(ROOT)}, text=True)
    assert output == "n1 slots=2\nn2 slots=2\nm slots=1\n"


@pytest.mark.parametrize("line", ["n[2-3] slots=4", "n1 slots=4", "n2 slots=0"])
def test_malformed_hostfile_is_rejected_with_its_line(tmp_path, line):
    (tmp_path / "hostfile").write_text(f"n1 slots=4\n{line}\n")
    with pytest.raises(ValueError, match="expected 'HOST slots=N', found") as raised:
        read_hostfile(tmp_path / "hostfile")
    assert repr(line) in str(raised.value)
