"""From the launcher's end to the verdict, with a script in place of the launcher, and what is made of ranks' answers. A real
SLURM's are in tests/cluster/."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from clap_ds.launch import preflight
from clap_ds.launch.launchers import Launcher
from clap_ds.launch.preflight import MOST_NAMED, Report, judge_hosts, judge_ranks

RANKS = """
import json, pathlib, sys, time
from clap_ds.ranks import failure
folder, megabytes, packages = pathlib.Path(sys.argv[2]), sys.argv[3], sys.argv[4].split(",")
assert (folder / "hostfile").read_text() == "n1 slots=1\\nn2 slots=1\\n" and megabytes == "4.0" and "torch" in packages
def arrive(*hosts):
    for rank, host in enumerate(hosts):
        answer = {"host": host, "gpus": {}, "cores": "0 (0)", "faults": [], "software": {"code": "x", "torch": "2"}}
        (folder / f"rank-{rank}.json").write_text(json.dumps(answer))
def fail(rank, message):
    failure.speak_in(folder, rank, f"n{rank + 1}")
    failure.leave_word(failure.ERROR, message, 1)
def measure():
    ranks = [{"clock": 1.0, "wrong": 0, "tflops": 1.0, "links": []}] * 2
    (folder / "measured.json").write_text(json.dumps({"bus_gb_per_s": 1.0, "ranks": ranks}))
"""


SILENT = "can't be reached, or starts no rank:"


@pytest.mark.parametrize(
    ("then", "problem"),
    [
        ("arrive('n1.cluster', 'n2'); measure()", ""),
        ("arrive('n1'); print('n2: ssh: No route to host'); time.sleep(600)", f"n2: {SILENT} ssh: No route to host"),
        ("print('srun: error: n2: task 1: Killed'); arrive('n1')", f"n2: {SILENT} task 1: Killed"),
        ("print('srun: error: n2: Exited\\nsrun: error: n1: task 0: Terminated')", f"n2: {SILENT} Exited"),
        ("arrive('n2')", f"n1: {SILENT} no sign of life"),
        ("arrive('n1', 'n2'); fail(1, 'CUDA error: ECC')", "the ranks failed: rank 1 on n2: CUDA error: ECC"),
        ("arrive('n1', 'n2'); sys.exit(3)", "the ranks failed: exit code 3"),
    ],
)
def test_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], then: str, problem: str
) -> None:
    command = lambda self, slots, hostfile, port, words: [sys.executable, "-uc", RANKS + then, *words[1:]]  # noqa: E731
    monkeypatch.setattr(Launcher, "command", command)
    monkeypatch.setattr(preflight, "ARRIVE_S", 3.0)
    monkeypatch.setattr(preflight.signal, "signal", lambda *_: None)  # of the tests' process
    (tmp_path / "site.json").write_text(json.dumps({"run_root": str(tmp_path / "runs"), "python": sys.executable}))
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    words = ["--site", str(tmp_path / "site.json"), "--launcher", "pdsh", "--slots", "1"]
    assert preflight.main([*words, "--megabytes", "4"]) == bool(problem)
    shown, kept = capsys.readouterr().out.splitlines(), list((tmp_path / "runs").iterdir())
    if problem:
        assert shown[-2:] == [f"problem: {problem}", f"the ranks' output is in {kept[0]}"]
    else:
        assert (shown[-1], kept) == ("nothing found that would break a run", [])


# --- judging what ranks said

NOTHING = "nothing found that would break a run"
SOFTWARE: dict[str, str | None] = {"code": "abc", "python": "3.11.7", "torch": "2.13.0"}
HOSTS = ("n1", "n2", "n3", "n4")


def _answers(hosts: tuple[str, ...], **changes: dict[str, Any]) -> list[dict[str, Any]]:
    """Of two ranks on each host, which see a GPU each; `changes` by host."""
    found = []
    for rank in range(2 * len(hosts)):
        host = hosts[rank // 2]
        answer = {"host": host, "gpus": {f"GPU-{rank}": "H100"}, "cores": f"{rank} (0)", "faults": []}
        found.append(answer | ({} if rank % 2 else {"software": SOFTWARE}) | changes.get(host, {}))
    return found


def _judged(hosts: tuple[str, ...], **changes: dict[str, Any]) -> list[str]:
    """What it prints of problems and warnings."""
    report = Report()
    judge_hosts(_answers(hosts, **changes), dict.fromkeys(hosts, 2), report)
    lines = report.format().splitlines()
    assert (lines[-1] == NOTHING) == (not report.found["problem"])
    return [line for line in lines if line.startswith(("problem", "warning"))]


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({}, []),
        ({"software": SOFTWARE | {"code": "x"}}, ["problem: n2: code is x, on most other hosts abc"]),
        ({"software": SOFTWARE | {"torch": None}}, ["problem: n2: torch isn't installed"]),
        ({"gpus": {"GPU-1": "H100"}}, ["problem: n2: 1 GPUs are visible, 2 ranks are to run"]),
        ({"gpus": {"1": "A100", "2": "A100"}}, ["problem: n2: gpu is A100, on most other hosts H100"]),
        ({"gpus": {"1": "A100", "2": "H100"}}, ["problem: n2: gpu is A100 and H100, on most other hosts H100"]),
        ({"faults": [[True, "no driver"], [False, "ulimit"]]}, ["problem: n2: no driver", "warning: n2: ulimit"]),
    ],
)
def test_the_host_that_differs_is_named(changes: dict[str, Any], found: list[str]) -> None:
    assert _judged(("n1", "n2", "n3"), n2=changes) == found


def test_what_is_missing_is_its_own_hosts_fault_and_a_tie_names_both() -> None:
    without, other = ({"software": SOFTWARE | {"torch": version}} for version in (None, "2.12.0"))
    assert _judged(("n1", "n2"), n1=without) == ["problem: n1: torch isn't installed"]
    assert _judged(("n1", "n2"), n1=other) == ["problem: n1, n2: torch differs: n1 2.12.0, n2 2.13.0"]
    assert _judged(("n1", "n2"), n1=without, n2=without) == ["problem: n1, n2: torch isn't installed on any host"]


def test_table_and_what_holds_of_many_hosts() -> None:
    report, hosts = Report(), tuple(f"n{number}" for number in range(MOST_NAMED + 3))
    changes = {"faults": [[False, "ulimit"]], "gpus": {}}
    judge_hosts(_answers(hosts, **dict.fromkeys(hosts, changes)), dict.fromkeys(hosts, 2), report)
    header, first, *_, warning, last = report.format().splitlines()
    assert header.split() == ["host", "code", "torch", "gpu", "cores", "(NUMA)"]
    assert first.split() == ["n0", "abc", "2.13.0", "none", "0", "(0);", "1", "(0)"]
    assert (warning, last) == ("warning: n0, n1, n2, n3, n4, n5, n6, n7 and 3 more: ulimit", NOTHING)


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({}, []),
        ({3: {"wrong": 5}}, ["problem: n2: rank 3 has 5 wrong elements after an all-reduce"]),
        ({2: {"clock": 98.5}}, ["problem: n2: the clock is off by -1.5 s"]),
        # The worse of its links may be its neighbour's fault.
        (
            {2: {"links": [[2, 4, 2.0]]}, 4: {"links": [[4, 6, 2.0]]}},
            ["warning: n3: slow: link GB/s 2.00, median 20.00"],
        ),
        ({7: {"tflops": 400.0}}, ["warning: n4: slow: compute TFLOPS 400.00, median 700.00"]),
    ],
)
def test_what_ranks_measured(changes: dict[int, dict[str, Any]], found: list[str]) -> None:
    ranks = [{"clock": 100.0, "wrong": 0, "tflops": 700.0, "links": []} for _ in range(8)]
    for lead in (0, 2, 4, 6):
        ranks[lead]["links"] = [[lead, (lead + 2) % 8, 20.0]]
    report = Report()
    measured = {"bus_gb_per_s": 90.0, "ranks": [rank | changes.get(number, {}) for number, rank in enumerate(ranks)]}
    judge_ranks(measured, [host for host in HOSTS for _ in range(2)], report)
    assert [line for line in report.format().splitlines() if ": " in line] == found
    assert report.rows["all"] == {"bus, GB/s": "90.00"}
