"""Check the hosts of an allocation before a job, and name hosts on which a run would fail.

Examples:
    salloc --nodes 4 clap-ds preflight --cluster jupiter
    clap-ds preflight --cluster jupiter --megabytes 8            in the shell of an allocation

Starts `clap_ds/throughput_bench/preflight_rank.py` on all hosts as a run would be.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from clap_ds.check_runs import PACKAGES
from clap_ds.config.arguments import make_parser, positive
from clap_ds.distributed.hostfile import parse_tasks, slots_from_slurm
from clap_ds.distributed.root_cause import find_root_cause
from clap_ds.distributed.software import Findings, merged, odd_hosts
from clap_ds.launch.cluster_profile import ClusterProfile, add_cluster, load_profile
from clap_ds.launch.launchers import environment, launch_command, prepare_attempt
from clap_ds.utils.errors import UserError, exit_code_of
from clap_ds.utils.files import read_object
from clap_ds.utils.paths import PACKAGE

ARRIVE_S = 120.0  # limit for every rank to write its report, before it imports anything
SLOW = 0.7  # a rate below this share of the median is slow
REPORTS = "rank-*.json"


def hosts_of(answers: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, str | None]]:
    """Return GPUs, code and package versions by host; None if a package isn't installed."""
    found: dict[str, dict[str, str | None]] = defaultdict(dict)
    gpus: dict[str, dict[str, str]] = defaultdict(dict)
    for answer in answers:
        seen = gpus[answer["host"]]
        has = found[answer["host"]]
        seen |= answer["gpus"]
        has |= answer.get("software", {})
        has["GPUs"] = f"{len(seen)} × {' and '.join(sorted({*seen.values()}))}".rstrip(" ×")
    return found


def slow_links(ranks: Sequence[Mapping[str, Any]], hosts: Sequence[str]) -> Findings:
    """Return links between hosts far below the median rate. `hosts`: host of each rank."""
    links = {
        f"{hosts[first]}–{hosts[second]}": rate
        for rank in ranks
        for first, second, rate in rank["links"]
    }
    usual = statistics.median(links.values()) if links else 0.0
    slow = ((link, rate) for link, rate in links.items() if rate < SLOW * usual)
    return [(link, f"slow link: {rate:.2f} GB/s, median {usual:.2f}") for link, rate in slow]


def lines(kind: str, findings: Findings) -> list[str]:
    """Return one line per problem, with all places that have it."""
    return [f"{kind}: {finding}" for finding in merged(findings)]


def start_ranks(
    slots: dict[str, int], profile: ClusterProfile, megabytes: float, folder: Path
) -> int:
    """Run the ranks, which write their reports to the folder, and return the launcher's exit
    code."""
    os.environ.update(profile.environment)
    prepare_attempt(folder, slots)
    script = str(PACKAGE / "throughput_bench" / "preflight_rank.py")
    words = [script, "--job_folder", str(folder), str(megabytes), ",".join(PACKAGES)]
    command = launch_command(profile, profile.interpreter(), slots, folder / "hostfile", words)
    own: dict[str, Any] = {
        "env": environment(),
        "stdin": subprocess.DEVNULL,
        "stderr": subprocess.STDOUT,
    }
    with (folder / "output").open("wb") as file:
        # A new session: the launcher must receive the signal first and then end the ranks.
        process = subprocess.Popen(command, stdout=file, start_new_session=True, **own)
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(ARRIVE_S)
            return process.wait() if len([*folder.glob(REPORTS)]) == sum(slots.values()) else 1
        finally:
            process.terminate()  # it ends the ranks
            process.wait()


def silent_hosts(
    hosts: Sequence[str], answering: Collection[str], output: str, code: int
) -> Findings:
    """Return hosts without a report, and what SLURM said of them; if no host reported or is named,
    why the launcher failed."""
    errors = re.findall(
        r"^(?:srun: error: |slurmstepd-(?=\S+: error: )|(?=\S+: ))(.*)$", output, re.MULTILINE
    )
    reasons = {
        host: error.removeprefix(f"{host}: ").removeprefix("error: ")
        for host, error in product(hosts, errors)
        if re.search(rf"(?<![\w.-]){re.escape(host)}(?![\w-])", error)
    }
    if not answering and not reasons:
        last_lines = output.splitlines()[-1:] or [f"no response, exit code {code}"]
        return [("the launcher failed", "; ".join(dict.fromkeys(errors or last_lines)))]
    silent = [host for host in (hosts if answering else reasons) if host not in answering]
    # If one task fails, SLURM terminates all.
    silent = [host for host in silent if not reasons.get(host, "").endswith("Terminated")] or silent
    return [
        (host, f"unreachable, or starts no rank: {reasons.get(host, 'no response')}")
        for host in silent
    ]


def evaluate(slots: dict[str, int], code: int, folder: Path) -> tuple[list[str], list[str]]:
    """Return lines of problems and lines of other findings from the reports in the folder."""
    reports = sorted(folder.glob(REPORTS), key=lambda path: int(path.stem[5:]))  # by rank
    answers = [read_object(path) for path in reports]
    hosts = [answer["host"] for answer in answers]
    problems = silent_hosts([*slots], hosts, (folder / "output").read_text(errors="replace"), code)
    problems += [(answer["host"], fault) for answer in answers for fault in answer["faults"]]
    there = hosts_of(answers)
    problems += odd_hosts(there)
    shown = []
    for host, has in there.items():
        revision = has.get("commit") or has["code"]
        shown.append(f"{host}  GPUs {has['GPUs']}, torch {has.get('torch')}, code {revision}")
    if (folder / "measured.json").exists():
        measured = read_object(folder / "measured.json")
        for number, (host, rank) in enumerate(zip(hosts, measured["ranks"], strict=True)):
            if rank["wrong"]:
                problems.append(
                    (host, f"rank {number} has {rank['wrong']} wrong elements after an all-reduce")
                )
        shown.append(f"all-reduce: {measured['bus_gb_per_s']:.2f} GB/s")
        shown += lines("warning", slow_links(measured["ranks"], hosts))
    elif not problems:
        cause = find_root_cause(None, folder)
        problems.append(("the ranks failed", cause.message if cause else f"exit code {code}"))
    return lines("problem", problems), shown


def check_tasks(variables: Mapping[str, str], ranks: int) -> None:
    """Raise UserError if srun would refuse to start so many ranks on a host: an allocation has a
    CPU or more per task."""
    tasks = variables.get("SLURM_NTASKS_PER_NODE", str(ranks))
    cpus = min(parse_tasks(variables.get("SLURM_JOB_CPUS_PER_NODE", str(ranks))))
    if cpus < ranks and int(tasks) < ranks:
        raise UserError(
            f"the allocation has --ntasks-per-node={tasks} and {cpus} CPUs per node, but the cluster profile"
            f" {ranks} ranks (gpus_per_node): allocate with --ntasks-per-node={ranks}"
        )


def check(arguments: argparse.Namespace) -> int:
    """Check all hosts, print the findings and return the exit code."""
    profile = load_profile(arguments.cluster)
    slots = slots_from_slurm(
        os.environ, profile.gpus_per_node, "set gpus_per_node in the cluster profile"
    )
    if profile.launcher != "torchrun":
        check_tasks(os.environ, max(slots.values()))
    profile.root().mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="preflight-", dir=profile.root()))
    problems, shown = evaluate(
        slots, start_ranks(slots, profile, arguments.megabytes, folder), folder
    )
    print(
        "\n".join(
            [
                *shown,
                *problems,
                f"the ranks' output is in {folder}" if problems else "no problems found",
            ]
        )
    )
    if not problems:
        shutil.rmtree(folder, ignore_errors=True)
    return int(bool(problems))


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__)
    add_cluster(parser)
    size_help = "set the size of the all-reduce test in MB"
    parser.add_argument("--megabytes", type=positive, default=308.0, metavar="MB", help=size_help)
    arguments = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # leave no processes on the hosts
    return exit_code_of(lambda: check(arguments))


if __name__ == "__main__":
    sys.exit(main())
