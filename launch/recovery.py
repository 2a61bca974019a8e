"""Whether a run that failed is started again, and on which hosts: decided by its attempts so far. Starts nothing itself.

A fault of a host (lost, one the others wait for, an error such as a GPU's) is answered by an attempt without that host, in
the same allocation where hosts are left, else by another start of the job. An error of the program's isn't: neither one that
names no host, nor the same one twice on different hosts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

from clap_ds.launch.attempt import Ending


def cause_of(message: str, hosts: Iterable[str]) -> str:
    """An ending's message without what differs from host to host and from time to time."""
    for name in hosts:
        message = re.sub(rf"\b{re.escape(name)}\b", "HOST", message)
    return re.sub(r"0x[0-9a-f]+|\d+(\.\d+)?", "N", message)


class Attempts:
    """
    Args:
        start: how often SLURM has started this job anew.
        earlier: attempts of earlier starts, as `job.json` has them.
    """

    def __init__(self, start: int, earlier: list[dict[str, Any]]) -> None:
        self.start, self.all = start, earlier

    def note(self, ending: Ending, hosts: Iterable[str], everyone: Sequence[str], started: str) -> None:
        """Add one; the run does without the hosts it is put down to from now on."""
        self.all.append({
            "hosts": list(hosts), "started": started, "finished": now(), "state": ending.state,
            "error": ending.message or None, "at_fault": ending.hosts, "lost": ending.lost,
            "cause": cause_of(ending.message, everyone), "start": self.start, "requeued": False,
        })  # fmt: skip

    def of_this_start(self) -> list[dict[str, Any]]:
        return [attempt for attempt in self.all if attempt["start"] == self.start]

    def excluded(self) -> list[str]:
        return list(dict.fromkeys(name for attempt in self.all for name in attempt["at_fault"]))

    def hosts_of_same_error(self) -> list[str]:
        """Hosts that the last attempt and earlier ones with the same error are put down to, if they differ: it is the
        program's."""
        *before, last = self.all
        same = [each for each in before if each["cause"] == last["cause"] and each["at_fault"] and not each["lost"]]
        if last["lost"] or not last["at_fault"] or all(each["at_fault"] == last["at_fault"] for each in same):
            return []
        return list(dict.fromkeys(name for each in [*same, last] for name in each["at_fault"]))

    def may_go_on(self) -> bool:
        """Whether the last fault is one that another attempt, without its hosts, may mend."""
        last = self.all[-1]
        return last["state"] == "failed" and bool(last["at_fault"]) and not self.hosts_of_same_error()

    def requeues(self) -> int:
        return sum(attempt["requeued"] for attempt in self.all)


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
