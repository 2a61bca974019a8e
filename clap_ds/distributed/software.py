"""Compare the code and the packages of a run's hosts: ranks with different ones would train
silently, as neither would alone.

The rendezvous and preflight use it. Standard library only.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import product

from clap_ds.utils.errors import some

Versions = Mapping[str, str | None]
Findings = list[tuple[str, str]]  # where, what


def describe_differences(by_rank: Sequence[tuple[str, Versions | None]]) -> str:
    """Return which hosts differ from most, given each rank's host and, of one rank per host,
    `describe_software`; empty if none does."""
    hosts: dict[str, Versions] = {}
    for rank, (host, versions) in enumerate(by_rank):
        if versions is not None and hosts.setdefault(host, versions) != versions:
            hosts[f"{host} (rank {rank})"] = versions
    return "; ".join(merged(odd_hosts(hosts)))


def odd_hosts(hosts: Mapping[str, Versions]) -> Findings:
    """Return what a host lacks or has in another version than most hosts. The commit only describes
    code that differs: git may be missing, or refuse to run."""
    findings = []
    names = dict.fromkeys(name for versions in hosts.values() for name in versions)
    usual = {
        name: Counter(versions.get(name) for versions in hosts.values()).most_common(1)[0][0]
        for name in names
    }
    for name, (host, versions) in product(names, hosts.items()):
        version = versions.get(name)
        expected = usual[name]
        is_same_code = name == "commit" and versions.get("code") == usual.get("code")
        if version != expected and not is_same_code:
            findings.append(
                (
                    host,
                    f"{name}: {version or 'not installed'}, elsewhere {expected or 'not installed'}",
                )
            )
    return findings


def merged(findings: Findings) -> list[str]:
    """Return one text per finding, with all places that have it."""
    places: dict[str, list[str]] = defaultdict(list)
    for place, finding in dict.fromkeys(findings):
        places[finding].append(place)
    return [f"{some(names)}: {finding}" for finding, names in places.items()]
