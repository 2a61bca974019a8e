"""What `launch/preflight.py` makes of the answers of ranks: a table by host, what would break a run, and warnings.

Standard library only.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

MAX_SKEW_S = 1.0
SLOW = 0.7  # a host whose rate is below this share of the median
MOST_NAMED = 8
Answers = Mapping[int, Any]  # what `clap_ds/measuring/preflight_rank.py` wrote, by rank


class Report:
    """What was found: a row of the table for each host, and hosts by what would break a run there, or may be a nuisance."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[str, str]] = defaultdict(dict)
        self.problems: dict[str, dict[str, None]] = {}
        self.warnings: dict[str, dict[str, None]] = {}

    def fault(self, text: str, host: str, *, breaks: bool = True) -> None:
        (self.problems if breaks else self.warnings).setdefault(text, {})[host] = None

    def format(self) -> str:
        columns = list(dict.fromkeys(column for row in self.rows.values() for column in row))
        cells = [["host", *columns], *([host, *(row.get(c, "–") for c in columns)] for host, row in self.rows.items())]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in cells]
        for kind, found in (("problem", self.problems), ("warning", self.warnings)):
            for text, hosts in found.items():
                more = f" and {len(hosts) - MOST_NAMED} more" if len(hosts) > MOST_NAMED else ""
                lines.append(f"{kind}: {', '.join([*hosts][:MOST_NAMED])}{more}: {text}")
        return "\n".join(lines + ["nothing found that would break a run"] * (not self.problems))


def judge_hosts(ranks: Answers, slots: Mapping[str, int], report: Report) -> None:
    """Compare the hosts with each other, and their GPUs with the ranks they are to have."""
    gpus: dict[str, dict[str, str]] = defaultdict(dict)
    cores: dict[str, dict[str, None]] = defaultdict(dict)
    for answer in ranks.values():
        gpus[answer["host"]] |= answer["gpus"]
        cores[answer["host"]][answer["cores"]] = None
        for breaks, text in answer["faults"]:
            report.fault(text, answer["host"], breaks=breaks)
    software = {answer["host"]: answer["software"] for answer in ranks.values() if "software" in answer}
    for name in dict.fromkeys(name for values in software.values() for name in values):
        _compare(name, {host: values[name] for host, values in software.items()}, report)
    kinds = {host: " and ".join(sorted({*found.values()})) or "none" for host, found in gpus.items()}
    _compare("gpu", kinds, report)
    for host, found in gpus.items():
        shown = {name: str(software.get(host, {}).get(name)) for name in ("code", "torch")}
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
