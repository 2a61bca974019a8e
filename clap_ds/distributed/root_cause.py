"""Find the root cause of a run's end from the files of its ranks: the earliest error or, in a hang,
the least progress.

Ranks write error files (`clap_ds.distributed.error_file`) and a progress file each
(`clap_ds.distributed.watchdog`): a header line, then stacks if the rank hung or got a fatal signal.
The file of a killed rank has only the header. Standard library only.

Read torch's Flight Recorder: the collectives that a rank has started and completed.

Standard library only, except in a rank.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import re
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from clap_ds.distributed.error_file import (
    ALL_RANKS,
    CONSEQUENCES,
    ERROR,
    HOST,
    IMPORT,
    KILLED,
    LINK,
    LOST_PEER,
    SIGNAL,
    STALL,
    STOPPED,
    UNREACHABLE,
    USER,
    RankError,
    read_errors,
)
from clap_ds.utils.errors import some
from clap_ds.utils.files import parse_json, read_bytes

STACKS = "stacks"  # folder of progress files in the run directory
_BLAMES_HOSTS = (HOST, IMPORT, KILLED, LINK)
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
    folder = run_directory / STACKS
    found = []
    for path in folder.glob("rank*.txt"):
        with suppress(OSError, ValueError, TypeError, KeyError):
            first, _, stacks = read_bytes(path).decode(errors="replace").partition("\n")
            header = parse_json(first)
            header["collectives"] = header["collectives"] or dumped_progress(folder, header["rank"])
            found.append(ProgressFile(**header, stacks=stacks.strip(), at=path.stat().st_mtime))
    return sorted(found, key=lambda each: each.rank)


def find_root_cause(
    run_directory: Path | None,
    job_folder: Path | None,
    hosts: Sequence[str] = (),
    launcher_error: RankError | None = None,
) -> RankError | None:
    """Return the error that ended a run, with the ranks and hosts at fault and a message that names
    them; None without any files.

    Args:
        job_folder: has the ranks' error files before a run directory exists.
        hosts: host of each rank, if known.
        launcher_error: what the launcher printed first about a rank that ended.
    """
    errors = [
        error for folder in (job_folder, run_directory) if folder for error in read_errors(folder)
    ]
    for error in errors:
        if error.kind == STALL:
            # the ranks' own verdict: stopped ones also write stacks when they are woken to be ended
            return error
    files = read_progress(run_directory) if run_directory else []
    causes = [_blamed(error, errors, hosts) for error in errors]
    causes += [_crash(file) for file in files if _FATAL.search(file.stacks)]
    if any(file.responds for file in files):
        causes.append(_hang(files))
    host_of_rank = {file.rank: file.host for file in files} | {
        error.rank: error.host for error in errors
    }
    recorded = {error.rank for error in errors}
    # Ranks that end in order remove their file.
    killed = {
        file.rank: file.host for file in files if not file.stacks and file.rank not in recorded
    }
    if causes and killed:
        causes.append(_killed(killed))
    # A rank that is killed while it imports torch leaves no file at all, nor does one that is
    # stopped a moment earlier.
    silent_ranks = [rank for rank in range(len(hosts)) if rank not in host_of_rank]
    num_silent = Counter(hosts)
    num_silent.subtract(host_of_rank.values())
    silent_hosts = [host for host, number in num_silent.items() if number > 0 and silent_ranks]
    if launcher_error is not None and {*silent_hosts}.intersection(launcher_error.hosts):
        is_everywhere = _is_everywhere(launcher_error.fault, launcher_error.hosts, hosts)
        causes.append(replace(launcher_error, hosts=[]) if is_everywhere else launcher_error)
    elif launcher_error is None and causes and len(silent_hosts) == 1:
        causes.append(replace(_killed(dict.fromkeys(silent_ranks, silent_hosts[0])), at=math.inf))
    return min(causes, key=lambda error: (_order(error), error.at, error.rank), default=None)


def _killed(host_of_rank: dict[int, str]) -> RankError:
    ranks = list(host_of_rank)
    hosts = list(dict.fromkeys(host_of_rank.values()))
    who = f"rank{'s' if len(ranks) > 1 else ''} {some(ranks)} on {some(hosts)}"
    message = f"{who} exited without reporting an error: killed (out of memory?) or node lost"
    return RankError(0.0, ranks[0], hosts[0], KILLED, message, ranks=ranks, hosts=hosts)


def _is_everywhere(fault: str, their_hosts: Sequence[str], hosts: Sequence[str]) -> bool:
    """Return whether all hosts have the same error. On a single host, only a package that is
    missing isn't the host's fault."""
    return len({*their_hosts}) == len({*hosts}) >= (1 if fault == IMPORT else 2)


def _order(error: RankError) -> int:
    """Sort causes before consequences. Libraries abort a rank that lost a peer as well as a broken
    one, and a link's error points to its other end."""
    if error.kind == UNREACHABLE:
        return 3 if error.fault == LINK else 0  # rank 0 lists those that are missing
    aborted = error.kind == SIGNAL and not error.hosts
    if aborted or (error.kind == ERROR and error.fault == LINK):
        return 2
    return {KILLED: 1, LOST_PEER: 3, STOPPED: 3}.get(error.kind, 0)


def _blamed(error: RankError, errors: Sequence[RankError], hosts: Sequence[str]) -> RankError:
    """Add the ranks and hosts at fault to a rank's own error; none if all ranks say the same."""
    if error.kind == UNREACHABLE:  # rank 0's list of missing ranks has them
        return error
    same = [other for other in errors if (other.kind, other.message) == (error.kind, error.message)]
    their_hosts = list(dict.fromkeys(other.host for other in same))
    # Rank 0 reports a user's mistake that all find, and ends before others have found it.
    is_users = error.kind == USER and any(other.rank == 0 for other in same)
    is_everywhere = error.kind not in CONSEQUENCES and _is_everywhere(
        error.fault, their_hosts, hosts
    )
    if error.fault == ALL_RANKS or is_users or is_everywhere:
        return error
    is_hosts = error.kind == ERROR and error.fault in _BLAMES_HOSTS
    message = f"rank {error.rank} on {error.host}: {error.message}"
    return replace(
        error, message=message, ranks=[error.rank], hosts=their_hosts if is_hosts else []
    )


def _crash(file: ProgressFile) -> RankError:
    name = _FATAL.findall(file.stacks)[0]
    message = f"rank {file.rank} on {file.host}: {name}"
    hosts = [file.host] * (name != "Aborted")
    return RankError(file.at, file.rank, file.host, SIGNAL, message, ranks=[file.rank], hosts=hosts)


def _hang(files: list[ProgressFile]) -> RankError:
    """Name the rank that doesn't respond or has the least progress, if there is only one."""
    hung = [file for file in files if file.responds]
    suspects = (
        [file for file in files if not file.responds] + _behind(hung) if len(files) > 1 else files
    )
    found = suspects if len(suspects) == 1 else []
    said = "no rank made less progress than all others"
    for file in found:
        how = "blocks the others" if file.responds else "doesn't respond; at its last report"
        said = f"rank {file.rank} on {file.host} {how}: {file.activity} after step {file.step}"
    message = f"no step for {min(file.limit_s for file in hung):.0f} s: {said}"
    first = (found or hung)[0]
    at = min(file.hung_at or file.at for file in hung)
    ranks = [file.rank for file in found]
    hosts = [file.host for file in found]
    return RankError(at, first.rank, first.host, STALL, message, ranks=ranks, hosts=hosts)


def _behind(files: list[ProgressFile]) -> list[ProgressFile]:
    """Return the ranks that started the fewest collectives, unless they wait in one, while others
    wait in more."""
    known = [file for file in files if file.collectives]
    unknown = [file for file in files if not file.collectives]
    groups = {group for file in known for group in file.collectives}
    for group in sorted(
        groups, key=lambda group: (not group.startswith("nccl"), group)
    ):  # the device's come first
        if any(file.waits_in(group) for file in known):
            started = [file.collectives.get(group, (0, 0))[0] for file in known]
            least = [
                file for file, count in zip(known, started, strict=True) if count == min(started)
            ]
            if len(least) == len(known):
                # A rank that holds Python's lock. On a GPU it may be launching behind a full queue,
                # as all others do.
                least = unknown if group.startswith("gloo") else []
            return [] if any(file.waits_in(group) for file in least) else least
    # A device that completed all it got, while its host made no progress.
    return known if len(known) == 1 and any(group.startswith("nccl") for group in groups) else []


Progress = dict[str, tuple[int, int]]
"""Last started and last completed collective by process group, such as `nccl 0`; all ranks start
them in the same order."""
DUMP = "nccl_rank"
"""Stem of the files that NCCL's own watchdog writes if a collective times out; it needs no
Python."""


def prepare() -> None:
    """Make NCCL record when the device starts collectives. Call before creating a process group."""
    defaults = {
        "TORCH_NCCL_ENABLE_TIMING": "1",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_BUFFER_SIZE": "2000",
    }
    os.environ.update({**defaults, **os.environ})


def own_progress() -> Progress:
    from torch._C import _distributed_c10d as c10d

    found: Progress = {}
    for backend, name in (("nccl", "_dump_nccl_trace"), ("gloo", "_dump_fr_trace")):
        if dump := getattr(c10d, name, None):
            found |= _progress(backend, dump(False, False, False))
    return found


def dumped_progress(folder: Path, rank: int) -> Progress:
    """Return the progress in a rank's dump; empty if there is none."""
    with suppress(OSError, ValueError, LookupError, TypeError, EOFError, pickle.UnpicklingError):
        return _progress("nccl", read_bytes(folder / f"{DUMP}{rank}"))
    return {}


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"expected plain values, found {module}.{name}")


def _progress(backend: str, dump: bytes) -> Progress:
    """Return the progress in a dump. Queued collectives of gloo count as started, those of NCCL
    don't."""
    begun = f"last_{'started' if backend == 'nccl' else 'enqueued'}_collective"
    done = "last_completed_collective"
    status = _PlainUnpickler(io.BytesIO(dump)).load()["pg_status"]
    return {
        f"{backend} {group}": (max(of[begun], of[done]), of[done]) for group, of in status.items()
    }
