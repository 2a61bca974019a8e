"""When a run stands still, by notes over made-up times; and where its ranks are, by stacks that faulthandler wrote."""

import subprocess
import sys
from typing import Any

import pytest

from clap_ds.launch.stalls import LEAST_S, UNKNOWN_S, Stack, StepWatch, describe, elsewhere

PROGRAM = """
import faulthandler, signal, sys, threading, time
faulthandler.register(signal.SIGUSR2, sys.stdout.fileno(), all_threads=True)

class Group:
    def wait(self):
        signal.raise_signal(signal.SIGUSR2)

def read_batch():
    signal.raise_signal(signal.SIGUSR2)

def worker():
    time.sleep(60)

def train():
    {0}

threading.Thread(target=worker, daemon=True).start()
train()
"""


def _note(made: int, age: float, doing: str = "step") -> dict[str, Any]:
    return {"rank": 0, "made": made, "step": 100 + made, "doing": doing, "age": age}


def _after_steps(step_s: float, number: int = 10) -> tuple[StepWatch, float]:
    """A watch that saw a rank make steps, and the time of the last."""
    watch = StepWatch()
    for made in range(2, number + 2):
        assert watch.stalled([_note(made, 0.0)], made * step_s) is None
    return watch, (number + 1) * step_s


def _first_stall(watch: StepWatch, made: int, last: float, until_s: float) -> float | None:
    """Seconds without a step at which the watch first calls it a stall."""
    looks = range(1, int(until_s))
    return next((age for age in looks if watch.stalled([_note(made, age), _note(made, age + 30)], last + age)), None)


@pytest.mark.parametrize(("step_s", "limit_s"), [(0.5, LEAST_S), (5.0, 100.0)])
def test_stall_after_a_minute_or_twenty_steps(step_s: float, limit_s: float) -> None:
    watch, last = _after_steps(step_s)
    assert watch.usual_step_s() == pytest.approx(step_s)
    assert _first_stall(watch, 11, last, 1000) == limit_s + 1
    assert watch.stalled([_note(11, limit_s + 5), _note(11, 3)], last + limit_s + 5) is None, "one of them steps"


def test_three_times_the_longest_pause_is_waited_for() -> None:
    watch, last = _after_steps(1.0)
    for age in (10, 30, 50):  # a pause that ends by itself, such as a slow read
        assert watch.stalled([_note(11, age)], last + age) is None
    assert watch.stalled([_note(12, 0)], last + 51) is None
    assert _first_stall(watch, 12, last + 51, 1000) == 3 * 50 + 1


@pytest.mark.parametrize("doing", ["starting", "saving a checkpoint", "ending"])
def test_no_stall_while_a_rank_does_something_else(doing: str) -> None:
    watch, last = _after_steps(1.0, 2)
    assert watch.stalled([_note(3, 5000), _note(3, 5000, doing)], last + 5000) is None
    # What it took doesn't count as a step.
    assert watch.stalled([_note(4, 0), _note(4, 0)], last + 5001) is None
    assert watch.usual_step_s() == pytest.approx(1.0)
    assert watch.stalled([], last) is None
    assert watch.stalled([{"rank": 0, "state": "S"}, _note(4, 5000)], last) is None, "one has noted nothing yet"


def test_before_a_step_is_timed_ten_minutes_are_waited_for() -> None:
    watch = StepWatch()
    assert watch.stalled([_note(1, 5000)], 0.0) is None, "the first steps compile"
    assert watch.usual_step_s() is None
    assert _first_stall(watch, 2, 0.0, 1000) == UNKNOWN_S + 1


# --- where ranks are


def _stack_of(doing: str, rank: int = 0, step: int = 7, file: str = "<string>") -> Stack:
    """What a process writes of itself that does this in its main thread, beside another thread."""
    command = [sys.executable, "-c", PROGRAM.format(doing)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "worker" in text
    return Stack(rank, f"n{rank}", "S", step, text.replace("<string>", file))


@pytest.fixture(scope="module")
def waiting() -> str:
    return _stack_of("Group().wait()").text


@pytest.fixture(scope="module")
def reading() -> str:
    return _stack_of("read_batch()", file="/site/clap/loader.py").text


def _ranks(*texts: str, step: int = 7, state: str = "S") -> list[Stack]:
    return [Stack(rank, f"n{rank}", state, step, text) for rank, text in enumerate(texts)]


def test_frames_are_the_main_threads(waiting: str, reading: str) -> None:
    (waits, reads) = _ranks(waiting, reading)
    assert [function for *_, function in waits.frames()] == ["wait", "train", "<module>"]
    assert waits.waits()
    assert waits.where().startswith("in wait (<string>:")
    assert not reads.waits()
    assert reads.where().startswith("in read_batch (loader.py:")
    in_torch = Stack(0, "n0", "S", 7, reading.replace("/site/clap/loader.py", "/site/torch/distributed/c10d.py"))
    assert in_torch.waits()


def test_without_an_answer(waiting: str, reading: str) -> None:
    _, silent, _ = stacks = _ranks(waiting, "", reading, state="D")
    assert elsewhere(stacks) == [silent], "more than one that answers"
    assert silent.where() == "gives no answer (state D)"
    (stopped,) = _ranks("", state="T")
    assert stopped.where() == "stopped by a signal"
    assert elsewhere(_ranks("", "")) == [], "nobody answers: nobody is to blame"


def test_one_that_does_not_wait(waiting: str, reading: str) -> None:
    stacks = _ranks(waiting, reading)
    assert elsewhere(stacks) == [stacks[1]]
    many = _ranks(waiting, waiting, reading, waiting, reading)
    assert [stack.rank for stack in elsewhere(many)] == [2, 4]


def test_one_that_is_a_step_behind(waiting: str) -> None:
    stacks = _ranks(waiting, waiting, waiting)
    stacks[2].step = 6
    assert elsewhere(stacks) == [stacks[2]]


def test_one_that_waits_elsewhere_than_most(waiting: str) -> None:
    other = waiting.replace(" in wait", " in barrier")
    stacks = _ranks(waiting, other, waiting)
    assert elsewhere(stacks) == [stacks[1]]
    assert elsewhere(_ranks(waiting, other)) == [], "two halves: neither is most"
    assert elsewhere(_ranks(waiting, waiting, waiting)) == []
    assert elsewhere([]) == []


def test_sentence(waiting: str, reading: str) -> None:
    said = describe(61.4, 0.5, _ranks(waiting, reading, waiting))
    assert said.startswith("no step for 61 s (a step takes 0.5 s): rank 1 on n1 in read_batch (loader.py:")
    assert "; the other 2 in wait (<string>:" in said
    assert describe(700, None, _ranks(waiting, waiting)) == "no step for 700 s; all 2 ranks are alike"
