"""Compare the code and the packages of a run's hosts: ranks with different ones would train
silently, as neither would alone.

The rendezvous and preflight use it. Standard library only.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from clap_ds.utils.errors import some

Versions = Mapping[str, str | None]
"""Version by name of a package, and of this code; None if it isn't installed."""
Findings = list[tuple[str, str]]
"""Places, such as hosts, and the problem found there."""


def describe_differences(by_rank: Sequence[tuple[str, Versions | None]]) -> str:
    """Return which hosts differ from most, or an empty string.

    Args:
        by_rank: each rank's host and, of one rank per host, `describe_software`.
    """
    hosts: dict[str, Versions] = {}
    for rank, (host, versions) in enumerate(by_rank):
        if versions is None:
            continue
        # Launchers may disagree on which ranks share a host.
        if hosts.setdefault(host, versions) != versions:
            hosts[f"{host} (rank {rank})"] = versions
    return "; ".join(merge_findings(odd_hosts(hosts)))


def odd_hosts(hosts: Mapping[str, Versions]) -> Findings:
    """Return what a host lacks, or has in another version than most hosts."""
    findings = []
    names: dict[str, None] = {}
    for versions in hosts.values():
        names |= dict.fromkeys(versions)
    usual = {}
    for name in names:
        counts = Counter(versions.get(name) for versions in hosts.values())
        usual[name] = counts.most_common(1)[0][0]
    for name in names:
        for host, versions in hosts.items():
            version = versions.get(name)
            # The commit only describes code that differs: git may be missing, or refuse to run.
            is_same_code = name == "commit" and versions.get("code") == usual.get("code")
            if version == usual[name] or is_same_code:
                continue
            expected = usual[name] or "not installed"
            findings.append((host, f"{name}: {version or 'not installed'}, elsewhere {expected}"))
    return findings


def merge_findings(findings: Findings) -> list[str]:
    """Return one text per problem, with all places that have it."""
    places: dict[str, list[str]] = defaultdict(list)
    for place, problem in dict.fromkeys(findings):
        places[problem].append(place)
    return [f"{some(names)}: {problem}" for problem, names in places.items()]
