"""Node lists and slots: a table of ugly ones, an independent expansion, and SLURM's own where there is one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clap_ds.dist.hostfile import expand, format_hostfile, hosts_from_slurm, read_hostfile, slots_from_slurm
from clap_ds.launch.hostfile import main
from tests import needs

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("nodelist", "hosts"),
    [
        ("n1", "n1"),
        ("a[01-03,7],b-ib0,c[1-2][08-11]", "a01 a02 a03 a7 b-ib0 c108 c109 c110 c111 c208 c209 c210 c211"),
        ("n[8-11]", "n8 n9 n10 n11"),
        ("n[08-11]", "n08 n09 n10 n11"),
        ("n[098-101]", "n098 n099 n100 n101"),
        ("n[99-0101]", "n99 n100 n101"),
        ("n[3,1-2],m,n4", "n3 n1 n2 m n4"),
        ("n[08-9,010-011]", "n08 n09 n010 n011"),
        ("n[0-0]", "n0"),
        ("[1-3]", "1 2 3"),
        ("n[1-2]n[3-4]", "n1n3 n1n4 n2n3 n2n4"),
        ("n[1-2][3-4]x[5-6]", "n13x5 n13x6 n23x5 n23x6 n14x5 n14x6 n24x5 n24x6"),
        ("n[1-2]-ib", "n1-ib n2-ib"),
        ("n[1-2].site.org, m_3", "n1.site.org n2.site.org m_3"),
    ],
)
def test_expands(nodelist: str, hosts: str) -> None:
    assert expand(nodelist) == hosts.split()


@pytest.mark.parametrize(
    ("nodelist", "message"),
    [
        ("", "empty"),
        ("n1,,n2", "empty name"),
        ("n1,", "empty name"),
        ("n[1-2", "isn't closed"),
        ("n1]", "brackets don't match"),
        ("n[1-[2]]", "brackets don't match"),
        ("n[]", "expected N or N-M"),
        ("n[a-b]", "expected N or N-M"),
        ("n[1 - 2]", "expected N or N-M"),
        ("n[٣]", "expected N or N-M"),
        ("n[5-3]", "runs backwards"),
        ("n[1-999999999]", "more than"),
        ("n[0-999][0-999]", "more than"),
        ("n[1,1]", "n1 twice"),
        ("n1,n[1-2]", "n1 twice"),
        ("n1;reboot", "isn't a host name"),
        ("$(reboot)", "isn't a host name"),
        ("-oProxyCommand=x", "isn't a host name"),
        ("n1 n2", "isn't a host name"),
        ("n1\nn2", "isn't a host name"),
        ("n1\n", None),
        ("user@n1", "isn't a host name"),
        ("n..1", "isn't a host name"),
        ("a" * 64, "isn't a host name"),
    ],
)
def test_refuses(nodelist: str, message: str | None) -> None:
    if message is None:  # a line end around the whole list is no part of a name
        assert expand(nodelist) == [nodelist.strip()]
        return
    with pytest.raises(ValueError, match=message):
        expand(nodelist)


@st.composite
def node_lists(draw: st.DrawFn) -> tuple[str, list[str]]:
    """A node list and its hosts, built together term by term, without parsing anything."""
    terms, hosts = [], []
    for index in range(draw(st.integers(1, 4))):
        texts = [f"{chr(ord('a') + index)}-"]
        groups = []
        for _ in range(draw(st.integers(0, 2))):
            shown, numbers = [], []
            for low, count, width, single in draw(
                st.lists(
                    st.tuples(st.integers(0, 120), st.integers(1, 12), st.integers(1, 4), st.booleans()),
                    min_size=1,
                    max_size=3,
                )
            ):
                first = format(low, f"0{width}d")
                high = low if single else low + count
                shown.append(first if single else f"{first}-{format(high, f'0{width}d')}")
                numbers += [format(number, f"0{len(first)}d") for number in range(low, high + 1)]
            groups.append(numbers)
            texts.append("[" + ",".join(shown) + "]")
        terms.append("".join(texts))
        names = [texts[0]]
        for numbers in groups:
            names = [name + number for name in names for number in numbers]
        hosts += [name + "x" if not groups else name for name in names]
        if not groups:
            terms[-1] += "x"
    return ",".join(terms), hosts


@given(node_lists())
@settings(max_examples=300, deadline=None)
def test_agrees_with_an_independent_expansion(case: tuple[str, list[str]]) -> None:
    nodelist, hosts = case
    if len(set(hosts)) < len(hosts):
        with pytest.raises(ValueError, match="twice"):
            expand(nodelist)
    else:
        assert expand(nodelist) == hosts


def test_agrees_with_scontrol(tmp_path: Path) -> None:
    needs.programs("scontrol")
    config = tmp_path / "slurm.conf"
    config.write_text("ClusterName=x\nSlurmctldHost=localhost\nNodeName=n CPUs=1\nPartitionName=p Nodes=ALL\n")
    lists = [
        "a[01-03,7],b-ib0,c[1-2][08-11]",
        "n[1-2][3-4]x[5-6]",
        "q[1-2][3-4][5-6][7-8]",
        "n[99-0101]",
        "[1-3],n[007]",
    ]

    @given(node_lists())
    @settings(max_examples=30, deadline=None)
    def collect(case: tuple[str, list[str]]) -> None:
        if len(set(case[1])) == len(case[1]):
            lists.append(case[0])

    collect()
    for nodelist in lists:
        shown = subprocess.run(
            ["scontrol", "show", "hostnames", nodelist],
            env={"SLURM_CONF": str(config), "PATH": "/usr/bin:/bin"}, capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert expand(nodelist) == shown.stdout.split(), nodelist


@pytest.mark.parametrize(
    ("environment", "num_hosts", "wanted", "slots"),
    [
        ({"SLURM_GPUS_ON_NODE": "4"}, 2, None, [4, 4]),
        ({"SLURM_GPUS_PER_NODE": "h100:4"}, 2, None, [4, 4]),
        ({"SLURM_GPUS_PER_NODE": "a100:2,v100:1", "SLURM_GPUS_ON_NODE": "3"}, 1, None, [3]),
        ({"SLURM_JOB_GPUS": "0,1,2,3"}, 2, None, [4, 4]),
        ({"SLURM_JOB_GPUS": "0-2,5"}, 1, None, [4]),
        ({"SLURM_TASKS_PER_NODE": "4(x2),2"}, 3, None, [4, 4, 2]),
        ({"SLURM_TASKS_PER_NODE": "4(x2),2", "SLURM_GPUS_ON_NODE": "4"}, 3, None, [4, 4, 2]),
        ({"SLURM_TASKS_PER_NODE": "1(x2)", "SLURM_GPUS_ON_NODE": "4"}, 2, None, [4, 4]),
        ({"SLURM_TASKS_PER_NODE": "1(x2)", "SLURM_GPUS_ON_NODE": "0"}, 2, None, [1, 1]),
        ({"SLURM_TASKS_PER_NODE": "8(x2)", "SLURM_GPUS_ON_NODE": "4"}, 2, 2, [2, 2]),
        ({}, 2, 3, [3, 3]),
    ],
)
def test_slots(environment: dict[str, str], num_hosts: int, wanted: int | None, slots: list[int]) -> None:
    assert slots_from_slurm(environment, num_hosts, wanted) == slots


@pytest.mark.parametrize(
    ("environment", "num_hosts", "wanted", "message"),
    [
        ({}, 1, None, "give --slots"),
        ({"SLURM_GPUS_ON_NODE": "4", "SLURM_GPUS_PER_NODE": "2"}, 1, None, "disagree"),
        ({"SLURM_GPUS_ON_NODE": "4", "SLURM_JOB_GPUS": "0,1"}, 1, None, "disagree"),
        ({"SLURM_GPUS_ON_NODE": "four"}, 1, None, "expected a number"),
        ({"SLURM_GPUS_PER_NODE": "h100:many"}, 1, None, "SLURM_GPUS_PER_NODE"),
        ({"SLURM_JOB_GPUS": "all"}, 1, None, "SLURM_JOB_GPUS"),
        ({"SLURM_TASKS_PER_NODE": "4(x2)"}, 3, None, "2 hosts"),
        ({"SLURM_TASKS_PER_NODE": "4x2"}, 2, None, "expected counts"),
        ({"SLURM_TASKS_PER_NODE": "2(x2)", "SLURM_GPUS_ON_NODE": "4"}, 2, None, "doesn't fit 4 GPUs"),
        ({"SLURM_GPUS_ON_NODE": "4"}, 2, 5, "4 GPUs"),
    ],
)
def test_slots_that_contradict(environment: dict[str, str], num_hosts: int, wanted: int | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        slots_from_slurm(environment, num_hosts, wanted)


def test_allocation_whose_node_count_differs() -> None:
    assert hosts_from_slurm({"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NNODES": "2"}) == ["n1", "n2"]
    with pytest.raises(ValueError, match="SLURM_NNODES=3"):
        hosts_from_slurm({"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NNODES": "3"})
    with pytest.raises(ValueError, match="inside an allocation"):
        hosts_from_slurm({})


def test_command_writes_what_deepspeed_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "hostfile"
    assert main(["--nodelist", "n[09-10]", "--slots", "4", "--output", str(output)]) == 0
    assert output.read_text() == "n09 slots=4\nn10 slots=4\n"
    assert read_hostfile(output) == {"n09": 4, "n10": 4}
    assert list(tmp_path.iterdir()) == [output]
    assert main(["--nodelist", "n[1-", "--slots", "4", "--output", str(output)]) == 2
    assert "isn't closed" in capsys.readouterr().err
    assert output.read_text() == "n09 slots=4\nn10 slots=4\n"
    assert main(["--nodelist", "n1"]) == 2
    assert main(["--nodelist", "n1", "--slots", "0"]) == 2
    assert main(["--nodelist", "n1", "--slots", "1", "--output", str(tmp_path / "missing" / "hostfile")]) == 2


def test_command_inside_an_allocation() -> None:
    environment = {"SLURM_JOB_NODELIST": "n[1-2],m", "SLURM_TASKS_PER_NODE": "2(x2),1"}
    command = [sys.executable, "-I", str(ROOT / "launch" / "hostfile.py")]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert result.stdout == "n1 slots=2\nn2 slots=2\nm slots=1\n"


def test_uses_the_standard_library_only() -> None:
    heavy = ("torch", "pydantic", "numpy")
    probe = f"import sys, clap_ds.launch.hostfile; print([m for m in sys.modules if m.split('.')[0] in {heavy}])"
    result = subprocess.run([sys.executable, "-c", probe], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_ten_thousand_hosts(record_property: object) -> None:
    hosts = expand("rack[000-099]node[00-99]")
    assert len(hosts) == len(set(hosts)) == 10_000
    assert (hosts[0], hosts[-1]) == ("rack000node00", "rack099node99")
    assert format_hostfile(hosts, [4] * 10_000).count("\n") == 10_000
