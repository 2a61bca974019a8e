"""An agent beside processes that stand in for ranks."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from clap_ds.launch.host_agent import processes_of, ranks_of

ROOT = Path(__file__).resolve().parents[2]
Process = subprocess.Popen[str]
Start = Callable[..., Process]
JOB = f"test{os.getpid()}.1"
WAITS = (
    "import signal, sys, time; signal.signal(signal.SIGUSR1, lambda *_: sys.exit(5));"
    " print('up', flush=True); time.sleep(60)"
)
DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a process with variables of a job, and waits until it is up."""
    with contextlib.ExitStack() as stack:

        def start(script: str, **variables: str) -> Process:
            command, env = [sys.executable, "-c", script], {**os.environ, "CLAP_JOB": JOB, **variables}
            process = stack.enter_context(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True))
            stack.callback(process.kill)
            assert process.stdout
            assert process.stdout.readline() == "up\n"
            return process

        yield start


@pytest.fixture
def agent() -> Iterator[Process]:
    command = [sys.executable, "-u", "launch/host_agent.py", JOB, "here"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True) as process:
        _hear(process, "alive", "0")  # from now on it lets processes of the job be
        yield process
        process.kill()


def _hear(agent: Process, *words: str) -> None:
    """Read the agent's lines up to an expected one."""
    assert agent.stdout
    assert any(line.split() == ["clap-agent", "here", *words] for line in agent.stdout)


def _say(agent: Process, line: str) -> None:
    print(line, file=agent.stdin, flush=True)


def test_knows_ranks_from_other_processes(start: Start) -> None:
    rank = start(WAITS, RANK="0")
    task = start(WAITS, SLURM_LAUNCH_NODE_IPADDR="10.0.0.1")
    launcher = start(WAITS)
    other = start(WAITS, CLAP_JOB="other.1", RANK="0")
    with_worker = start("import subprocess; subprocess.Popen(['sleep', '60']); " + WAITS, RANK="1")
    assert set(ranks_of(JOB)) == {rank.pid, task.pid, with_worker.pid}
    found = processes_of(JOB)
    assert launcher.pid in found
    assert other.pid not in found
    (worker,) = set(found) - {rank.pid, task.pid, launcher.pid, with_worker.pid}
    os.kill(worker, signal.SIGKILL)


def test_signals_ranks_and_ends_the_rest(start: Start, agent: Process) -> None:
    rank, launcher = start(WAITS, RANK="0"), start(WAITS)
    _hear(agent, "alive", "1")
    _say(agent, f"signal {int(signal.SIGUSR1)}")
    assert rank.wait(30) == 5
    _hear(agent, "alive", "0")
    assert launcher.poll() is None
    _say(agent, "stop")
    _hear(agent, "gone", "1")
    assert launcher.wait(30) == -signal.SIGKILL
    assert agent.wait(30) == 0


@pytest.mark.end_to_end
def test_closed_connection_ends_deaf_ranks(start: Start, agent: Process) -> None:
    rank = start(DEAF, RANK="0")
    _hear(agent, "alive", "1")
    assert agent.stdin
    agent.stdin.close()
    assert rank.wait(30) == -signal.SIGKILL
    assert agent.wait(30) == 0


def test_clears_an_earlier_start_of_the_job(start: Start, request: pytest.FixtureRequest) -> None:
    earlier = start(DEAF, CLAP_JOB=JOB.replace(".1", ".0"), RANK="0")
    similar = start(WAITS, CLAP_JOB="1" + JOB, RANK="0")
    request.getfixturevalue("agent")
    assert earlier.wait(30) == -signal.SIGKILL
    assert similar.poll() is None
