"""Inside an allocation, before a job: would a run break here, and on which host?

    python launch/preflight.py --site jupiter [--launcher srun] [--megabytes 315] [--no_ranks]

Asks every host for its clock, code, versions, GPUs and driver, compilers, disk, limits and ports, and compares; then
has all ranks all-reduce a buffer of the gradient's size, checks the sum, and measures each host's links. The exit code
is 1 when something would break the run, 0 otherwise (what is merely slow is a warning). The host's side is in
`preflight_host.py`, the ranks' in `clap_ds/measuring/preflight_rank.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clap_ds.config.errors import exit_code_of
from clap_ds.config.places import PACKAGE, work_folder
from clap_ds.dist.accelerator import OLDEST_DRIVER, is_too_old
from clap_ds.dist.hostfile import format_hostfile, master_port
from clap_ds.launch.hostfile import add_hosts, chosen_hosts
from clap_ds.launch.launchers import on_host, script_command
from clap_ds.launch.run_config import read_object
from clap_ds.launch.sites import LAUNCHERS, Site, load_site

RANK_SCRIPT = PACKAGE / "measuring" / "preflight_rank.py"
Answer = dict[str, Any]
MAX_SKEW_S, MIN_FREE_GB, MIN_OPEN_FILES = 1.0, 5.0, 4096
SLOW = 0.7  # a host whose rate is below this share of the median


@dataclass
class Report:
    """What was found, by host: rows of the table, problems that would break a run, and warnings."""

    rows: dict[str, dict[str, str]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def put(self, host: str, column: str, text: str) -> None:
        self.rows.setdefault(host, {})[column] = text

    def format(self) -> str:
        columns = list(dict.fromkeys(column for row in self.rows.values() for column in row))
        cells = [["host", *columns], *([host, *(row.get(c, "–") for c in columns)] for host, row in self.rows.items())]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in cells]
        lines += [f"problem: {text}" for text in self.problems] + [f"warning: {text}" for text in self.warnings]
        return "\n".join([*lines, "" if self.problems else "nothing found that would break a run"]).rstrip()


def ask_hosts(hosts: list[str], site: Site, launcher: str, port: int) -> dict[str, Answer]:
    """Every host's answer, with the seconds its clock is off; `{"error": …}` for one that gives none."""

    def ask(host: str) -> Answer:
        command = script_command(site.interpreter(), "preflight_host.py", site.run_root, str(port))
        srun = ["srun", "--overlap", "--quiet", "--nodes=1", "--ntasks=1", "--nodelist", host]
        command = on_host(host, command) if launcher == "pdsh" else [*srun, *command]
        asked = time.time()
        try:
            result = subprocess.run(command, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)
        except subprocess.TimeoutExpired:
            return {"error": "no answer in 60 s"}
        answered = time.time()
        if found := re.search(r"^clap-preflight (.*)$", result.stdout, re.MULTILINE):
            answer: Answer = json.loads(found[1])
            # The host read its clock somewhere between question and answer: only what lies outside is skew.
            answer["skew_s"] = max(0.0, answer["time"] - answered) - max(0.0, asked - answer["time"])
            return answer
        return {"error": _last_line(result) or f"exit code {result.returncode}"}

    with ThreadPoolExecutor(64) as pool:
        return dict(zip(hosts, pool.map(ask, hosts), strict=True))


def _last_line(result: subprocess.CompletedProcess[str]) -> str:
    return (result.stdout + result.stderr).strip().rpartition("\n")[2]


def judge_hosts(answers: dict[str, Answer], slots: dict[str, int], report: Report, *, on_cpu: bool = False) -> None:
    """Compare the hosts with each other and with what a run needs, on their GPUs unless `on_cpu`."""
    for host, answer in answers.items():
        report.put(host, "reachable", "no" if "error" in answer else "yes")
        if "error" in answer:
            report.problems.append(f"{host} can't be reached: {answer['error']}")
    there = {host: answer for host, answer in answers.items() if "error" not in answer}
    _compare("code", {host: answer["code"] for host, answer in there.items()}, report)
    for package in next(iter(there.values()), {"versions": ()})["versions"]:
        versions = {host: str(answer["versions"].get(package)) for host, answer in there.items()}
        _compare(package, versions, report, shown=package == "torch")
    _compare("gpu", {host: next(iter(answer["gpus"]), "none") for host, answer in there.items()}, report)
    for host, answer in there.items():
        _judge_host(host, answer, slots[host], report)
        if answer["has_gpu"] and not on_cpu:
            _judge_gpu_software(host, answer, report)


def _compare(what: str, values: dict[str, str], report: Report, shown: bool = True) -> None:
    """Hosts that differ from the majority are the problem; without a majority, from the first host."""
    counts = Counter(values.values()).most_common(1)  # of values as frequent as each other the first
    for host, value in values.items():
        if shown:
            report.put(host, what, value)
        if value != counts[0][0]:
            report.problems.append(f"{host}: {what} is {value}, on most other hosts {counts[0][0]}")


def _judge_host(host: str, answer: Answer, slots: int, report: Report) -> None:
    gpus, skew_s, files = answer["gpus"], answer["skew_s"], answer["open_files"]
    free = {folder: size / 1e9 for folder, size in answer["free_bytes"].items() if size is not None}
    report.put(host, "clock, s", f"{skew_s:+.1f}")
    report.put(host, "free, GB", f"{min(free.values(), default=0):.0f}")
    report.put(host, "files", str(files))
    problems = {
        f"GPUs of several kinds: {', '.join(sorted(set(gpus)))}": len(set(gpus)) > 1,
        f"{len(gpus)} GPUs are visible, {slots} ranks are to run": 0 < len(gpus) < slots,
        f"the clock is off by {skew_s:+.1f} s": abs(skew_s) > MAX_SKEW_S,
        **{f"{size:.1f} GB free for {at}, expected {MIN_FREE_GB:.0f}": size < MIN_FREE_GB for at, size in free.items()},
        "the port for rank 0 is taken": not answer["port_free"],
    }
    locked = answer["locked_memory"]
    warnings = {
        f"ulimit -n is {files}; workers and NCCL may need {MIN_OPEN_FILES}": 0 <= files < MIN_OPEN_FILES,
        f"ulimit -l is {locked} bytes; InfiniBand needs it unlimited": bool(gpus) and locked != -1,
    }
    report.problems += [f"{host}: {text}" for text, holds in problems.items() if holds]
    report.warnings += [f"{host}: {text}" for text, holds in warnings.items() if holds]


def _judge_gpu_software(host: str, answer: Answer, report: Report) -> None:
    torch, cuda, driver = answer["versions"]["torch"], answer["torch_cuda"], answer["driver"]
    if torch and cuda is None:
        report.problems.append(f"{host}: torch {torch} is built without CUDA, and the host has a GPU")
    elif driver is None:
        report.problems.append(f"{host}: there is a GPU, but no NVIDIA driver is running")
    elif cuda and is_too_old(driver, cuda):
        # Not surely a problem: a cuda-compat module makes up for it. The ranks will tell.
        oldest = OLDEST_DRIVER[int(cuda.partition(".")[0])]
        report.warnings.append(f"{host}: driver {driver} is too old for torch's CUDA {cuda}, which needs {oldest}")
    triton = "Triton (clap.compile, clap.model.attention 'triton') needs it"
    report.warnings += [f"{host}: no {what}: {triton}" for what, there in answer["compilers"].items() if not there]


def run_ranks(site: Site, slots: dict[str, int], launcher: str, megabytes: float, report: Report) -> None:
    """Start the ranks as a run would, and judge what they measured."""
    root = work_folder() / site.run_root
    root.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="preflight-", dir=root))
    (folder / "hostfile").write_text(format_hostfile(slots))
    (folder / "site_environment").write_text("".join(f"{name}={value}\n" for name, value in site.environment.items()))
    words = ["--hostfile", folder / "hostfile", "--folder", folder, "--environment", folder / "site_environment"]
    words += ["--launcher", launcher, "--python", site.interpreter()]
    words += ["--", RANK_SCRIPT, folder / "ranks.json", megabytes]
    command = script_command(site.interpreter(), "job.py", *map(str, words))
    environment = {**os.environ, **site.environment}
    result = subprocess.run(command, capture_output=True, text=True, cwd=work_folder(), env=environment)
    if result.returncode or not (folder / "ranks.json").exists():
        job = read_object(folder / "job.json") if (folder / "job.json").exists() else {}
        report.problems.append(f"the ranks failed: {job.get('error') or _last_line(result)} (see {folder})")
    else:
        judge_ranks(read_object(folder / "ranks.json"), slots, report)


def judge_ranks(measured: dict[str, Any], slots: dict[str, int], report: Report) -> None:
    """Judge what the ranks measured: wrong sums break a run; slow links and slow processors are warnings."""
    hosts = list(slots)
    host_of = [host for host, count in slots.items() for _ in range(count)]
    for rank, wrong in enumerate(measured["wrong_elements"]):
        if wrong:
            report.problems.append(f"{host_of[rank]}: rank {rank} has {wrong} wrong elements after an all-reduce")
    compute = {host: min(t for t, h in zip(measured["tflops"], host_of, strict=True) if h == host) for host in hosts}
    # A host is as good as its best link: the worse one may be its neighbour's fault.
    best: dict[str, float] = {}
    for *pair, rate in measured["links_gb_per_s"]:
        best |= {hosts[number]: max(rate, best.get(hosts[number], 0.0)) for number in pair}
    for column, rates in (("link, GB/s", best), ("compute, TFLOPS", compute)):
        for host, rate in rates.items():
            report.put(host, column, f"{rate:.2f}")
            usual = statistics.median(rates.values())
            if rate < SLOW * usual:
                report.warnings.append(f"{host} is slow: {column.replace(', ', ' ')} {rate:.2f}, median {usual:.2f}")
    report.put("all", "bus, GB/s", f"{measured['bus_gb_per_s']:.2f}")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="launch/preflight.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--site", default="generic")
    parser.add_argument("--launcher", choices=LAUNCHERS)
    add_hosts(parser)
    parser.add_argument("--megabytes", type=float, default=315.0, help="all-reduced; HTSAT-tiny's gradients are 315")
    parser.add_argument("--no_ranks", action="store_true", help="ask the hosts, start no ranks")
    arguments = parser.parse_args(argv)
    return exit_code_of(lambda: check(arguments))


def check(arguments: argparse.Namespace) -> int:
    """Ask the hosts, start ranks where nothing stands against it, and print the table. The exit code."""
    site = load_site(arguments.site)
    slots = chosen_hosts(arguments)
    launcher = arguments.launcher or site.chosen_launcher()
    port = master_port(f"{os.environ.get('SLURM_JOB_ID', '0')}.{os.environ.get('SLURM_RESTART_COUNT', '0')}")
    report = Report()
    on_cpu = {**os.environ, **site.environment}.get("DS_ACCELERATOR") == "cpu"
    judge_hosts(ask_hosts(list(slots), site, launcher, port), slots, report, on_cpu=on_cpu)
    if not report.problems and not arguments.no_ranks:
        run_ranks(site, slots, launcher, arguments.megabytes, report)
    print(report.format())
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())
