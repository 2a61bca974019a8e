"""Find the root cause of a run's end from the files of its ranks: the earliest error or, in a hang, the least progress.

Ranks write error files (`clap_ds.distributed.error_file`) and a progress file each (`clap_ds.distributed.watchdog`): a
header line, then stacks if the rank hung or got a fatal signal. The file of a killed rank has only the header. Standard
library only.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from clap_ds.config.errors import some
from clap_ds.config.files import parse_json, read_bytes
from clap_ds.distributed.error_file import ERROR, LOST_PEER, STALL, STOPPED, UNREACHABLE, RankError, read_errors
from clap_ds.distributed.flight_recorder import Progress, dumped_progress

SIGNAL, KILLED = "signal", "killed"
"""Kinds of error that ranks can't record themselves."""
STACKS = "stacks"  # folder of progress files in the run directory
_OF_THE_HOST = re.compile(
    r"NCCL|CUDA error|uncorrectable|\bECC\b|\bXid\b|Input/output error|Bus error|Stale file handle"
    r"|was ended by SIG(KILL|BUS|SEGV)"
)
"""Errors that may be a host's fault."""
_OF_THE_PROGRAM = re.compile(
    "illegal memory access|misaligned address|device-side assert|invalid configuration|out of memory"
)
"""Variants of these errors caused by a kernel, which would fail on any host."""
_OF_THE_LINK = re.compile("NCCL|gloo", re.IGNORECASE)
_FATAL = re.compile(r"^Fatal Python error: (.*\S)", re.MULTILINE)  # faulthandler's format


@dataclass(frozen=True)
class ProgressFile:
    """Content of one rank's progress file, and its modification time.

    Attributes:
        step: completed steps, on a GPU those that the device has completed.
        limit_s: seconds without progress after which the rank counts as hung.
        hung_at: when it hung, if it does and Python could run; then `collectives` is its progress.
    """

    rank: int
    host: str
    activity: str
    step: int
    limit_s: float
    hung_at: float | None
    collectives: Progress
    stacks: str
    at: float

    @property
    def responds(self) -> bool:
        """Whether it reported that it hangs."""
        return self.hung_at is not None or self.stacks.startswith("Timeout")

    def waits_in(self, group: str) -> bool:
        started, completed = self.collectives.get(group, (0, 0))
        return completed < started


def read_progress(run_directory: Path) -> list[ProgressFile]:
    """Read all progress files, sorted by rank."""
    folder, found = run_directory / STACKS, []
    for path in folder.glob("rank*.txt"):
        with suppress(OSError, ValueError, TypeError, KeyError):
            first, _, stacks = read_bytes(path).decode(errors="replace").partition("\n")
            header = parse_json(first)
            header["collectives"] = header["collectives"] or dumped_progress(folder, header["rank"])
            found.append(ProgressFile(**header, stacks=stacks.strip(), at=path.stat().st_mtime))
    return sorted(found, key=lambda each: each.rank)


def find_root_cause(run_directory: Path | None, job_folder: Path | None) -> RankError | None:
    """Return the error that ended a run, with the ranks and hosts at fault and a message that names them; None without any
    files. Before a run directory exists they are in the job's folder."""
    errors = [error for folder in (job_folder, run_directory) if folder for error in read_errors(folder)]
    for error in errors:
        if error.kind == STALL:
            return error  # the ranks' own verdict: stopped ones also write stacks when they are woken to be ended
    files = read_progress(run_directory) if run_directory else []
    found = [_blamed(error) for error in errors] + [_crash(file) for file in files if _FATAL.search(file.stacks)]
    if any(file.responds for file in files):
        found.append(_hang(files))
    recorded = {error.rank for error in errors}
    # Ranks that end in order remove their file.
    if found and (killed := [file for file in files if not file.stacks and file.rank not in recorded]):
        ranks, hosts = [file.rank for file in killed], list(dict.fromkeys(file.host for file in killed))
        who = f"rank{'s' * (len(ranks) > 1)} {some(ranks)} on {some(hosts)}"
        message = f"{who} exited without reporting an error: killed (out of memory?) or node lost"
        found.append(RankError(0.0, ranks[0], hosts[0], KILLED, message, ranks=ranks, hosts=hosts))
    return min(found, key=lambda error: (_order(error), error.at, error.rank), default=None)


def _order(error: RankError) -> int:
    """Sort causes before consequences. Libraries abort a rank that lost a peer as well as a broken one, and a link's error
    points to its other end."""
    if error.kind == UNREACHABLE:
        return 3 if "can't reach" in error.message else 0  # rank 0 lists those that are missing
    aborted = error.kind == SIGNAL and not error.hosts
    if aborted or (error.kind == ERROR and _OF_THE_LINK.search(error.message)):
        return 2
    return {KILLED: 1, LOST_PEER: 3, STOPPED: 4}.get(error.kind, 0)


def _blamed(error: RankError) -> RankError:
    """Add the ranks and hosts at fault to a rank's own error."""
    if error.kind == UNREACHABLE:  # rank 0's list of missing ranks has them
        return error
    is_hosts = error.kind == ERROR and _OF_THE_HOST.search(error.message) and not _OF_THE_PROGRAM.search(error.message)
    message = f"rank {error.rank} on {error.host}: {error.message}"
    return replace(error, message=message, ranks=[error.rank], hosts=[error.host] * bool(is_hosts))


def _crash(file: ProgressFile) -> RankError:
    name = _FATAL.findall(file.stacks)[0]
    message = f"rank {file.rank} on {file.host}: {name}"
    hosts = [file.host] * (name != "Aborted")
    return RankError(file.at, file.rank, file.host, SIGNAL, message, ranks=[file.rank], hosts=hosts)


def _hang(files: list[ProgressFile]) -> RankError:
    """Name the rank that doesn't respond or has the least progress, if there is only one."""
    hung = [file for file in files if file.responds]
    suspects = [file for file in files if not file.responds] + _behind(hung) if len(files) > 1 else files
    found, said = suspects if len(suspects) == 1 else [], "no rank made less progress than all others"
    for file in found:
        how = "blocks the others" if file.responds else "doesn't respond; at its last report"
        said = f"rank {file.rank} on {file.host} {how}: {file.activity} after step {file.step}"
    message = f"no step for {min(file.limit_s for file in hung):.0f} s: {said}"
    first, at = (found or hung)[0], min(file.hung_at or file.at for file in hung)
    ranks, hosts = [file.rank for file in found], [file.host for file in found]
    return RankError(at, first.rank, first.host, STALL, message, ranks=ranks, hosts=hosts)


def _behind(files: list[ProgressFile]) -> list[ProgressFile]:
    """Return the ranks that started the fewest collectives, unless they wait in one, while others wait in more."""
    known, unknown = [file for file in files if file.collectives], [file for file in files if not file.collectives]
    groups = {group for file in known for group in file.collectives}
    for group in sorted(groups, key=lambda group: (not group.startswith("nccl"), group)):  # the device's come first
        if any(file.waits_in(group) for file in known):
            started = [file.collectives.get(group, (0, 0))[0] for file in known]
            least = [file for file, count in zip(known, started, strict=True) if count == min(started)]
            if len(least) == len(known):
                # A rank that holds Python's lock. On a GPU it may be launching behind a full queue, as all others do.
                least = unknown if group.startswith("gloo") else []
            return [] if any(file.waits_in(group) for file in least) else least
    # A device that completed all it got, while its host made no progress.
    return known if len(known) == 1 and any(group.startswith("nccl") for group in groups) else []
