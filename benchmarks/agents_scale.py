"""Command: how fast a job reaches its hosts' agents and speaks to them, with many agents on this machine.

    python -m benchmarks.agents_scale --hosts 10 100 1000 --output results/cpu/agents/agents.md

An `ssh` that runs its command here stands for the network: what is measured is the job's process, the agents and the tree of
connections between them, with all their work on one machine. No ranks are started.
"""

from __future__ import annotations

import contextlib
import os
import platform
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.common import make_parser, show, table
from clap_ds.config.arguments import whole_number
from clap_ds.config.errors import UserError, exit_code_of
from clap_ds.config.places import commit
from clap_ds.launch.agents import Agents
from clap_ds.launch.host_processes import parent_and_state

OPEN_FILES = 1024  # that a process may have, as on most systems
ROUND_TRIPS = 20
FAKE_SSH = '#!/bin/sh\nwhile case $1 in -*) true ;; *) false ;; esac; do shift; done\nshift\nexec sh -c "exec $*"\n'
COLUMNS = (
    "hosts {hosts:,} | all answered after, s {answered_s:.1f} | round trip to all, ms {round_trip_ms[median]:.0f} | "
    "longest, ms {round_trip_ms[longest]:.0f} | all gone after, s {gone_s:.1f} | open files of the job {open_files} | "
    "threads of the job {threads} | memory of an agent, MB {agent_mb:.1f}"
)


@contextlib.contextmanager
def ssh_to_here() -> Iterator[None]:
    """Have `ssh` run its command on this machine."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "ssh")
        script.write_text(FAKE_SSH)
        script.chmod(0o755)
        before = os.environ["PATH"]
        os.environ["PATH"] = f"{folder}{os.pathsep}{before}"
        try:
            yield
        finally:
            os.environ["PATH"] = before


def agents_of(job: str) -> list[int]:
    """Process ids of agents that were started by this process or by each other."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            command = (entry / "cmdline").read_bytes() if entry.name.isdecimal() else b""
            variables = (entry / "environ").read_bytes() if b"host_agent.py" in command else b""
            if f"CLAP_SCALE={job}".encode() in variables and parent_and_state(int(entry.name)):
                found.append(int(entry.name))
    return found


def _memory_of(pid: int) -> int:
    """Bytes that are its own or its share of what several have."""
    with contextlib.suppress(OSError, StopIteration):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("Pss:")).split()[1])
    return 0


def _not_clear(agents: Agents) -> str:
    hosts = [host for host in agents.hosts.values() if not host.clear]
    return f"{len(hosts)} hosts, the first {hosts[0].name} ({hosts[0].lost})" if hosts else ""


def _wait_for(done: Callable[[], bool], limit_s: float, who: Callable[[], str]) -> float:
    began = time.perf_counter()
    while not done():
        if time.perf_counter() - began > limit_s:
            raise UserError(f"after {limit_s:.0f} s still waiting for {who()}")
        time.sleep(0.001)
    return time.perf_counter() - began


def measure(num_hosts: int, limit_s: float) -> dict[str, Any]:
    """One row: connect to agents, send them messages, stop them; a UserError where some don't answer or stay."""
    job = os.environ["CLAP_SCALE"] = f"scale{os.getpid()}.{num_hosts}"
    names = [f"n{number:04}" for number in range(num_hosts)]
    agents = Agents(job, None, 60, lambda message: None)
    began = time.perf_counter()
    silent = agents.connect(names, limit_s)
    answered_s = time.perf_counter() - began
    if silent:
        agents.stop(limit_s)
        raise UserError(
            f"{len(silent)} of {num_hosts} hosts didn't answer in {limit_s:.0f} s, the first {silent[0].name}"
        )
    processes = agents_of(job)
    row: dict[str, Any] = {
        "hosts": num_hosts,
        "answered_s": answered_s,
        "open_files": len(os.listdir("/proc/self/fd")) - 1,
        "threads": len(os.listdir("/proc/self/task")),
        "agent_mb": sum(map(_memory_of, processes)) / len(processes) / 1e6,
    }
    trips = []
    for _ in range(ROUND_TRIPS):
        for host in agents.hosts.values():
            host.clear = False
        agents.say(do="end")  # that there is nothing to end is said at once
        trips.append(1e3 * _wait_for(lambda: not _not_clear(agents), limit_s, lambda: _not_clear(agents)))
    row["round_trip_ms"] = {"median": sorted(trips)[len(trips) // 2], "longest": max(trips)}
    began = time.perf_counter()
    if staying := agents.stop(limit_s):
        raise UserError(f"{len(staying)} of {num_hosts} agents didn't confirm their end, the first {staying[0]}")
    _wait_for(lambda: not agents_of(job), limit_s, lambda: f"processes {agents_of(job)}")
    row["gone_s"] = time.perf_counter() - began
    return row


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def main(arguments: Iterable[str] | None = None) -> int:
    parser = make_parser("agents_scale", __doc__)
    parser.add_argument("--hosts", type=whole_number(), nargs="+", default=[10, 100, 1000], metavar="N")
    parser.add_argument("--limit", type=float, default=300.0, metavar="S", help="seconds to wait for all hosts")
    options = parser.parse_args(None if arguments is None else list(arguments))

    def run() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (OPEN_FILES, OPEN_FILES))
        with ssh_to_here():
            rows = [measure(number, options.limit) for number in options.hosts]
        machine = {
            "date": time.strftime("%F"),
            "processor": _processor(),
            "cores": len(os.sched_getaffinity(0)),
            "python": platform.python_version(),
            "kernel": platform.release(),
            "commit": commit(),
            "open_files_allowed": OPEN_FILES,
        }
        words = (
            "{date}; {processor}, {cores} cores for job and agents; Python {python}, Linux {kernel}; commit {commit}"
        )
        text = f"{words.format_map(machine)}; ulimit -n {OPEN_FILES}\n\n{table(COLUMNS, rows)}"
        show(options.output, text, {"machine": machine, "rows": rows})

    return exit_code_of(run, (UserError, OSError))


if __name__ == "__main__":
    sys.exit(main())
