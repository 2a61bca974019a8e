"""What `launch/preflight.py` makes of the answers of hosts and ranks: a table by host, what would break a run, and warnings.

Leaves asking to `preflight.py`. Standard library only.
"""

from __future__ import annotations

import statistics
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clap_ds.dist.accelerator import OLDEST_DRIVER, is_too_old

MAX_SKEW_S, MIN_FREE_GB, MIN_OPEN_FILES = 1.0, 5.0, 4096
SLOW = 0.7  # a host whose rate is below this share of the median
MOST_NAMED = 8
Answer = dict[str, Any]


@dataclass
class Report:
    """What was found, by host: rows of the table, problems that would break a run, and warnings."""

    rows: dict[str, dict[str, str]] = field(default_factory=dict)
    problems: dict[str, list[str]] = field(default_factory=dict)  # hosts by what is wrong there
    warnings: dict[str, list[str]] = field(default_factory=dict)
    kept: Path | None = None  # the ranks' folder, after a problem

    def put(self, host: str, column: str, text: str) -> None:
        self.rows.setdefault(host, {})[column] = text

    def problem(self, text: str, host: str = "") -> None:
        self.problems.setdefault(text, []).append(host)

    def warning(self, text: str, host: str = "") -> None:
        self.warnings.setdefault(text, []).append(host)

    def format(self) -> str:
        columns = list(dict.fromkeys(column for row in self.rows.values() for column in row))
        cells = [["host", *columns], *([host, *(row.get(c, "–") for c in columns)] for host, row in self.rows.items())]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in cells]
        for kind, found in (("problem", self.problems), ("warning", self.warnings)):
            lines += [f"{kind}: {_named(hosts)}{text}" for text, hosts in found.items()]
        lines += [f"the ranks' output and job.json are in {self.kept}"] * (self.kept is not None)
        return "\n".join([*lines, "" if self.problems else "nothing found that would break a run"]).rstrip()


def _named(hosts: list[str]) -> str:
    more = f" and {len(hosts) - MOST_NAMED} more" if len(hosts) > MOST_NAMED else ""
    return f"{', '.join(hosts[:MOST_NAMED])}{more}: " if hosts != [""] else ""


def judge_hosts(answers: dict[str, Answer], slots: dict[str, int], report: Report, *, on_cpu: bool = False) -> None:
    """Compare the hosts with each other and with what a run needs, on their GPUs unless `on_cpu`."""
    for host, answer in answers.items():
        report.put(host, "answers", "no" if "error" in answer else "yes")
        if "error" in answer:
            report.problem(answer["error"], host)
    there = {host: answer for host, answer in answers.items() if "error" not in answer}
    _compare("code", {host: answer["code"] for host, answer in there.items()}, report)
    for package in next(iter(there.values()), {"versions": ()})["versions"]:
        versions = {host: str(answer["versions"].get(package)) for host, answer in there.items()}
        _compare(package, versions, report, shown=package == "torch")
    _compare("gpu", {host: next(iter(answer["gpus"]), "none") for host, answer in there.items()}, report)
    for host, answer in there.items():
        _judge_host(host, answer, slots[host], report)
        if answer["has_gpu"] and not on_cpu:
            _judge_gpus(host, answer, report)


def _compare(what: str, values: dict[str, str], report: Report, shown: bool = True) -> None:
    """Hosts that differ from the majority are the problem; without a majority, from the first host."""
    counts = Counter(values.values()).most_common(1)  # of values as frequent as each other the first
    for host, value in values.items():
        if shown:
            report.put(host, what, value)
        if value != counts[0][0]:
            report.problem(f"{what} is {value}, on most other hosts {counts[0][0]}", host)


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
    }
    locked = answer["locked_memory"]
    warnings = {
        f"ulimit -n is {files}; workers and NCCL may need {MIN_OPEN_FILES}": 0 <= files < MIN_OPEN_FILES,
        f"ulimit -l is {locked} bytes; InfiniBand needs it unlimited": bool(gpus) and locked != -1,
    }
    for text in (text for text, holds in problems.items() if holds):
        report.problem(text, host)
    for text in (text for text, holds in warnings.items() if holds):
        report.warning(text, host)


def _judge_gpus(host: str, answer: Answer, report: Report) -> None:
    """Who else has this host's GPUs, and whether its software is for them."""
    torch, cuda, driver = answer["versions"]["torch"], answer["torch_cuda"], answer["driver"]
    for text in answer["gpus_used"]:
        report.problem(text, host)
    if torch and cuda is None:
        report.problem(f"torch {torch} is built without CUDA, and the host has a GPU", host)
    elif driver is None:
        report.problem("there is a GPU, but no NVIDIA driver is running", host)
    elif cuda and is_too_old(driver, cuda):
        # Not surely a problem: a cuda-compat module makes up for it. The ranks will tell.
        oldest = OLDEST_DRIVER[int(cuda.partition(".")[0])]
        report.warning(f"driver {driver} is too old for torch's CUDA {cuda}, which needs {oldest}", host)
    triton = "Triton (clap.compile, clap.model.attention 'triton') needs it"
    lacking = [f"no {what}: {triton}" for what, there in answer["compilers"].items() if not there]
    for text in answer["gpus_held"] + lacking:
        report.warning(text, host)


def judge_ranks(measured: dict[str, Any], slots: dict[str, int], report: Report) -> None:
    """Judge what the ranks measured: wrong sums break a run; slow links and slow processors are warnings."""
    hosts = list(slots)
    host_of = [host for host, count in slots.items() for _ in range(count)]
    for rank, wrong in enumerate(measured["wrong_elements"]):
        if wrong:
            report.problem(f"rank {rank} has {wrong} wrong elements after an all-reduce", host_of[rank])
    compute: dict[str, float] = {}
    for host, rate in zip(host_of, measured["tflops"], strict=True):
        compute[host] = min(rate, compute.get(host, rate))
    # A host is as good as its best link: the worse one may be its neighbour's fault.
    best: dict[str, float] = {}
    for *pair, rate in measured["links_gb_per_s"]:
        best |= {hosts[number]: max(rate, best.get(hosts[number], 0.0)) for number in pair}
    for column, rates in (("link, GB/s", best), ("compute, TFLOPS", compute)):
        usual = statistics.median(rates.values()) if rates else 0.0
        for host, rate in rates.items():
            report.put(host, column, f"{rate:.2f}")
            if rate < SLOW * usual:
                report.warning(f"slow: {column.replace(', ', ' ')} {rate:.2f}, median {usual:.2f}", host)
    report.put("all", "bus, GB/s", f"{measured['bus_gb_per_s']:.2f}")
