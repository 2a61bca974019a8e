"""Judging what hosts and ranks said; asking them is tested on a cluster."""

from __future__ import annotations

from typing import Any

import pytest

from clap_ds.launch.preflight import Report, judge_hosts, judge_ranks
from clap_ds.launch.preflight_host import code_digest, port_is_free, versions


def _answer(**changes: Any) -> dict[str, Any]:
    usual = {
        "skew_s": 0.0, "code": "abc", "versions": {"python": "3.11.7", "torch": "2.13.0"}, "gpus": ["H100, 81559 MiB, 570"] * 4,
        "free_bytes": {"runs": 10**12, "/tmp": 10**11}, "open_files": 65536, "locked_memory": -1, "port_free": True,
        "has_gpu": True, "driver": "580.65.06", "torch_cuda": "13.0", "compilers": {"C compiler": True, "Python.h": True},
    }  # fmt: skip
    return {**usual, **changes}


def _judge(**second: Any) -> Report:
    report = Report()
    answers = {"n1": _answer(), "n2": _answer(**second), "n3": _answer()}
    judge_hosts(answers, dict.fromkeys(answers, 4), report)
    return report


def test_nothing_to_say() -> None:
    report = _judge()
    assert (report.problems, report.warnings) == ([], [])
    assert report.format().splitlines()[-1] == "nothing found that would break a run"


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"code": "xyz"}, "n2: code is xyz, on most other hosts abc"),
        ({"versions": {"python": "3.11.7", "torch": "2.12.0"}}, "n2: torch is 2.12.0, on most other hosts 2.13.0"),
        ({"gpus": ["A100, 40 GB, 570"] * 4}, "n2: gpu is A100"),
        ({"gpus": ["H100, 81559 MiB, 570"] * 3}, "n2: 3 GPUs are visible, 4 ranks are to run"),
        ({"gpus": ["H100, 81559 MiB, 570"] * 3 + ["A100"]}, "n2: GPUs of several kinds"),
        ({"skew_s": -1.5}, "n2: the clock is off by -1.5 s"),
        ({"free_bytes": {"runs": 10**9, "/tmp": 10**11}}, "n2: 1.0 GB free for runs"),
        ({"port_free": False}, "n2: the port for rank 0 is taken"),
        ({"torch_cuda": None}, "n2: torch 2.13.0 is built without CUDA, and the host has a GPU"),
        ({"driver": None}, "n2: there is a GPU, but no NVIDIA driver is running"),
        ({"error": "No route to host"}, "n2 can't be reached: No route to host"),
    ],
)
def test_problem_is_told_with_its_host(changes: dict[str, Any], problem: str) -> None:
    report = _judge(**changes)
    assert len(report.problems) == 1
    assert report.problems[0].startswith(problem)


def test_limits_are_warnings() -> None:
    report = _judge(open_files=1024, locked_memory=65536)
    assert report.problems == []
    assert ["ulimit -n" in report.warnings[0], "ulimit -l" in report.warnings[1]] == [True, True]
    assert _judge(open_files=-1).warnings == []


@pytest.mark.parametrize(
    ("changes", "warning"),
    [
        ({"driver": "550.54.15"}, "n2: driver 550.54.15 is too old for torch's CUDA 13.0, which needs 580"),
        ({"compilers": {"C compiler": False, "Python.h": True}}, "n2: no C compiler: Triton ("),
        ({"compilers": {"C compiler": True, "Python.h": False}}, "n2: no Python.h: Triton ("),
    ],
)
def test_what_the_ranks_will_tell_for_sure_is_a_warning(changes: dict[str, Any], warning: str) -> None:
    report = _judge(**changes)
    assert report.problems == []
    assert len(report.warnings) == 1
    assert report.warnings[0].startswith(warning)


def test_software_for_gpus_matters_only_where_they_are_used() -> None:
    answer = _answer(driver=None, torch_cuda=None, compilers={"C compiler": False, "Python.h": False})
    for answers, on_cpu in (({"n1": answer}, True), ({"n1": answer | {"has_gpu": False, "gpus": []}}, False)):
        report = Report()
        judge_hosts(answers, {"n1": 4}, report, on_cpu=on_cpu)
        assert (report.problems, report.warnings) == ([], [])


def test_hosts_without_any_answer() -> None:
    report = Report()
    judge_hosts({"n1": {"error": "x"}}, {"n1": 4}, report)
    assert report.problems == ["n1 can't be reached: x"]


def _measured(**changes: Any) -> dict[str, Any]:
    links = [[0, 1, 20.0], [1, 2, 20.0], [2, 3, 20.0], [3, 0, 20.0]]
    return {"wrong_elements": [0] * 8, "bus_gb_per_s": 90.0, "links_gb_per_s": links, "tflops": [700.0] * 8, **changes}


def _judge_ranks(**changes: Any) -> Report:
    report = Report()
    judge_ranks(_measured(**changes), ["n1", "n2", "n3", "n4"], [2, 2, 2, 2], report)
    return report


def test_wrong_sum_breaks_a_run() -> None:
    report = _judge_ranks(wrong_elements=[0, 0, 0, 5, 0, 0, 0, 0])
    assert report.problems == ["n2: rank 3 has 5 wrong elements after an all-reduce"]


def test_slow_link_names_the_host_and_not_its_neighbours() -> None:
    report = _judge_ranks(links_gb_per_s=[[0, 1, 20.0], [1, 2, 2.0], [2, 3, 2.0], [3, 0, 20.0]])
    assert report.problems == []
    assert report.warnings == ["n3 is slow: link GB/s 2.00, median 20.00"]


def test_slow_processor_names_the_host() -> None:
    report = _judge_ranks(tflops=[700.0] * 7 + [400.0])
    assert report.warnings == ["n4 is slow: compute TFLOPS 400.00, median 700.00"]
    assert _judge_ranks().warnings == []


def test_host_script_reads_this_machine() -> None:
    import socket

    import pydantic

    assert versions()["pydantic"] == pydantic.VERSION
    assert code_digest() == code_digest()
    with socket.socket() as listener:
        listener.bind(("", 0))
        listener.listen()
        assert not port_is_free(listener.getsockname()[1])
