"""Many hosts' agents on this machine, reached by an `ssh` that runs its command here; and who is missing, lost or refused."""

import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from clap_ds.launch import agents as module
from clap_ds.launch.agents import Agents
from clap_ds.launch.connection import Message, groups_of
from clap_ds.launch.host_processes import is_running
from tests.launch.conftest import wait_for

ROOT = Path(__file__).resolve().parents[2]
SSH = """#!/bin/sh
while case $1 in -*) true ;; *) false ;; esac; do shift; done
host=$1; shift
echo "$PPID $$ $host" >> '{0}/started'
case " $(cat '{0}/refuses' 2>&-) " in *" $host "*) echo "ssh: connect to host $host: Connection refused"; exit 255 ;; esac
case " $(cat '{0}/hangs' 2>&-) " in *" $host "*) exec sleep 600 ;; esac
exec sh -c "exec $*"
"""


class Network:
    """Hosts of names `n000`, …: `refuses` and `hangs` take those that do; processes by host as they were started."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "ssh").write_text(SSH.format(folder))
        (folder / "ssh").chmod(0o755)
        self.heard: list[Message] = []

    def agents(self, lost_after_s: float = 60.0) -> Agents:
        return Agents(f"net{os.getpid()}.{self.folder.name}", None, lost_after_s, self.heard.append)

    def started(self) -> list[tuple[int, int, str]]:
        """Parent, process id and host, in their order."""
        path = self.folder / "started"
        lines = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
        return [(int(parent), int(pid), host) for parent, pid, host in lines]

    def write(self, name: str, *hosts: str) -> None:
        (self.folder / name).write_text(" ".join(hosts))


@pytest.fixture
def network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Network]:
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    made = Network(tmp_path)
    yield made
    for _, pid, _ in made.started():
        if is_running(pid):
            os.kill(pid, signal.SIGKILL)


def _names(number: int) -> list[str]:
    return [f"n{index:03}" for index in range(number)]


def _ask(network: Network, agents: Agents, *command: str) -> dict[str, str]:
    """What a command prints, by host."""
    network.heard.clear()
    slots = dict.fromkeys(agents.hosts, 1)
    agents.say(do="ask", command=[*command], slots=slots, gpus={}, folder="/", environment={"PATH": os.environ["PATH"]})
    up = [name for name, host in agents.hosts.items() if host.heard is not None and host.lost is None]
    wait_for(lambda: len(network.heard) == len(up))
    return {message["host"]: message["answer"].strip() for message in network.heard}


def test_groups_are_even_and_in_order() -> None:
    assert groups_of(_names(3), 32) == [["n000"], ["n001"], ["n002"]]
    groups = groups_of(_names(1000), 32)
    assert len(groups) == 32
    assert {len(group) for group in groups} == {31, 32}
    assert [name for group in groups for name in group] == _names(1000)
    assert groups_of([], 32) == []


DRIVER = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
from tests.launch.test_agents import many
many({!r})
"""


@pytest.mark.end_to_end
def test_two_hundred_hosts_three_levels_deep(tmp_path: Path) -> None:
    """In a process of its own, for it may open few files: fewer than there are hosts."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", DRIVER.format(str(tmp_path))]
    ran = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=170)
    assert ran.returncode == 0, ran.stderr


def many(folder: str) -> None:
    """All answer and hear; what is behind a host that fails is reached by another way; none stays."""
    os.environ["PATH"] = f"{folder}{os.pathsep}{os.environ['PATH']}"
    module.FANOUT = 6
    network, names = Network(Path(folder)), _names(200)
    agents = network.agents()
    assert agents.connect(names, 120) == []
    first = network.started()
    pid_of = {host: pid for _, pid, host in first}
    children = {pid: sum(parent == pid for parent, *_ in first) for pid in [os.getpid(), *pid_of.values()]}
    assert sorted(pid_of) == names, "one agent each"
    assert children[os.getpid()] == 6
    assert max(children.values()) == 6
    parent_of = {pid: parent for parent, pid, _ in first}
    (leaf,) = (pid for pid, host in zip(parent_of, pid_of, strict=True) if host == "n199")
    levels = 0
    while leaf in parent_of:
        leaf, levels = parent_of[leaf], levels + 1
    assert levels == 3
    # One message reaches all, at the same time.
    assert len(_ask(network, agents, "echo", "heard")) == 200

    def lose(victim: str, cut: list[str]) -> None:
        os.kill({host: pid for _, pid, host in network.started()}[victim], signal.SIGKILL)
        wait_for(lambda: agents.lost(names))
        assert sorted(agents.lost(names)) == cut
        assert "connection ended" in agents.lost(names)[victim]
        assert agents.connect(cut, 120) == []
        assert agents.lost(names) == {}

    _, second, third, *_ = groups_of(names, 6)
    below = groups_of(third[1:], 6)[0]
    lose(second[0], second)
    lose(below[0], below)
    # Those are reached by another way now, and don't go with the host that they were behind.
    lose(third[0], [name for name in third if name not in below])
    assert len(_ask(network, agents, "echo", "heard")) == 200
    assert agents.stop(60) == []
    wait_for(lambda: not [pid for _, pid, _ in network.started() if is_running(pid)])
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 64


# --- who doesn't answer


@pytest.mark.end_to_end
def test_one_that_hangs_and_one_that_refuses(
    network: Network, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = _names(50)
    assert ["n001", "n002"] in groups_of(names, 32)  # one is behind another, and one in front of another
    assert ["n007", "n008"] in groups_of(names, 32)
    network.write("hangs", "n002")
    network.write("refuses", "n007")
    monkeypatch.setattr(module, "SAY_S", 1.0)
    agents, said = network.agents(), ""

    def is_over() -> bool:
        nonlocal said
        said += capsys.readouterr().err
        return "48 of 50 hosts after" in said and agents.hosts["n007"].lost is not None

    silent = agents.connect(names, 600.0, stopped=is_over)
    assert [host.name for host in silent] == ["n002", "n007"]
    assert agents.hosts["n007"].lost == "ssh: connect to host n007: Connection refused"
    assert agents.hosts["n002"].lost is None
    assert re.search(r"48 of 50 hosts after \d+ s, missing: n002, n007\n", said)
    # Asked once more, the one that hangs gets no second agent.
    assert [host.name for host in agents.connect(["n002"], 0.2)] == ["n002"]
    assert [host for *_, host in network.started()].count("n002") == 1
    assert agents.stop(60) == []


def test_several_that_refuse_take_nobody_with_them(network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FANOUT", 2)
    names = _names(12)
    refused = ["n000", "n001", "n006", "n007", "n011"]
    network.write("refuses", *refused)
    agents = network.agents()
    assert [host.name for host in agents.connect(names, 60)] == refused
    assert all("Connection refused" in str(agents.hosts[name].lost) for name in refused)
    tries = [host for *_, host in network.started()]
    assert {tries.count(name) for name in refused} == {2}
    assert {tries.count(name) for name in names if name not in refused} == {1}
    assert agents.stop(60) == []


@pytest.mark.end_to_end
def test_those_behind_one_that_hangs_are_reached(network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FANOUT", 2)
    network.write("hangs", "n000", "n004")
    agents = network.agents()
    are_all_there = lambda: sum(host.heard is not None for host in agents.hosts.values()) == 6  # noqa: E731
    silent = agents.connect(
        _names(8), 16.0, stopped=are_all_there
    )  # after half that time they are tried by another way
    assert [host.name for host in silent] == ["n000", "n004"]
    assert agents.stop(60) == []


def test_when_all_refuse_nobody_is_waited_for(network: Network) -> None:
    network.write("refuses", *_names(3))
    assert len(network.agents().connect(_names(3), 600)) == 3


@pytest.mark.end_to_end
def test_those_who_answered_hear_of_the_job_while_others_are_awaited(
    network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PING_S", 0.3)
    network.write("hangs", "n001")
    agents = network.agents(lost_after_s=6.0)  # they take themselves for cut off after 4.5 s
    assert [host.name for host in agents.connect(["n000", "n001"], 8.0)] == ["n001"]
    assert not agents.hosts["n000"].gone
    assert agents.lost(["n000", "n001"]) == {}
    assert _ask(network, agents, "echo", "heard") == {"n000": "heard"}
    agents.stop(60)


# --- who is lost


@pytest.mark.end_to_end
def test_host_that_does_not_confirm_its_end(network: Network) -> None:
    agents = network.agents()
    assert agents.connect(_names(2), 60) == []
    assert agents.end_attempt(_names(2), 20) == []
    (pid,) = (pid for _, pid, host in network.started() if host == "n001")
    os.kill(pid, signal.SIGSTOP)
    assert agents.end_attempt(_names(2), 0.5) == ["n001"]
    assert "n001" in agents.stop(2.0)
    wait_for(lambda: not is_running(pid))


# --- one step of srun


SRUN = """#!/bin/sh
echo "$*" >> '{0}/steps'
while case $1 in --nodelist=*) false ;; *) true ;; esac; do shift; done
hosts=${{1#*=}}; shift
for host in $(echo $hosts | tr , ' '); do
    case " $(cat '{0}/refuses' 2>&-) " in *" $host "*) echo "srun: error: no step"; exit 1 ;; esac
done
while case $1 in -*) true ;; *) false ;; esac; do shift; done
exec '{1}' -c "
import os, subprocess, sys
tasks = [subprocess.Popen(sys.argv[2:], stdin=subprocess.PIPE, env=dict(os.environ, SLURMD_NODENAME=host))
         for host in sys.argv[1].split(',')]
while received := os.read(0, 65536):
    for task in tasks:
        try: task.stdin.write(received); task.stdin.flush()
        except OSError: pass
for task in tasks: task.stdin.close()
" $hosts "$@"
"""


def test_one_step_and_then_several(network: Network) -> None:
    script = network.folder / "srun"
    script.write_text(SRUN.format(network.folder, sys.executable))
    script.chmod(0o755)
    network.write("refuses", "n002")
    agents = Agents(f"net{os.getpid()}.step", ["--mpi=none"], 60.0, network.heard.append)
    assert [host.name for host in agents.connect(_names(4), 60)] == ["n002"]
    assert agents.hosts["n002"].lost == "srun: error: no step"
    steps = (network.folder / "steps").read_text().splitlines()
    assert "--nodes=4 --ntasks=4 --nodelist=n000,n001,n002,n003 --mpi=none env PYTHONPATH=" in steps[0]
    assert sorted(_ask(network, agents, "echo", "heard")) == ["n000", "n001", "n003"]
    assert agents.stop(60) == []
