"""A child that hangs, dies or talks nonsense costs the answer to its question and no other, and leaves nothing running."""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from clap_ds.engine import trial_processes
from clap_ds.engine.trial_processes import Crew, Question

CHILD = """
import json, os, signal, subprocess, sys, time
print("{}", flush=True)
for line in sys.stdin:
    question = json.loads(line)
    do = question["do"]
    if do == "hang":
        time.sleep(600)
    if do == "die":
        os.kill(os.getpid(), signal.SIGSEGV)
    if do == "be killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if do == "fail":
        sys.exit("Traceback …\\nout of luck")
    if do == "start another":
        another = subprocess.Popen(["sleep", "600"])
        open(question["file"], "w").write(str(another.pid))
        time.sleep(600)
    if do == "babble":
        print("hello", flush=True)
        time.sleep(600)
    if do == "give up":
        print(json.dumps({"problem": "a fault", "ends": True}), flush=True)
        sys.exit(1)
    print(json.dumps({"did": do, "by": os.getpid()}), flush=True)
"""
WITHOUT_SITE = [sys.executable, "-I", "-S", "-c"]


def crew(most_lost: int = 9, program: str = CHILD) -> Crew:
    return Crew([*WITHOUT_SITE, program], os.environ, most_lost=most_lost)


def to(*tasks: str) -> list[Question]:
    return [{"do": task} for task in tasks]


def in_time(seconds: float = 60) -> float:
    return time.monotonic() + seconds


def test_each_child_that_fails_costs_one_answer() -> None:
    tasks = ("this", "hang", "that", "die", "be killed", "fail", "babble", "give up", "the rest")
    with crew() as children:
        answers = children.ask(to(*tasks), num_children=2, limit_s=2.0, until_s=in_time())
        again = children.ask(to("this"), num_children=1, limit_s=2.0, until_s=in_time())
    found = {tasks[number]: answer for number, answer in answers.items()}
    assert {task for task, answer in found.items() if answer.get("did") == task} == {"this", "that", "the rest"}
    problems = {task: answer["problem"] for task, answer in found.items() if "problem" in answer}
    assert problems == {
        "hang": "no end within 2 s",
        "die": "its process ended by SIGSEGV",
        "be killed": "its process ended by SIGKILL",
        "fail": "its process ended with exit code 1: out of luck",
        "babble": "its process said b'hello\\n'",
        "give up": "a fault",
    }
    assert {task for task, answer in found.items() if answer.get("passing")} == {"hang", "be killed"}
    assert again[0]["did"] == "this"


def test_after_so_many_losses_nothing_more_is_asked() -> None:
    with crew(most_lost=2) as children:
        answers = children.ask(to("die", "die", "this"), num_children=1, limit_s=9.0, until_s=in_time())
        assert (sorted(answers), children.problem) == ([0, 1], "its process ended by SIGSEGV")
        assert children.ask(to("this"), num_children=1, limit_s=9.0, until_s=in_time()) == {}


def test_questions_are_shared_and_superfluous_children_end() -> None:
    with crew() as children:
        found = children.ask(to(*"abcdefgh"), num_children=3, limit_s=9.0, until_s=in_time())
        several = {answer["by"] for answer in found.values()}
        found = children.ask(to(*"abc"), num_children=1, limit_s=9.0, until_s=in_time())
        (one,) = {answer["by"] for answer in found.values()}
        assert one in several
        assert len(several) <= 3
        assert not any(_is_running(process) for process in several - {one})
    assert not _is_running(one)


def test_children_that_are_prepared_get_the_questions() -> None:
    with crew() as children:
        children.prepare(1)
        (prepared,) = (child.process.pid for child in children._children)
        found = children.ask(to(*"ab"), num_children=1, limit_s=9.0, until_s=in_time())
    assert {answer["by"] for answer in found.values()} == {prepared}


def test_at_the_time_limit_what_is_known_is_given_back_and_nothing_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "pid"
    file.touch()
    questions = [*to("this"), {"do": "start another", "file": str(file)}, *to("that")]
    with crew() as children, monkeypatch.context() as patch:
        patch.setattr(trial_processes, "time", SimpleNamespace(monotonic=lambda: 9.0 if file.read_text() else 0.0))
        answers = children.ask(questions, num_children=1, limit_s=60, until_s=0.05)
        assert (sorted(answers), children.problem) == ([0], None)
    _wait(lambda: not _is_running(int(file.read_text())))


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        (["/there/is/no/such/program"], "No such file"),
        ([*WITHOUT_SITE, "raise SystemExit('no module named so')"], "exit code 1: no module named so"),
    ],
    ids=["absent", "fails at once"],
)
def test_children_that_cannot_start_are_given_up_soon(command: list[str], problem: str) -> None:
    with Crew(command, os.environ, most_lost=3) as children:
        assert children.ask(to("this"), num_children=2, limit_s=9, until_s=in_time()) == {}
        assert problem in str(children.problem)


def _is_running(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def _wait(condition: Callable[[], bool]) -> None:
    deadline = in_time()
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
