"""Judging what hosts and ranks said."""

from pathlib import Path
from typing import Any

import pytest

from clap_ds.launch.preflight_report import MOST_NAMED, Report, judge_hosts, judge_ranks

H100 = "H100, 81559 MiB, 570"
NOTHING = "nothing found that would break a run"


def _answer(**changes: Any) -> dict[str, Any]:
    usual = {
        "skew_s": 0.0, "code": "abc", "versions": {"python": "3.11.7", "torch": "2.13.0"}, "gpus": [H100] * 4,
        "free_bytes": {"runs": 10**12, "/tmp": 10**11}, "open_files": 65536, "locked_memory": -1,
        "gpus_used": [], "gpus_held": [], "has_gpu": True, "driver": "580.65.06", "torch_cuda": "13.0",
        "compilers": {"C compiler": True, "Python.h": True},
    }  # fmt: skip
    return {**usual, **changes}


def _judge(answers: dict[str, dict[str, Any]], *, on_cpu: bool = False) -> Report:
    report = Report()
    judge_hosts(answers, dict.fromkeys(answers, 4), report, on_cpu=on_cpu)
    return report


def _lines(report: Report, kind: str) -> list[str]:
    """What it prints as a problem or a warning."""
    return [line.removeprefix(f"{kind}: ") for line in report.format().splitlines() if line.startswith(f"{kind}: ")]


@pytest.mark.parametrize(
    ("changes", "problems", "warnings"),
    [
        ({}, [], []),
        ({"open_files": -1}, [], []),
        ({"code": "xyz"}, ["n2: code is xyz, on most other hosts abc"], []),
        (
            {"versions": {"python": "3.11.7", "torch": "2.12.0"}},
            ["n2: torch is 2.12.0, on most other hosts 2.13.0"],
            [],
        ),
        ({"gpus": ["A100, 40 GB, 570"] * 4}, ["n2: gpu is A100"], []),
        ({"gpus": [H100] * 3}, ["n2: 3 GPUs are visible, 4 ranks are to run"], []),
        ({"gpus": [H100] * 3 + ["A100"]}, ["n2: GPUs of several kinds"], []),
        ({"skew_s": -1.5}, ["n2: the clock is off by -1.5 s"], []),
        ({"free_bytes": {"runs": 10**9, "/tmp": 10**11}}, ["n2: 1.0 GB free for runs"], []),
        ({"gpus_used": ["GPU 1 is in use by …"]}, ["n2: GPU 1 is in use by …"], []),
        ({"gpus_held": ["GPU 1 has …"]}, [], ["n2: GPU 1 has …"]),
        ({"torch_cuda": None}, ["n2: torch 2.13.0 is built without CUDA, and the host has a GPU"], []),
        ({"driver": None}, ["n2: there is a GPU, but no NVIDIA driver is running"], []),
        ({"error": "can't be reached: No route to host"}, ["n2: can't be reached: No route to host"], []),
        ({"open_files": 1024, "locked_memory": 65536}, [], ["n2: ulimit -n is 1024", "n2: ulimit -l is 65536"]),
        ({"driver": "550.54.15"}, [], ["n2: driver 550.54.15 is too old for torch's CUDA 13.0, which needs 580"]),
        ({"compilers": {"C compiler": False, "Python.h": True}}, [], ["n2: no C compiler: Triton ("]),
        ({"compilers": {"C compiler": True, "Python.h": False}}, [], ["n2: no Python.h: Triton ("]),
    ],
)
def test_the_host_that_differs_is_named(changes: dict[str, Any], problems: list[str], warnings: list[str]) -> None:
    report = _judge({"n1": _answer(), "n2": _answer(**changes), "n3": _answer()})
    for found, expected in ((_lines(report, "problem"), problems), (_lines(report, "warning"), warnings)):
        assert [text.startswith(start) for text, start in zip(found, expected, strict=True)] == [True] * len(expected)
    assert (report.format().splitlines()[-1] == NOTHING) == (not problems)


def test_software_for_gpus_matters_only_where_they_are_used() -> None:
    answer = _answer(driver=None, torch_cuda=None, compilers={"C compiler": False, "Python.h": False})
    for report in (_judge({"n1": answer}, on_cpu=True), _judge({"n1": answer | {"has_gpu": False, "gpus": []}})):
        assert (report.problems, report.warnings) == ({}, {})


def test_what_holds_of_many_hosts_is_said_once() -> None:
    few = _answer(open_files=1024)
    report = _judge({f"n{number}": few for number in range(MOST_NAMED + 3)})
    (line,) = _lines(report, "warning")
    assert line.startswith("n0, n1, n2, n3, n4, n5, n6, n7 and 3 more: ulimit -n is 1024")


def test_nobody_answers() -> None:
    assert _lines(_judge({"n1": {"error": "was lost"}}), "problem") == ["n1: was lost"]


@pytest.mark.parametrize(
    ("changes", "problems", "warnings"),
    [
        ({}, [], []),
        ({"wrong_elements": [0, 0, 0, 5, 0, 0, 0, 0]}, ["n2: rank 3 has 5 wrong elements after an all-reduce"], []),
        # The worse of its links may be its neighbour's fault.
        ({"links_gb_per_s": [20.0, 2.0, 2.0, 20.0]}, [], ["n3: slow: link GB/s 2.00, median 20.00"]),
        ({"tflops": [700.0] * 7 + [400.0]}, [], ["n4: slow: compute TFLOPS 400.00, median 700.00"]),
    ],
)
def test_what_ranks_measured(changes: dict[str, Any], problems: list[str], warnings: list[str]) -> None:
    usual = {"wrong_elements": [0] * 8, "bus_gb_per_s": 90.0, "links_gb_per_s": [20.0] * 4, "tflops": [700.0] * 8}
    measured: dict[str, Any] = {**usual, **changes}
    measured["links_gb_per_s"] = [[n, (n + 1) % 4, rate] for n, rate in enumerate(measured["links_gb_per_s"])]
    report = Report()
    judge_ranks(measured, dict.fromkeys(["n1", "n2", "n3", "n4"], 2), report)
    assert (_lines(report, "problem"), _lines(report, "warning")) == (problems, warnings)


def test_a_folder_that_is_kept_is_named() -> None:
    report = Report(kept=Path("/runs/preflight-x"))
    report.problem("the ranks failed: out of memory")
    assert report.format().splitlines()[-2:] == [
        "problem: the ranks failed: out of memory", "the ranks' output and job.json are in /runs/preflight-x",
    ]  # fmt: skip
