"""How a run's attempts ended, and whether there is another: decided by what ranks and SLURM left behind. Starts nothing itself.

A fault of a host (lost, one the others wait for, an error such as a GPU's) is answered by an attempt without that host, in
the same allocation where hosts are left, else by another start of the job. An error of the program's isn't: neither one that
names no host, nor the same one twice on different hosts.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from clap_ds.config.errors import USER_ERROR
from clap_ds.dist.verdict import judge
from clap_ds.record.directory import RunDirectory  # the standard library alone, at import
from clap_ds.record.schema import State

PORT_TAKEN = "is taken, perhaps by another run"
MOST_FREE = 2
"""Attempts after faults that no host is left out for: a port that was taken, connections that broke."""
WHY = {
    "OUT_OF_MEMORY": "a host's memory, not the GPU's, was exhausted",
    "TIMEOUT": "its time was over",
    "NODE_FAIL": "a node failed",
}


@dataclass(frozen=True)
class Ending:
    """How an attempt ended; `hosts` are those it is put down to, where it may be their fault and not the program's."""

    state: State
    message: str
    code: int
    hosts: list[str] = field(default_factory=list)
    lost: bool = False  # SLURM counts them as gone, they aren't merely the first to fail


def run_directory_of(folder: Path) -> RunDirectory | None:
    """The run directory of an attempt's folder, where rank 0 has made one."""
    path = folder / "run_directory"
    return RunDirectory(Path(path.read_text().strip())) if path.is_file() else None


def ending_of(
    code: int,
    folder: Path,
    hosts: Sequence[str],
    stopped: signal.Signals | None,
    lost: dict[str, str],
    step: str | None,
) -> Ending:
    """How an attempt ended.

    Args:
        code: the launcher's exit code; DeepSpeed's is 0 where its srun was killed.
        hosts: of every rank, in their order.
        stopped: the signal that this job was sent.
        lost: hosts that SLURM counts as down, with its word for it.
        step: SLURM's state of the ranks' step, where it keeps accounts.
    """
    run = run_directory_of(folder)
    summary: dict[str, Any] = {}
    try:
        summary |= run.summary() if run else {}
    except (OSError, ValueError) as problem:
        summary |= {"state": "failed", "error": f"the run's summary.json can't be read: {problem}"}
    state, error = summary.get("state"), summary.get("error")
    found = judge(run.path if run else None, folder, hosts)
    if code == 0 and (state == "completed" or (run is None and found is None)) and stopped is None:
        return Ending("completed", "", 0)
    by_time = state == "timeout" or stopped == signal.SIGUSR1 or code == 128 + signal.SIGUSR1
    if by_time and not lost:
        saved = state != "failed" and any(each.get("saved") for each in (summary.get("checkpoints") or [])[-1:])
        at = f", and saved at step {summary.get('step')}" if saved else ""
        return Ending("timeout", f"stopped before its time was over{at}", 0 if saved else 128 + signal.SIGUSR1)
    if stopped is not None:
        return Ending("terminated", f"stopped by {stopped.name}", 128 + stopped)
    if lost:
        gone = "; ".join(f"{name}: {why}" for name, why in lost.items())
        return Ending("failed", f"lost {gone}", code or 1, list(lost), lost=True)
    why = WHY.get(step or "")
    if found is not None and found.kind != "stopped":
        message = found.message + (f" ({why}, says SLURM)" if why else "")
        # srun's code is the highest of all ranks', those included that it ended itself.
        code = USER_ERROR if found.kind == "user" else code if found.kind in ("signal", "killed") and code else 1
        return Ending("out_of_memory" if found.kind == "out_of_memory" else "failed", message, code, found.hosts)
    if state == "terminated" or step == "CANCELLED":
        return Ending("terminated", error or "cancelled", code or 128 + signal.SIGTERM)
    unknown = (
        f"{why}, says SLURM" if why else f"the ranks ended with code {code}, though the run never said it was over"
    )
    return Ending(state if state == "out_of_memory" else "failed", error or unknown, code or 1)


def cause_of(message: str, hosts: Iterable[str]) -> str:
    """An ending's message without what differs from host to host and from time to time."""
    text = message.partition("; all stacks")[0]
    for name in hosts:
        text = re.sub(rf"\b{re.escape(name)}\b", "HOST", text)
    return re.sub(r"0x[0-9a-f]+|\d+(\.\d+)?", "N", text)


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
            "error": ending.message or None, "at_fault": ending.hosts, "lost": ending.lost, "excluded": ending.hosts,
            "cause": cause_of(ending.message, everyone), "start": self.start, "requeued": False,
        })  # fmt: skip

    def of_this_start(self) -> list[dict[str, Any]]:
        return [attempt for attempt in self.all if attempt["start"] == self.start]

    def excluded(self) -> list[str]:
        return list(dict.fromkeys(name for attempt in self.all for name in attempt["excluded"]))

    def hosts_of_same_error(self) -> list[str]:
        """Hosts that the last attempt and earlier ones with the same error are put down to, if they differ: it is the
        program's."""
        *before, last = self.all
        same = [each for each in before if each["cause"] == last["cause"] and each["at_fault"] and not each["lost"]]
        if last["lost"] or not last["at_fault"] or all(each["at_fault"] == last["at_fault"] for each in same):
            return []
        return list(dict.fromkeys(name for each in [*same, last] for name in each["at_fault"]))

    def may_go_on(self) -> bool:
        """Whether the last fault is one after which the run may be started again where there are hosts for it."""
        last = self.all[-1]
        if last["state"] != "failed" or self.hosts_of_same_error():
            return False
        if last["at_fault"]:
            return True
        free = [each for each in self.of_this_start() if each["state"] == "failed" and not each["excluded"]]
        return len(free) <= MOST_FREE and PORT_TAKEN in (last["error"] or "")

    def may_be_requeued(self) -> bool:
        """Whether the last fault is one that another start of the job, without its hosts, may mend."""
        last = self.all[-1]
        return last["state"] == "failed" and bool(last["at_fault"]) and not self.hosts_of_same_error()

    def requeues(self) -> int:
        return sum(attempt["requeued"] for attempt in self.all)


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
