"""Inside an allocation, before a job: would a run break here, and on which host?

    python launch/preflight.py --site jupiter [--launcher pdsh] [--megabytes 315]

Starts one script on all hosts as a run would be (`clap_ds/measuring/preflight_rank.py`): every host says what it has, then all
ranks all-reduce a buffer of the gradient's size, check the sum, and measure links and arithmetic. The exit code is 1 when
something would break the run, 0 otherwise.
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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from clap_ds.check_runs import PACKAGES
from clap_ds.config.arguments import positive, whole_number
from clap_ds.config.errors import exit_code_of
from clap_ds.config.files import read_object
from clap_ds.config.places import PACKAGE
from clap_ds.launch.hostfile import allocated_hosts
from clap_ds.launch.launchers import LAUNCHERS, Launcher, default_launcher
from clap_ds.launch.sites import Site, load_site
from clap_ds.ranks import verdict
from clap_ds.ranks.hostfile import format_hostfile, free_port

ARRIVE_S = 120.0
"""For every rank to say what it finds, before it imports anything: a host without is named then, and not waited for."""
MAX_SKEW_S = 1.0
SLOW = 0.7  # a host whose rate is below this share of the median
MOST_NAMED = 8


class Report:
    """What was found: a row of the table for each host, and hosts by what would break a run there, or may be a nuisance."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[str, str]] = defaultdict(dict)
        self.found: dict[str, dict[str, dict[str, None]]] = {"problem": {}, "warning": {}}

    def fault(self, text: str, host: str, *, breaks: bool = True) -> None:
        self.found["problem" if breaks else "warning"].setdefault(text, {})[host] = None

    def format(self) -> str:
        columns = list(dict.fromkeys(column for row in self.rows.values() for column in row))
        cells = [["host", *columns], *([host, *(row.get(c, "–") for c in columns)] for host, row in self.rows.items())]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in cells]
        for kind, faults in self.found.items():
            for text, hosts in faults.items():
                more = f" and {len(hosts) - MOST_NAMED} more" if len(hosts) > MOST_NAMED else ""
                lines.append(f"{kind}: {', '.join([*hosts][:MOST_NAMED])}{more}: {text}")
        return "\n".join(lines + ["nothing found that would break a run"] * (not self.found["problem"]))


def judge_hosts(answers: Sequence[Mapping[str, Any]], slots: Mapping[str, int], report: Report) -> None:
    """Compare the hosts with each other, and their GPUs with the ranks they are to have; `answers` are the ranks'."""
    software: dict[str, dict[str, Any]] = {}
    gpus: dict[str, dict[str, str]] = defaultdict(dict)
    cores: dict[str, dict[str, None]] = defaultdict(dict)
    for answer in answers:
        host = answer["host"]
        software.setdefault(host, answer.get("software", {}))
        gpus[host] |= answer["gpus"]
        cores[host][answer["cores"]] = None
        for breaks, text in answer["faults"]:
            report.fault(text, host, breaks=breaks)
    for name in dict.fromkeys(name for values in software.values() for name in values):
        _compare(name, {host: values[name] for host, values in software.items() if values}, report)
    kinds = {host: " and ".join(sorted({*found.values()})) or "none" for host, found in gpus.items()}
    _compare("gpu", kinds, report)
    for host, found in gpus.items():
        shown = {name: str(software[host].get(name)) for name in ("code", "torch")}
        shown |= {"gpu": f"{len(found)} × {kinds[host]}" if found else "none", "cores (NUMA)": "; ".join(cores[host])}
        report.rows[host] = shown
        if 0 < len(found) < slots.get(host, 0):
            report.fault(f"{len(found)} GPUs are visible, {slots[host]} ranks are to run", host)


def _compare(what: str, values: Mapping[str, str | None], report: Report) -> None:
    """What is missing is its own host's fault. Of what differs, those that differ from most hosts; all where none is most."""
    counts = Counter(value for value in values.values() if value is not None).most_common(2)
    usual, most = counts[0] if counts else (None, 0)
    for host, value in values.items():
        if value is None:
            report.fault(f"{what} isn't installed" + " on any host" * (usual is None), host)
        elif len(counts) == 2 and counts[1][1] == most:
            told = ", ".join(f"{at} {each}" for at, each in [*values.items()][:MOST_NAMED])
            report.fault(f"{what} differs: {told}", host)
        elif value != usual:
            report.fault(f"{what} is {value}, on most other hosts {usual}", host)


def judge_ranks(measured: Mapping[str, Any], hosts: Sequence[str], report: Report) -> None:
    """Wrong sums and clocks break a run, slow links and processors are warnings; `hosts` of every rank."""
    compute: dict[str, float] = {}
    best: dict[str, float] = {}
    usual_s = statistics.median(rank["clock"] for rank in measured["ranks"])
    for number, (host, rank) in enumerate(zip(hosts, measured["ranks"], strict=True)):
        if rank["wrong"]:
            report.fault(f"rank {number} has {rank['wrong']} wrong elements after an all-reduce", host)
        if host not in compute and abs(skew_s := rank["clock"] - usual_s) > MAX_SKEW_S:
            report.fault(f"the clock is off by {skew_s:+.1f} s", host)
        compute[host] = min(rank["tflops"], compute.get(host, rank["tflops"]))
        for *pair, rate in rank["links"]:  # a host is as good as its best link: the worse may be its neighbour's fault
            best |= {hosts[lead]: max(rate, best.get(hosts[lead], 0.0)) for lead in pair}
    for column, rates in (("link, GB/s", best), ("compute, TFLOPS", compute)):
        for host, rate in rates.items():
            usual = statistics.median(rates.values())
            report.rows[host][column] = f"{rate:.2f}"
            if rate < SLOW * usual:
                report.fault(f"slow: {column.replace(', ', ' ')} {rate:.2f}, median {usual:.2f}", host, breaks=False)
    report.rows["all"]["bus, GB/s"] = f"{measured['bus_gb_per_s']:.2f}"


def ask(slots: dict[str, int], site: Site, launcher: str, megabytes: float, folder: Path) -> int:
    """Start the ranks and wait for them; the launcher's exit code. What they say is in the folder, with their `output`."""
    os.environ.update(site.environment)
    start = Launcher(
        launcher, site.interpreter(), site.srun, site.cpu_bind, site.cpus_per_task, site.wrapper, [*site.environment]
    )
    (folder / "hostfile").write_text(format_hostfile(slots))
    script = PACKAGE / "measuring" / "preflight_rank.py"
    words = [str(script), "--job_folder", str(folder), str(megabytes), ",".join(PACKAGES)]
    command = start.command(slots, folder / "hostfile", free_port(), words)
    with (folder / "output").open("wb") as output:
        # In a session of its own: the launcher ends the ranks when it is told to, and not with them at once.
        process = subprocess.Popen(
            command, env=start.environment(folder), start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(ARRIVE_S)
            if len(answered(slots, folder)) == sum(slots.values()):
                return process.wait()
        finally:
            process.terminate()  # it ends the ranks
            process.wait()
    return process.returncode


def answered(slots: dict[str, int], folder: Path) -> list[Path]:
    """Files of the ranks that have answered. By name: a network's file system may list a folder as it was."""
    return [path for rank in range(sum(slots.values())) if (path := folder / f"rank-{rank}.json").exists()]


def judge(slots: dict[str, int], code: int, folder: Path) -> Report:
    """What the answers in the folder amount to; hosts without one are named with the launcher's words about them."""
    report, known = Report(), {name.partition(".")[0]: name for name in slots}
    answers = [read_object(path) for path in answered(slots, folder)]
    for answer in answers:
        answer["host"] = known.get(answer["host"].partition(".")[0], answer["host"])
    hosts = [answer["host"] for answer in answers]
    lines = (folder / "output").read_text(errors="replace").splitlines()
    said = {found[1]: found[2] for line in lines if (found := re.match(r"(?:srun: error: )?(\S+): (.*)", line))}
    silent = [host for host in slots if host not in hosts]
    # SLURM terminates all tasks for the sake of one.
    for host in [host for host in silent if not said.get(host, "").endswith("Terminated")] or silent:
        report.fault(f"can't be reached, or starts no rank: {said.get(host, 'no sign of life')}", host)
    judge_hosts(answers, slots, report)
    if (folder / "measured.json").exists():
        judge_ranks(read_object(folder / "measured.json"), hosts, report)
    elif not report.found["problem"]:
        cause = verdict.judge(None, folder, [host for host, count in slots.items() for _ in range(count)])
        report.fault(cause.message if cause else f"exit code {code}", "the ranks failed")
    return report


def check(arguments: argparse.Namespace) -> int:
    """Ask all hosts and print the table. The exit code."""
    site = load_site(arguments.site, arguments.launcher)
    slots = allocated_hosts(arguments.slots or site.gpus_per_node)
    site.root().mkdir(parents=True, exist_ok=True)
    folder, broken = Path(tempfile.mkdtemp(prefix="preflight-", dir=site.root())), False
    try:
        report = judge(
            slots, ask(slots, site, site.launcher or default_launcher(), arguments.megabytes, folder), folder
        )
        broken = bool(report.found["problem"])
    finally:
        if not broken:
            shutil.rmtree(folder, ignore_errors=True)
    print(report.format() + f"\nthe ranks' output is in {folder}" * broken)
    return int(broken)


def main(argv: list[str] | None = None) -> int:
    description = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser("launch/preflight.py", description=description, allow_abbrev=False)
    parser.add_argument("--site", default="generic", help="name under launch/clusters/, or a file")
    parser.add_argument("--launcher", choices=LAUNCHERS, help="in place of the site's")
    parser.add_argument("--slots", type=whole_number(), metavar="N", help="ranks on each host")
    parser.add_argument("--megabytes", type=positive, default=315.0, help="all-reduced; HTSAT-tiny's gradients are 315")
    arguments = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # nothing is to stay behind on the hosts
    return exit_code_of(lambda: check(arguments))


if __name__ == "__main__":
    sys.exit(main())
