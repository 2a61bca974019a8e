"""Inside an allocation, before a job: would a run break here, and on which host?

    python launch/preflight.py --cluster jupiter [--launcher torchrun] [--megabytes 308]

Starts `clap_ds/benchmark/preflight_rank.py` on all hosts as a run would be.
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
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from clap_ds.check_runs import PACKAGES
from clap_ds.config.arguments import positive, whole_number
from clap_ds.config.errors import exit_code_of
from clap_ds.config.files import read_object
from clap_ds.config.paths import PACKAGE
from clap_ds.distributed import root_cause
from clap_ds.distributed.error_file import some
from clap_ds.distributed.hostfile import format_hostfile, free_port, slots_from_slurm
from clap_ds.launch.cluster_profile import Site, load_site
from clap_ds.launch.launchers import LAUNCHERS, Launcher, environment

ARRIVE_S = 120.0  # for every rank to say what it finds, before it imports anything
SLOW = 0.7  # what has a rate below this share of the median
Finding = tuple[str, str]  # where something is found, and what


def hosts_of(answers: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, str | None]]:
    """GPUs, code and versions by host, None for what isn't installed."""
    found: dict[str, dict[str, str | None]] = {}
    gpus: dict[str, dict[str, str]] = defaultdict(dict)
    for answer in answers:
        gpus[answer["host"]] |= answer["gpus"]
        found.setdefault(answer["host"], {}).update(answer.get("software", {}))
    kinds = {host: " and ".join(sorted({*seen.values()})) for host, seen in gpus.items()}
    return {host: {"GPUs": f"{len(gpus[host])} × {kinds[host]}".rstrip(" ×"), **found[host]} for host in found}


def odd_hosts(hosts: Mapping[str, Mapping[str, str | None]]) -> Iterator[Finding]:
    """What a host lacks, and what it has otherwise than most."""
    for name in dict.fromkeys(name for values in hosts.values() for name in values):
        there = [value for values in hosts.values() if (value := values.get(name)) is not None]
        usual = Counter(there).most_common(1)[0][0] if there else None
        for host, values in hosts.items():
            value = values.get(name, usual)
            if value is None:
                yield host, f"{name} isn't installed"
            elif value != usual:
                yield host, f"{name}: {value}, elsewhere {usual}"


def slow_ones(measured: Mapping[str, Any], hosts: Sequence[str]) -> Iterator[Finding]:
    """Links and hosts far below the median rate; `hosts` of every rank."""
    found = [link for rank in measured["ranks"] for link in rank["links"]]
    links = {f"{hosts[first]}–{hosts[second]}": rate for first, second, rate in found}
    compute: dict[str, float] = {}
    for host, rank in zip(hosts, measured["ranks"], strict=True):
        compute[host] = min(rank["tflops"], compute.get(host, rank["tflops"]))
    for unit, rates in (("link, GB/s", links), ("compute, TFLOPS", compute)):
        for where, rate in rates.items():
            if rate < SLOW * (usual := statistics.median(rates.values())):
                yield where, f"slow {unit}: {rate:.2f}, median {usual:.2f}"


def lines(kind: str, findings: Iterator[Finding] | list[Finding]) -> list[str]:
    """A line for each thing that was found, with where that was."""
    places: dict[str, list[str]] = defaultdict(list)
    for where, what in dict.fromkeys(findings):
        places[what].append(where)
    return [f"{kind}: {some(names)}: {what}" for what, names in places.items()]


def ask(slots: dict[str, int], site: Site, megabytes: float, folder: Path) -> int:
    """Start the ranks and wait for them; the launcher's exit code. What they say is in the folder."""
    os.environ.update(site.environment)
    start = Launcher(site, site.interpreter())
    (folder / "hostfile").write_text(format_hostfile(slots))
    script = PACKAGE / "benchmark" / "preflight_rank.py"
    words = [str(script), "--job_folder", str(folder), str(megabytes), ",".join(PACKAGES)]
    command = start.command(slots, folder / "hostfile", free_port(), words)
    with (folder / "output").open("wb") as output:
        # In a session of its own: the launcher ends the ranks when it is told to, and not with them at once.
        process = subprocess.Popen(
            command, env=environment(), start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(ARRIVE_S)
            if len(answered(folder)) == sum(slots.values()):
                return process.wait()
        finally:
            process.terminate()  # it ends the ranks
            process.wait()
    return process.returncode


def answered(folder: Path) -> list[Path]:
    """Files of the ranks that have answered, by rank."""
    return sorted(folder.glob("rank-*.json"), key=lambda path: int(path.stem[5:]))


def judge(slots: dict[str, int], code: int, folder: Path) -> tuple[list[str], list[str]]:
    """Lines of problems, and of what else there is to say, by the answers in the folder."""
    answers = [read_object(path) for path in answered(folder)]
    hosts = [answer["host"] for answer in answers]
    output = (folder / "output").read_text(errors="replace").splitlines()
    said = {found[1]: found[2] for line in output if (found := re.match(r"(?:srun: error: )?(\S+): (.*)", line))}
    silent = [host for host in slots if host not in hosts]
    # SLURM terminates all tasks for the sake of one.
    silent = [host for host in silent if not said.get(host, "").endswith("Terminated")] or silent
    problems = [(host, f"can't be reached, or starts no rank: {said.get(host, 'no sign of life')}") for host in silent]
    problems += [(answer["host"], fault) for answer in answers for fault in answer["faults"]]
    there = hosts_of(answers)
    problems += odd_hosts(there)
    shown = [f"{host}  GPUs {has['GPUs']}, torch {has.get('torch')}, code {has['code']}" for host, has in there.items()]
    if (folder / "measured.json").exists():
        measured = read_object(folder / "measured.json")
        for number, (host, rank) in enumerate(zip(hosts, measured["ranks"], strict=True)):
            if rank["wrong"]:
                problems.append((host, f"rank {number} has {rank['wrong']} wrong elements after an all-reduce"))
        shown += [f"all-reduce: {measured['bus_gb_per_s']:.2f} GB/s", *lines("warning", slow_ones(measured, hosts))]
    elif not problems:
        cause = root_cause.judge(None, folder, [host for host, count in slots.items() for _ in range(count)])
        problems.append(("the ranks failed", cause.message if cause else f"exit code {code}"))
    return lines("problem", problems), shown


def check(arguments: argparse.Namespace) -> int:
    """Ask all hosts and print what they say. The exit code."""
    site = load_site(arguments.cluster, arguments.launcher)
    slots = slots_from_slurm(os.environ, arguments.slots or site.gpus_per_node)
    site.root().mkdir(parents=True, exist_ok=True)
    folder, problems = Path(tempfile.mkdtemp(prefix="preflight-", dir=site.root())), list[str]()
    try:
        code = ask(slots, site, arguments.megabytes, folder)
        problems, shown = judge(slots, code, folder)
    finally:
        if not problems:
            shutil.rmtree(folder, ignore_errors=True)
    end = [*problems, f"the ranks' output is in {folder}"] if problems else ["nothing found that would break a run"]
    print("\n".join([*shown, *end]))
    return int(bool(problems))


def main(argv: list[str] | None = None) -> int:
    description = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser("launch/preflight.py", description=description, allow_abbrev=False)
    parser.add_argument("--cluster", default="generic", help="name under launch/clusters/, or a file")
    parser.add_argument("--launcher", choices=LAUNCHERS, help="in place of the site's")
    parser.add_argument("--slots", type=whole_number(), metavar="N", help="ranks on each host")
    parser.add_argument("--megabytes", type=positive, default=308.0, help="all-reduced; HTSAT-tiny's gradients are 308")
    arguments = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # nothing is to stay behind on the hosts
    return exit_code_of(lambda: check(arguments))


if __name__ == "__main__":
    sys.exit(main())
