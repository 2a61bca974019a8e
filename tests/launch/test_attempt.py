"""One attempt with stand-ins for the hosts' agents: why it ends, what is said of it, which host it is put down to."""

import json
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clap_ds.launch import attempt as module
from clap_ds.launch.agents import Agents, Host
from clap_ds.launch.attempt import Attempt
from clap_ds.launch.connection import MARK, Message, to_line
from clap_ds.launch.recovery import Ending

PLAY = Callable[["PlayedAgents", Message], None]
NUM_RANKS = 2
HALF = "half a record"


class PlayedAgents(Agents):
    """Hosts whose answers to the job's messages are played by a function of the test; they confirm an attempt's end."""

    def __init__(self, names: list[str], play: PLAY) -> None:
        super().__init__("j", None, 60.0, lambda message: self.attempt.hear(message))
        self._stopped.set()  # nobody is to be pinged
        self.hosts = {name: Host(name, heard=self.clock.now()) for name in names}
        self.said: list[Message] = []
        self.attempt: Any = None
        self._play = play

    def say(self, **message: Any) -> None:
        self.said.append(message)
        self._play(self, message)
        if message["do"] == "end":
            [self.tell(name, clear=0) for name, host in self.hosts.items() if host.lost is None]

    def tell(self, name: str, **message: Any) -> None:
        self._hear(MARK + to_line({"host": name, **message}))

    def end(self, name: str, code: int, why: str = "") -> None:
        self.tell(name, attempt="j.0", ended=code, why=why)

    def ranks(self, name: str, number: int = NUM_RANKS, **note: Any) -> None:
        first = NUM_RANKS * list(self.hosts).index(name)
        self.tell(name, ranks=[{"rank": first + index, "state": "S", **note} for index in range(number)])


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Ending, Attempt]]:
    for name, value in (("RANK_LOST_S", 0.0), ("LOOK_S", 0.001), ("STACKS_S", 0.05)):
        monkeypatch.setattr(module, name, value)
    (tmp_path / "run").mkdir()

    def run(play: PLAY, *, hosts: int = 2, signals: list[signal.Signals] | None = None) -> tuple[Ending, Attempt]:
        names = [f"n{number}" for number in range(1, hosts + 1)]
        agents = PlayedAgents(names, play)
        start = {"do": "start", "attempt": "j.0", "slots": dict.fromkeys(names, NUM_RANKS)}
        received = [] if signals is None else signals
        attempt = Attempt(agents, start, lambda: received[0] if received else None, 0.05, tmp_path)
        agents.attempt = attempt
        return attempt.run(), attempt

    return run


def _on_start(script: PLAY) -> PLAY:
    return lambda agents, message: script(agents, message) if message["do"] == "start" else None


def _summary(tmp_path: Path, **fields: Any) -> None:
    (tmp_path / "run" / "summary.json").write_text(json.dumps(fields))


def _recorded(tmp_path: Path) -> tuple[str, str | None]:
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    return summary["state"], summary.get("error")


def _tells_run(tmp_path: Path, agents: PlayedAgents, *codes: int, why: str = "") -> None:
    agents.tell("n1", out=f"run directory: {tmp_path / 'run'}")
    for name, code in zip(agents.hosts, codes, strict=True):
        agents.end(name, code, why if code else "")


@pytest.mark.parametrize(
    ("state", "codes", "expected"),
    [
        ("completed", (0, 0), ("completed", 0)),
        ("completed", (0, 1), ("failed", 1)),
        (HALF, (0, 0), ("failed", 1)),
        ("running", (0, 0), ("failed", 1)),  # launchers that say all is well although the run never said so
        ("out_of_memory", (0, 1), ("out_of_memory", 1)),
        ("failed", (3, 0), ("failed", 3)),
        ("terminated", (15, 0), ("failed", 15)),
        (None, (0, 0), ("completed", 0)),
        (None, (3, 0), ("failed", 3)),
    ],
)
def test_state_and_code(run: Any, tmp_path: Path, state: str | None, codes: tuple[int, int], expected: Any) -> None:
    if state == HALF:
        (tmp_path / "run" / "summary.json").write_text('{"state": "comp')
    elif state:
        _summary(tmp_path, state=state, error="why" if state == "failed" else None)

    def play(agents: PlayedAgents, message: Message) -> None:
        if state:
            _tells_run(tmp_path, agents, *codes)
        else:
            [agents.end(name, code) for name, code in zip(agents.hosts, codes, strict=True)]

    ending, attempt = run(_on_start(play))
    assert (ending.state, ending.code) == expected
    assert ending.hosts == []
    if state:
        assert attempt.run_directory == tmp_path / "run"
        assert ("summary.json can't be read" in ending.message) == (state == HALF)
        assert state == HALF or _recorded(tmp_path)[0] == ending.state
        assert {"do": "monitor", "run_directory": str(tmp_path / "run")} in attempt.agents.said


ECC = "torch.cuda.CudaError: CUDA error: uncorrectable ECC error encountered"
GPU = "torch.AcceleratorError: CUDA error: {}".format
ENDED_1 = "n1: its ranks ended with code 1; "


@pytest.mark.parametrize(
    ("script", "message", "hosts"),
    [
        # The first error of a rank is why.
        (
            "n2 err Traceback (most recent call last):|n2 err " + ECC + "|n1 err RuntimeError: the other is gone"
            "|n2 ended 1 last line|n1 ended 0",
            "n2: its ranks ended with code 1: last line; " + ECC, "n2",
        ),
        ("n1 err " + GPU("an illegal memory access was encountered") + "|n1 ended 1|n2 ended 0", ENDED_1 + GPU("an ill"), "n1"),
        # A size that a GPU can't do is no fault of the host's, and neither is a mistake of the user's.
        ("n1 err " + GPU("invalid configuration argument") + "|n1 ended 1|n2 ended 0", ENDED_1 + GPU("invalid"), ""),
        ("n1 err " + GPU("out of memory") + "|n1 ended 1|n2 ended 0", ENDED_1 + GPU("out of memory"), ""),
        ("n1 ended 2 error: NCCL_ALGO: no such|n2 ended 2 error: NCCL_ALGO: no such", "n1: its ranks ended with code 2", ""),
        ("n1 ended 247|n2 ended 0", "n1: its ranks ended with code 247 (killed by SIGKILL)", "n1"),
        ("n1 ended 137|n2 ended 0", "n1: its ranks ended with code 137 (killed by SIGKILL)", "n1"),
        ("n1 ended 139|n2 ended 0", "n1: its ranks ended with code 139 (killed by SIGSEGV)", "n1"),
        # The others wait for a host that has failed, or lost ranks.
        ("n1 ranks 2|n2 ended 7 its words", "n2: its ranks ended with code 7: its words; the other hosts went", "n2"),
        ("n1 ranks 2|n2 ranks 2|n2 ranks 1", "ranks ended while others went on: n2 has 1 of 2 ranks left", "n2"),
    ],
)  # fmt: skip
def test_why_it_failed_and_whose_fault_that_is(run: Any, script: str, message: str, hosts: str) -> None:
    def play(agents: PlayedAgents, _: Message) -> None:
        for name, what, *rest in (line.split(" ", 2) for line in script.split("|")):
            if what == "err":
                agents.tell(name, err=rest[0])
            elif what == "ranks":
                agents.ranks(name, int(rest[0]))
            else:
                code, _, why = rest[0].partition(" ")
                agents.end(name, int(code), why)

    ending, _ = run(_on_start(play))
    assert ending.message.startswith(message)
    assert (ending.state, ending.hosts, ending.lost) == ("failed", hosts.split(), False)


def test_record_names_the_host_that_lost_a_rank_first(run: Any, tmp_path: Path) -> None:
    _summary(tmp_path, state="failed", error="Gloo: connection reset by peer")

    def play(agents: PlayedAgents, message: Message) -> None:
        [agents.ranks(*each) for each in (("n1", 2), ("n2", 2), ("n2", 1), ("n1", 0))]
        _tells_run(tmp_path, agents, 1, 1)

    ending, _ = run(_on_start(play))
    assert _recorded(tmp_path) == ("failed", "rank 3 on n2 ended first; Gloo: connection reset by peer")
    assert (ending.message, ending.hosts) == (_recorded(tmp_path)[1], ["n2"])


def test_lost_host_ends_the_others(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    def play(agents: PlayedAgents, message: Message) -> None:
        agents.ranks("n1")
        agents.hosts["n2"].lost = "no sign of life for 61 s"

    ending, _ = run(_on_start(play))
    assert ending == Ending("failed", "lost n2: no sign of life for 61 s", 1, ["n2"], lost=True)
    assert "didn't confirm" not in capsys.readouterr().err, "nobody expects a lost host to"


def test_late_end_of_the_attempt_before_is_not_this_ones(run: Any) -> None:
    def play(agents: PlayedAgents, message: Message) -> None:
        agents.end("n1", 0)
        agents.tell("n1", attempt="j.00", ended=137, why="")
        agents.end("n2", 0)

    assert run(_on_start(play))[0].state == "completed"


# --- signals


@pytest.mark.parametrize(
    ("number", "summary", "expected"),
    [
        (signal.SIGUSR1, {"state": "timeout", "step": 40, "checkpoints": [{"saved": True}]}, ("timeout", 0)),
        (signal.SIGUSR1, {"state": "timeout", "step": 40, "checkpoints": [{"saved": False}]}, ("timeout", 138)),
        (signal.SIGUSR1, {"state": "running"}, ("timeout", 138)),
        (signal.SIGTERM, {"state": "terminated"}, ("terminated", 143)),
        (signal.SIGTERM, {"state": "failed", "error": "gloo: reset"}, ("terminated", 143)),
        (signal.SIGTERM, {"state": "completed"}, ("completed", 0)),
    ],
)
def test_signal_is_passed_on(run: Any, tmp_path: Path, number: signal.Signals, summary: Any, expected: Any) -> None:
    received: list[signal.Signals] = []
    _summary(tmp_path, state="running")

    def play(agents: PlayedAgents, message: Message) -> None:
        if message["do"] == "start":
            agents.tell("n1", out=f"run directory: {tmp_path / 'run'}")
            [agents.ranks(name) for name in agents.hosts]
            received.append(number)
        elif message["do"] == "signal":
            assert message["number"] == number
            _summary(tmp_path, **summary)
            [agents.end(name, 0) for name in agents.hosts]

    ending, _ = run(play, signals=received)
    assert (ending.state, ending.code) == expected
    assert _recorded(tmp_path)[0] == ending.state


def test_ranks_that_save_are_waited_for(run: Any, tmp_path: Path) -> None:
    received: list[signal.Signals] = []

    def ends(agents: PlayedAgents) -> None:
        _summary(tmp_path, state="timeout", step=40, checkpoints=[{"saved": True}])
        [agents.end(name, 0) for name in agents.hosts]

    def play(agents: PlayedAgents, message: Message) -> None:
        if message["do"] == "start":
            agents.tell("n1", out=f"run directory: {tmp_path / 'run'}")
            [agents.ranks(name) for name in agents.hosts]
            received.append(signal.SIGUSR1)
        elif message["do"] == "signal":
            threading.Timer(0.1, ends, [agents]).start()

    ending, _ = run(play, signals=received)
    assert (ending.state, ending.code) == ("timeout", 0)
    assert ending.message.endswith("and saved at step 40")


def test_ranks_that_do_not_end_are_given_their_time(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GRACE_S", dict.fromkeys(signal.Signals, 0.0))
    received: list[signal.Signals] = []

    def play(agents: PlayedAgents, message: Message) -> None:
        [agents.ranks(name) for name in agents.hosts]
        received.append(signal.SIGTERM)

    ending, attempt = run(play, signals=received)
    assert (ending.state, ending.code) == ("terminated", 143)
    assert [message["do"] for message in attempt.agents.said] == ["start", "signal", "end"]


# --- a run that stands still


@pytest.mark.parametrize("keeps", [True, False])
def test_stall_names_the_rank_and_keeps_stacks(run: Any, tmp_path: Path, monkeypatch: Any, keeps: bool) -> None:
    if not keeps:
        (tmp_path / "stacks").write_text("a file is in the way")
    own = tmp_path / "stacks" / "rank2-failing.txt"  # as `clap.debug` has the rank itself write it
    if keeps:
        own.parent.mkdir()
        own.write_text("its own")
    waits, reads = (f'Current thread 0x1:\n  File "a.py", line 3 in {name}\n' for name in ("wait", "read"))

    def play(agents: PlayedAgents, message: Message) -> None:
        if message["do"] == "start":
            for name in agents.hosts:
                agents.ranks(name, step=5, made=5, doing="step", age=601.0)
        elif message["do"] == "stacks":
            for rank, name in enumerate(["n1", "n1", "n2", "n2"]):
                agents.tell(name, rank=rank, state="S", step=5, stacks=reads if rank == 2 else waits)

    ending, _ = run(play)
    expected = "no step for 601 s: rank 2 on n2 in read (a.py:3); the other 3 in wait (a.py:3)"
    assert ending.message.startswith(expected)
    assert ending.hosts == ["n2"]
    if keeps:
        assert ending.message.endswith(f"; all stacks are in {tmp_path}/stacks")
        kept = (tmp_path / "stacks" / "rank2.txt").read_text()
        assert kept.startswith("# rank 2 on n2, ")
        assert kept.endswith(reads)
        assert (len([*own.parent.iterdir()]), own.read_text()) == (5, "its own")
    else:
        assert "the stacks can't be kept" in ending.message


def test_not_all_ranks_are_up_yet(run: Any) -> None:
    def play(agents: PlayedAgents, message: Message) -> None:
        if message["do"] == "start":
            agents.ranks("n1", step=5, made=5, doing="step", age=601.0)
            threading.Timer(0.1, lambda: [agents.end(name, 0) for name in agents.hosts]).start()
        assert message["do"] != "stacks"

    assert run(play)[0].state == "completed"


def test_output_is_passed_on_with_its_host(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    def play(agents: PlayedAgents, message: Message) -> None:
        agents.tell("n1", out="a line")
        agents.tell("n1", err="a word")
        agents.tell("n1", waits="for /f to be visible there")
        [agents.end(name, 0) for name in agents.hosts]

    run(_on_start(play))
    shown = capsys.readouterr()
    assert shown.out == "n1: a line\n"
    assert shown.err == "n1: a word\nn1 waits for /f to be visible there\n"
    run(_on_start(play), hosts=1)
    assert capsys.readouterr().out == "a line\n"
