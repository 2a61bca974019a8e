"""An agent on this host, spoken to as the job does, with small scripts for ranks."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from clap_ds.launch.connection import MARK
from clap_ds.launch.host_processes import is_running, processes_of, ranks_of
from tests.launch.conftest import wait_for

ROOT = Path(__file__).resolve().parents[2]
HOST = "here"
Process = subprocess.Popen[str]
Start = Callable[..., Process]
Message = dict[str, Any]
RUN = f"test{os.getpid()}"
ATTEMPT = f"{RUN}.1"
WAITS = (
    "import signal, sys, time; signal.signal(signal.SIGUSR1, lambda *_: sys.exit(5));"
    " print('up', flush=True); time.sleep(60)"
)
DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"


class Agent:
    """The agent's process, and the job's end of the line."""

    def __init__(self, folder: Path, environment: dict[str, str], silence_s: float = 60) -> None:
        command = [sys.executable, "-S", "-u", str(ROOT / "launch" / "host_agent.py")]
        env = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(folder), **environment}
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, env=env, cwd=folder)
        self.folder = folder
        serve = {"job": RUN, "host": HOST, "here": HOST, "job_host": HOST, "folder": str(folder)}
        self.say(do="serve", silence_s=silence_s, **serve)

    def say(self, **message: Any) -> None:
        assert self.process.stdin
        self.process.stdin.write(json.dumps(message).encode() + b"\n")
        self.process.stdin.flush()

    def messages(self) -> Iterator[Message]:
        assert self.process.stdout
        for line in self.process.stdout:
            assert line.startswith(MARK), line
            yield json.loads(line[len(MARK) :])

    def hear(self, name: str, wanted: Callable[[Any], bool] = lambda value: True) -> Message:
        """The next message with this field, and a value that is wanted."""
        return next(message for message in self.messages() if name in message and wanted(message[name]))

    def ranks(self, wanted: Callable[[Any], bool]) -> None:
        """Read until the agent knows of as many ranks."""
        self.hear("ranks", lambda notes: wanted(len(notes)))

    def ask(self, *command: str) -> Message:
        """What the agent answers to a command."""
        environment, gpus = {"PATH": os.environ["PATH"], "MINE": "secret"}, {HOST: ["4", "6"]}
        slots, folder = {HOST: 2}, str(self.folder)
        self.say(do="ask", command=[*command], environment=environment, slots=slots, gpus=gpus, folder=folder)
        return self.hear("answer")

    def start(self, script: str, slots: int = 1, *, attempt: str = ATTEMPT, **changes: Any) -> None:
        """Start ranks one by one, as the launcher srun does."""
        message = {
            "launcher": "srun", "slots": {HOST: slots}, "gpus": {}, "address": HOST, "port": 17000, "wrapper": [],
            "python": sys.executable, "command": ["-c", script], "environment": {"PATH": os.environ["PATH"]},
            "folder": str(self.folder), "job_host": HOST, "files": {}, "start_limit_s": 60.0,
        }  # fmt: skip
        self.say(do="start", attempt=attempt, **{**message, **changes})


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a process with variables of a run, and waits until it is up."""
    with contextlib.ExitStack() as stack:

        def start(script: str, **variables: str) -> Process:
            command, env = [sys.executable, "-S", "-c", script], {**os.environ, "CLAP_JOB": ATTEMPT, **variables}
            process = stack.enter_context(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True))
            stack.callback(process.kill)
            assert process.stdout
            assert process.stdout.readline() == "up\n"
            return process

        yield start


@pytest.fixture
def start_agent(tmp_path: Path) -> Iterator[Callable[..., Agent]]:
    with contextlib.ExitStack() as stack:

        def start_agent(**environment: str) -> Agent:
            agent = Agent(tmp_path, environment)
            stack.enter_context(agent.process)
            stack.callback(agent.process.kill)
            agent.hear("ranks")  # from now on it lets processes of the run be
            return agent

        yield start_agent
        for pid in processes_of(RUN + "."):
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
def agent(start_agent: Callable[..., Agent]) -> Agent:
    return start_agent()


# --- processes of a run


def test_knows_ranks_from_other_processes(start: Start) -> None:
    rank, launcher = start(WAITS, RANK="0"), start(WAITS)
    other = start(WAITS, CLAP_JOB=f"{RUN}.10", RANK="0")
    nobodys = start("import os; del os.environ; " + WAITS, CLAP_JOB="", RANK="0")
    with_worker = start("import subprocess; subprocess.Popen(['sleep', '60']); " + WAITS, RANK="1")
    assert ranks_of(ATTEMPT) == {rank.pid: 0, with_worker.pid: 1}
    found = processes_of(ATTEMPT)
    assert launcher.pid in found
    assert not {other.pid, nobodys.pid} & set(found)
    assert other.pid in processes_of(f"{RUN}.")
    assert processes_of("") == {}, "between attempts there is nobody to signal"
    # What has just been started shows no environment yet, for a moment.
    worker = lambda: set(processes_of(ATTEMPT)) - {rank.pid, launcher.pid, with_worker.pid}  # noqa: E731
    wait_for(worker)
    (found_worker,) = worker()
    os.kill(found_worker, signal.SIGKILL)


def test_clears_an_earlier_start_of_the_run(start: Start, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    earlier = start(DEAF, CLAP_JOB=f"{RUN}.0", RANK="0")
    similar = start(WAITS, CLAP_JOB=f"1{RUN}.0", RANK="0")
    (tmp_path / f"clap-1.{RUN}.0-99999999").mkdir()  # of an agent that is no more
    (tmp_path / f"clap-1.{RUN}.0-{os.getpid()}").mkdir()
    request.getfixturevalue("agent")
    assert earlier.wait(180) == -signal.SIGKILL
    assert similar.poll() is None
    assert [path.name for path in tmp_path.iterdir()] == [f"clap-1.{RUN}.0-{os.getpid()}"]


# --- an attempt


@pytest.mark.end_to_end
def test_starts_ranks_and_tells_of_them(agent: Agent, tmp_path: Path) -> None:
    script = """
import json, os, sys, time
note = {"step": 4, "made": 3, "doing": "step", "at": time.monotonic() - 7}
open(f"{os.environ['CLAP_PROGRESS']}/{os.environ['RANK']}", "w").write(json.dumps(note))
names = ("RANK", "WORLD_SIZE", "CUDA_VISIBLE_DEVICES", "CLAP_JOB", "MINE")
print(*[os.environ[name] for name in names], os.getcwd(), "HOME" in os.environ, flush=True)
sys.stderr.write("one more\\n")
while not os.path.exists("go"):
    time.sleep(0.05)
sys.exit(int(os.environ["RANK"]) * 3)
"""
    agent.start(script, 2, gpus={HOST: ["4", "6"]}, environment={"MINE": "secret"})
    said, notes, errors = set(), {}, 0
    for message in agent.messages():
        said |= {message["out"]} if "out" in message else set()
        errors += "err" in message
        notes.update({note["rank"]: note for note in message.get("ranks", []) if "step" in note})
        if len(notes) == 2:
            (tmp_path / "go").touch()
        if "ended" in message:
            break
    visible = "0,1" if "SLURM_JOB_ID" not in os.environ else "4,6"
    assert {line.replace("4,6", visible) for line in said} == {
        f"{rank} 2 {visible} {ATTEMPT} secret {tmp_path} False" for rank in (0, 1)
    }
    assert (message["attempt"], message["ended"], message["why"], errors) == (ATTEMPT, 3, "one more", 2)
    assert {rank: (note["step"], note["made"], note["doing"]) for rank, note in notes.items()} == {
        0: (4, 3, "step"), 1: (4, 3, "step"),
    }  # fmt: skip
    assert all(7 <= note["age"] < 60 for note in notes.values())
    agent.say(do="end")
    assert agent.hear("clear")["attempt"] == ATTEMPT
    assert [*tmp_path.iterdir()] == [tmp_path / "go"], "their notes are gone"


def test_signals_reach_ranks_and_the_rest_is_ended(start: Start, agent: Agent) -> None:
    launcher = start(WAITS)
    nobodys = start(WAITS, CLAP_JOB="", RANK="0")
    agent.say(do="signal", number=int(signal.SIGUSR1))
    agent.hear("ranks", lambda notes: notes == [])
    agent.start(WAITS)
    agent.hear("out", lambda line: line == "up")
    agent.say(do="signal", number=int(signal.SIGUSR1))
    assert agent.hear("ended")["ended"] == 5
    assert launcher.poll() is None
    assert nobodys.poll() is None, "before the attempt began no rank was this run's"
    agent.say(do="stop")
    assert agent.hear("gone")["gone"] == 1
    assert launcher.wait(180) == -signal.SIGKILL
    assert agent.process.wait(180) == 0


def test_signals_mean_to_ranks_what_they_do_elsewhere(agent: Agent) -> None:
    """The agent hears them and stays; its children must not ignore them for that: data workers are ended by SIGTERM."""
    agent.start("print(open('/proc/self/status').read())")
    line = agent.hear("out", lambda line: line.startswith("SigIgn:"))["out"]
    ignored = int(line.split()[1], 16)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
        assert not ignored >> (number - 1) & 1, number.name
        os.kill(agent.process.pid, number)
    assert agent.ask("echo", "there")["answer"] == "there\n"


@pytest.mark.end_to_end
def test_ranks_of_an_attempt_that_is_over_are_gone_and_another_begins(agent: Agent) -> None:
    agent.start(DEAF.replace("print", "print(__import__('os').getpid()); print"))
    deaf = int(agent.hear("out")["out"])
    agent.say(do="end")
    messages = [agent.hear("clear")]
    assert not is_running(deaf)
    agent.start("print('again')", attempt=f"{RUN}.2")
    for message in agent.messages():
        messages.append(message)
        if message.get("attempt") == f"{RUN}.2":
            break
    assert message["ended"] == 0
    assert {"host": HOST, "out": "again"} in messages


def test_closed_connection_ends_ranks(start: Start, agent: Agent) -> None:
    rank, child = start(WAITS, RANK="0"), start(WAITS)
    agent.start(WAITS)
    agent.ranks(lambda number: number == 2)
    assert agent.process.stdin
    agent.process.stdin.close()
    assert agent.process.wait(180) == 0
    assert rank.wait(180) == -signal.SIGTERM
    assert child.wait(180) == -signal.SIGKILL
    assert processes_of(RUN + ".") == {}


def test_whatever_goes_wrong_in_the_agent_ends_ranks(agent: Agent) -> None:
    agent.start(WAITS)
    agent.ranks(lambda number: number == 1)
    agent.say(do="signal")
    said = agent.hear("gone")
    assert said["why"] == "its agent failed: KeyError: 'number'"
    assert agent.process.wait(180) == 0
    assert processes_of(RUN + ".") == {}


def test_command_that_is_not_there(agent: Agent, tmp_path: Path) -> None:
    agent.start(WAITS, wrapper=["/no/such/program"])
    ended = agent.hear("ended")
    assert (ended["ended"], ended["why"]) == (1, "/no/such/program: No such file or directory")
    assert agent.ask("/no/such/command")["error"] == "/no/such/command: No such file or directory"


def test_answers_as_a_rank_would(start_agent: Callable[..., Agent], tmp_path: Path) -> None:
    before = time.time()
    agent = start_agent(SLURM_JOB_ID="1", CUDA_VISIBLE_DEVICES="5,7,8", API_TOKEN="the agent's own")
    script = "echo $CUDA_VISIBLE_DEVICES $MINE $API_TOKEN $PWD; echo first >&2; echo last >&2; exit 3"
    said = agent.ask("sh", "-c", script)
    assert (said["answer"], said["code"], said["error"]) == (f"5,7 secret {tmp_path}\n", 3, "last")
    assert before <= said["times"][0] <= said["times"][1] <= time.time()


# --- files that are late


@pytest.mark.end_to_end
def test_late_file_is_waited_for(agent: Agent, tmp_path: Path) -> None:
    late = tmp_path / "run.json"
    late.write_text("{")  # half of it can be seen
    agent.start(f"print(open({str(late)!r}).read())", files={str(late): 2})
    assert agent.hear("waits")["waits"] == f"for {late} to be visible there"
    late.write_text("{}")
    assert agent.hear("out")["out"] == "{}"


def test_missing_file_is_told(agent: Agent) -> None:
    agent.start(WAITS, files={"/no/such/file": 2}, start_limit_s=0.1)
    ended = agent.hear("ended")
    assert (ended["ended"], ended["why"]) == (1, f"can't see /no/such/file, which is there on {HOST}")


@pytest.mark.end_to_end
def test_no_rank_starts_after_its_attempt(agent: Agent, tmp_path: Path) -> None:
    late = tmp_path / "run.json"
    agent.start("print('late')", files={str(late): 2})
    agent.say(do="end")
    agent.hear("clear")
    late.write_text("{}")
    agent.start("import time; time.sleep(2); print('in time')", attempt=f"{RUN}.2")
    assert agent.hear("out")["out"] == "in time"


# --- stacks, monitor, record


@pytest.mark.end_to_end
def test_stacks_of_those_that_answer(agent: Agent) -> None:
    script = """
import os, sys, time
if os.environ["RANK"] == "0":
    from clap_ds.dist import progress
    progress.start(0)
elif os.environ["RANK"] == "1":
    open(f"{os.environ['CLAP_PROGRESS']}/1", "w")
    __import__("signal").signal(12, lambda *_: None)
def stands_here(): print(os.getpid(), flush=True); time.sleep(60)
stands_here()
"""
    agent.start(script, 3, environment={"PYTHONPATH": str(ROOT)})
    ranks = [int(agent.hear("out")["out"]) for _ in range(3)]
    agent.ranks(lambda number: number == 3)
    for _ in range(2):  # the second time, what it wrote then, alone
        agent.say(do="stacks")
        said = {message["rank"]: message["stacks"] for message in (agent.hear("stacks"), agent.hear("stacks"))}
        assert said[0].count("in stands_here") == 1
        assert said[1] == ""
        assert all(map(is_running, ranks)), "one that hasn't noted anything would end of the signal"


def _monitors_of(folder: Path) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            command = (entry / "cmdline").read_bytes() if entry.name.isdecimal() else b""
            if b"monitor.py" in command and str(folder).encode() in command and is_running(int(entry.name)):
                found.append(int(entry.name))
    return found


def test_monitor_goes_with_its_agent(agent: Agent, tmp_path: Path) -> None:
    agent.say(do="monitor", run_directory=str(tmp_path))
    agent.say(do="monitor", run_directory=str(tmp_path))
    wait_for(lambda: len(_monitors_of(tmp_path)) == 1 and (tmp_path / "monitor").exists())
    agent.process.kill()
    agent.process.wait(180)
    wait_for(lambda: not _monitors_of(tmp_path))


@pytest.mark.parametrize(("stopped", "run"), [(True, "run"), (False, "run"), (False, "")])
def test_record_is_completed_where_the_job_cannot(agent: Agent, tmp_path: Path, stopped: bool, run: str) -> None:
    """Without a run directory the working folder's is left alone: it is another run's."""
    (tmp_path / "run").mkdir()
    paths = [tmp_path / "job.json", tmp_path / run / "summary.json"]
    for path in paths:
        path.write_text('{"state": "running", "kept": 1}')
    if run:
        agent.say(do="monitor", run_directory=str(tmp_path / run))
    if stopped:
        agent.say(do="stop")
    else:
        assert agent.process.stdin
        agent.process.stdin.close()
    assert agent.process.wait(180) == 0
    for path in paths:
        record = json.loads(path.read_text())
        is_left = stopped or path == tmp_path / "summary.json"
        assert (record["state"], record["kept"]) == ("running" if is_left else "failed", 1)
        assert is_left or "ended before it could say why" in record["error"]


def test_silence_of_the_job_ends_the_agent(tmp_path: Path) -> None:
    agent = Agent(tmp_path, {}, silence_s=0.5)
    with agent.process:
        threading.Timer(60, agent.process.kill).start()
        agent.hear("gone")
        assert agent.process.wait(180) == 0
