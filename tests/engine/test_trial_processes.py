"""A kernel over which its process hangs, dies or ends costs itself, and nothing goes on running."""

import re
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from clap_ds.engine import trial_processes
from clap_ds.engine.kernel_trials import AttentionSite, MlpSite, Site
from clap_ds.engine.trial_processes import Conditions, Found, try_kernels
from clap_ds.model.kernel_choice import KernelChoice

CONDITIONS = Conditions(torch.device("cpu"), torch.float32, 1)
CHILD = """
import json, os, signal, subprocess, sys, time
print("what an import says", "{}", sep=chr(10), flush=True)
for question in json.load(sys.stdin):
    does, found = question["kernel"], {"seconds": 0.002} if question["what"] == "time" else {}
    if does == "is wrong":
        found = {"problem": "its output is off", "passing": False}
    if does == "lacks memory":
        found = {"problem": "out of memory", "passing": True}
    if does == "says who":
        found = {"problem": str(os.getpid()), "passing": False}
    if does == "faults":
        print(json.dumps({"problem": "illegal address", "passing": False}), flush=True)
        os._exit(0)
    if does == "aborts":
        os.abort()
    if does == "aborts when timed" and found:
        os.abort()
    if does == "exits":
        sys.exit("Traceback …" + chr(10) + "out of luck")
    if does == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if does == "hangs":
        another = subprocess.Popen(["sleep", "600"])
        print(another.pid, file=open(sys.argv[1] + "~", "w"), flush=True)
        os.replace(sys.argv[1] + "~", sys.argv[1])
        time.sleep(600)
    print(json.dumps(found), flush=True)
if does == "lingers":
    time.sleep(600)
"""


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A file that says which process goes on where a kernel hangs; time for checks is over then."""
    file = tmp_path / "pid"
    command = [sys.executable, "-I", "-S", "-c", CHILD, str(file)]
    limit_s = time.monotonic() + 60
    clock = SimpleNamespace(
        monotonic=lambda: 18.0 if file.exists() else 0.0 if time.monotonic() < limit_s else 1e9, sleep=time.sleep
    )
    monkeypatch.setattr(trial_processes, "_command", lambda conditions: command)
    monkeypatch.setattr(trial_processes, "time", clock)
    return file


def outcome(patch: pytest.MonkeyPatch, *of_sites: str, children: int = 1) -> tuple[list[Found], str | None]:
    """Found of sites whose kernels do what is said, and the problem."""
    known: dict[Site, Found] = {AttentionSite(8, 8, 0, 1, 16 * number): {} for number, _ in enumerate(of_sites)}
    patch.setattr(
        AttentionSite, "candidates", lambda site: list(map(KernelChoice, of_sites[site.dim // 16].split(", ")))
    )
    patch.setattr(trial_processes, "_num_children", lambda *_: children)
    problem = try_kernels(known, CONDITIONS)
    return list(known.values()), problem


def test_each_kernel_costs_itself(monkeypatch: pytest.MonkeyPatch, hanging: Path) -> None:
    (first, second), problem = outcome(
        monkeypatch,
        "says who, is wrong, faults, aborts, exits, aborts when timed, is right",
        "says who, lingers",
        children=2,
    )
    assert first.pop("says who") != second.pop("says who")
    assert first == {
        "is wrong": "its output is off",
        "faults": "illegal address",
        "aborts": "its process ended by SIGABRT",
        "exits": "its process ended with exit code 1: out of luck",
        "aborts when timed": "its process ended by SIGABRT",
        "is right": 0.002,
    }
    assert (second, problem) == ({"lingers": 0.002}, None)


@pytest.mark.parametrize(
    ("kernels", "known", "problem"),
    [
        ("lacks memory, is right", {"is right": 0.002}, "lacks memory at attention 8×8×0, .*: out of memory"),
        ("is right, is killed, aborts", {"is right": 0.002}, "is killed at .*: its process ended by SIGKILL"),
        ("is right, hangs, aborts", {"is right": 0.002}, "hangs at .*: time was over"),
    ],
)
def test_what_may_end_otherwise_another_time_stays_open(
    monkeypatch: pytest.MonkeyPatch, hanging: Path, kernels: str, known: Found, problem: str
) -> None:
    (found,), why = outcome(monkeypatch, kernels)
    assert found == known
    assert re.fullmatch(problem, str(why))


def test_nothing_that_a_kernel_has_started_goes_on(monkeypatch: pytest.MonkeyPatch, hanging: Path) -> None:
    outcome(monkeypatch, "hangs")
    deadline = time.monotonic() + 60
    while _is_running(int(hanging.read_text())):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_what_is_known_is_not_tried(monkeypatch: pytest.MonkeyPatch, hanging: Path) -> None:
    monkeypatch.setattr(MlpSite, "candidates", lambda site: [KernelChoice("aborts"), KernelChoice("is right")])
    known: dict[Site, Found] = {MlpSite(8, 32, 4): {"aborts": 7.0}}
    assert try_kernels(known, CONDITIONS) is None
    assert list(known.values()) == [{"aborts": 7.0, "is right": 0.002}]


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        (["/there/is/no/such/program"], "No such file"),
        ([sys.executable, "-I", "-S", "-c", "raise SystemExit('all GPUs are busy')"], "exit code 1: all GPUs are busy"),
    ],
    ids=["absent", "fails at once"],
)
def test_processes_that_cannot_start_say_nothing_of_kernels(
    monkeypatch: pytest.MonkeyPatch, hanging: Path, command: list[str], problem: str
) -> None:
    monkeypatch.setattr(trial_processes, "_command", lambda conditions: command)
    found, why = outcome(monkeypatch, "is right, aborts", "is right", children=2)
    assert found == [{}, {}]
    assert problem in str(why)


@pytest.mark.end_to_end
def test_trials_of_real_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here Triton's kernels are right, too, under its interpreter."""
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(trial_processes, "TIME_LIMIT_S", 240.0)
    known: dict[Site, Found] = {site: {} for site in (AttentionSite(8, 8, 0, 1, 16), MlpSite(8, 32, 4))}
    assert try_kernels(known, CONDITIONS) is None
    for site, found in known.items():
        assert len(found) > 1
        assert {name: type(what) for name, what in found.items()} == {str(each): float for each in site.candidates()}


def _is_running(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"
