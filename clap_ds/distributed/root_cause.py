"""Find the root cause of a run's end from the files of its ranks: the earliest error or, in a hang,
the least progress.

Ranks write error files (`clap_ds.distributed.error_file`) and a progress file each
(`clap_ds.distributed.watchdog`): a header line, then stacks if the rank hung or got a fatal signal.
The file of a killed rank has only the header. Progress in collectives is that of torch's Flight
Recorder. Standard library only, except `read_own_progress`, which ranks call.
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

# A running rank updates its file every ten seconds.
STOPPED_S = 40.0
STACKS = "stacks"  # folder of progress files in the run directory
_HOST_FAULTS = (HOST, IMPORT, KILLED, LINK)
_FATAL = re.compile(r"^Fatal Python error: (.*\S)", re.MULTILINE)  # faulthandler's format
Progress = dict[str, tuple[int, int]]
"""Last started and last completed collective by process group, such as `nccl 0`; all ranks start
them in the same order."""


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
    modified_at: float

    @property
    def responds(self) -> bool:
        """Whether it reported that it hangs."""
        return self.hung_at is not None or self.stacks.startswith("Timeout")

    def started_in(self, group: str) -> int:
        """Return the number of the last collective that it started."""
        return self.collectives.get(group, (0, 0))[0]

    def waits_in(self, group: str) -> bool:
        """Return whether a collective that it started isn't completed."""
        started, completed = self.collectives.get(group, (0, 0))
        return completed < started


def read_progress(run_directory: Path) -> list[ProgressFile]:
    """Read all progress files, sorted by rank. Skip unreadable ones."""
    folder = run_directory / STACKS
    files = []
    for path in folder.glob("rank*.txt"):
        with suppress(OSError, ValueError, TypeError, KeyError):
            line, _, stacks = read_bytes(path).decode(errors="replace").partition("\n")
            header = parse_json(line)
            if not header["collectives"]:
                header["collectives"] = read_dumped_progress(folder, header["rank"])
            modified_at = path.stat().st_mtime
            files.append(ProgressFile(**header, stacks=stacks.strip(), modified_at=modified_at))
    return sorted(files, key=lambda file: file.rank)


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
    errors: list[RankError] = []
    for folder in (job_folder, run_directory):
        if folder is not None:
            errors += read_errors(folder)
    for error in errors:
        if error.kind == STALL:
            # The ranks' own verdict. Files may have changed since: stopped ranks also write stacks
            # when they are woken to be ended.
            return error
    files = read_progress(run_directory) if run_directory else []
    causes = [_blame(error, errors, hosts) for error in errors]
    causes += [_describe_crash(file) for file in files if _FATAL.search(file.stacks)]
    if any(file.responds for file in files):
        causes.append(_describe_hang(files))
    # Ranks that end in order remove their file.
    with_error = {error.rank for error in errors}
    killed = [file for file in files if not file.stacks and file.rank not in with_error]
    if causes and killed:
        causes.append(_describe_killed({file.rank: file.host for file in killed}))
    host_of_rank = {file.rank: file.host for file in files}
    host_of_rank |= {error.rank: error.host for error in errors}
    causes += _find_silent_cause(host_of_rank, hosts, launcher_error, has_causes=bool(causes))
    key = lambda error: (_order(error), error.at, error.rank)  # noqa: E731
    return min(causes, key=key, default=None)


def _find_silent_cause(
    host_of_rank: dict[int, str],
    hosts: Sequence[str],
    launcher_error: RankError | None,
    *,
    has_causes: bool,
) -> list[RankError]:
    """Return a list with the error of ranks without any file, or empty if it isn't clear: the
    launcher's if it names one of their hosts, else that they were killed if they are of one host.

    A rank that is killed while it imports torch leaves no file, nor does one that the launcher
    stops before.

    Args:
        host_of_rank: of the ranks with a file.
        hosts: host of each rank.
        launcher_error: what the launcher printed, if it is an error.
        has_causes: whether other ranks have errors.
    """
    silent_ranks = [rank for rank in range(len(hosts)) if rank not in host_of_rank]
    if not silent_ranks:
        return []
    # By number, since files may have other names of hosts than SLURM has.
    num_ranks = Counter(hosts)
    num_ranks.subtract(host_of_rank.values())
    silent_hosts = [host for host, num_silent in num_ranks.items() if num_silent > 0]
    if launcher_error is None:
        if not has_causes or len(silent_hosts) != 1:
            return []
        killed = _describe_killed(dict.fromkeys(silent_ranks, silent_hosts[0]))
        # When is unknown: errors with a time are causes before it.
        return [replace(killed, at=math.inf)]
    if not {*silent_hosts}.intersection(launcher_error.hosts):
        return []
    if _is_everywhere(launcher_error.fault, launcher_error.hosts, hosts):
        # What all hosts lack is no host's fault.
        return [replace(launcher_error, hosts=[])]
    return [launcher_error]


def _describe_killed(host_of_rank: dict[int, str]) -> RankError:
    ranks = [*host_of_rank]
    hosts = [*dict.fromkeys(host_of_rank.values())]
    subject = f"rank{'s' if len(ranks) > 1 else ''} {some(ranks)} on {some(hosts)}"
    message = f"{subject} exited without reporting an error: killed (out of memory?) or node lost"
    return RankError(0.0, ranks[0], hosts[0], KILLED, message, ranks=ranks, hosts=hosts)


def _is_everywhere(fault: str, hosts_with_error: Sequence[str], hosts: Sequence[str]) -> bool:
    """Return whether all hosts have the same error. On a single host, only a package that is
    missing isn't the host's fault."""
    fewest_hosts = 1 if fault == IMPORT else 2
    return len({*hosts_with_error}) == len({*hosts}) >= fewest_hosts


def _order(error: RankError) -> int:
    """Return a number by which causes come before consequences. Libraries abort a rank that lost a
    peer as well as a broken one, and a link's error points to its other end."""
    if error.kind == UNREACHABLE:
        # Rank 0 lists those that are missing; others only can't reach rank 0.
        return 3 if error.fault == LINK else 0
    is_abort = error.kind == SIGNAL and not error.hosts
    is_link = error.kind == ERROR and error.fault == LINK
    if is_abort or is_link:
        return 2
    return {KILLED: 1, LOST_PEER: 3, STOPPED: 3}.get(error.kind, 0)


def _blame(error: RankError, errors: Sequence[RankError], hosts: Sequence[str]) -> RankError:
    """Add the ranks and hosts at fault to a rank's own error; none if all ranks have the same."""
    if error.kind == UNREACHABLE:  # rank 0's list of missing ranks has them
        return error
    same = [other for other in errors if (other.kind, other.message) == (error.kind, error.message)]
    hosts_with_error = [*dict.fromkeys(other.host for other in same)]
    # Rank 0 reports a user's mistake that all find, and ends before others have found it.
    is_users = error.kind == USER and any(other.rank == 0 for other in same)
    is_everywhere = _is_everywhere(error.fault, hosts_with_error, hosts)
    if is_everywhere and error.kind not in CONSEQUENCES:
        return error
    if is_users or error.fault == ALL_RANKS:
        return error
    is_hosts = error.kind == ERROR and error.fault in _HOST_FAULTS
    message = f"rank {error.rank} on {error.host}: {error.message}"
    at_fault = hosts_with_error if is_hosts else []
    return replace(error, message=message, ranks=[error.rank], hosts=at_fault)


def _describe_crash(file: ProgressFile) -> RankError:
    name = _FATAL.findall(file.stacks)[0]
    message = f"rank {file.rank} on {file.host}: {name}"
    # Libraries abort ranks that lost a peer.
    hosts = [] if name == "Aborted" else [file.host]
    at = file.modified_at
    return RankError(at, file.rank, file.host, SIGNAL, message, ranks=[file.rank], hosts=hosts)


def _describe_hang(files: list[ProgressFile]) -> RankError:
    """Name the rank that doesn't respond or has the least progress, if there is only one."""
    reporting = [file for file in files if file.responds]
    if len(files) == 1:
        suspects = files
    else:
        silent = [file for file in files if not file.responds]
        suspects = _find_stopped(silent, files) or silent + _find_least_progress(reporting)
    limit_s = min(file.limit_s for file in reporting)
    hung_at = min(file.hung_at or file.modified_at for file in reporting)
    prefix = f"no step for {limit_s:.0f} s"
    if len(suspects) != 1:
        message = f"{prefix}: no rank made less progress than all others"
        return RankError(hung_at, reporting[0].rank, reporting[0].host, STALL, message)
    (suspect,) = suspects
    how = "blocks the others" if suspect.responds else "doesn't respond; at its last report"
    subject = f"rank {suspect.rank} on {suspect.host}"
    message = f"{prefix}: {subject} {how}: {suspect.activity} after step {suspect.step}"
    rank = suspect.rank
    host = suspect.host
    return RankError(hung_at, rank, host, STALL, message, ranks=[rank], hosts=[host])


def _find_stopped(silent: list[ProgressFile], files: list[ProgressFile]) -> list[ProgressFile]:
    """Return the ranks that no longer update their file. The others wait for them, and those that
    are silent may only have taken their last step later."""
    last_update_at = max(file.modified_at for file in files)
    return [file for file in silent if last_update_at - file.modified_at > STOPPED_S]


def _find_least_progress(files: list[ProgressFile]) -> list[ProgressFile]:
    """Return the ranks that started the fewest collectives while others wait for them; empty if
    nothing singles them out."""
    recorded = [file for file in files if file.collectives]
    groups = set[str]().union(*(file.collectives for file in recorded))
    # The device's groups come first: hosts may be ahead of it.
    on_device = sorted(group for group in groups if group.startswith("nccl"))
    on_host = sorted(group for group in groups if group not in on_device)
    for group in [*on_device, *on_host]:
        if not any(file.waits_in(group) for file in recorded):
            continue
        fewest = min(file.started_in(group) for file in recorded)
        behind = [file for file in recorded if file.started_in(group) == fewest]
        if len(behind) == len(recorded):
            # All are alike, so a rank that recorded nothing is behind: it holds Python's lock. On a
            # GPU all hosts may hold it, launching behind a full queue.
            if group in on_device:
                return []
            behind = [file for file in files if not file.collectives]
        is_waiting = any(file.waits_in(group) for file in behind)
        return [] if is_waiting else behind
    # If a single rank could record its progress, and its device completed all that it got, then its
    # host makes no progress.
    if on_device and len(recorded) == 1:
        return recorded
    return []


# --- torch's Flight Recorder

DUMP = "nccl_rank"
"""Stem of the files that NCCL's own watchdog writes if a collective times out; it needs no
Python."""


def prepare_flight_recorder() -> None:
    """Make NCCL record when the device starts collectives. Call before creating a process group."""
    os.environ.setdefault("TORCH_NCCL_ENABLE_TIMING", "1")
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")


def read_own_progress() -> Progress:
    """Return this rank's progress by group."""
    from torch._C import _distributed_c10d as c10d

    progress: Progress = {}
    for backend, function in (("nccl", "_dump_nccl_trace"), ("gloo", "_dump_fr_trace")):
        # Absent in a torch that is built without the backend.
        dump = getattr(c10d, function, None)
        if dump is not None:
            # The status of each group suffices: no collectives, no stacks, not only active ones.
            progress |= _parse_dump(backend, dump(False, False, False))
    return progress


def read_dumped_progress(folder: Path, rank: int) -> Progress:
    """Return the progress in a rank's dump; empty if there is none."""
    with suppress(OSError, ValueError, LookupError, TypeError, EOFError, pickle.UnpicklingError):
        return _parse_dump("nccl", read_bytes(folder / f"{DUMP}{rank}"))
    return {}


class _PlainUnpickler(pickle.Unpickler):
    """An unpickler of built-in types, which runs no code of the file."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"expected plain values, found {module}.{name}")


def _parse_dump(backend: str, dump: bytes) -> Progress:
    """Return the progress in a dump. Queued collectives of gloo count as started, those of NCCL
    don't."""
    started_field = "last_enqueued_collective" if backend == "gloo" else "last_started_collective"
    progress = {}
    statuses = _PlainUnpickler(io.BytesIO(dump)).load()["pg_status"]
    for group, status in statuses.items():
        completed = status["last_completed_collective"]
        # NCCL reports -1 for the last started one until its watchdog has seen it.
        started = max(status[started_field], completed)
        progress[f"{backend} {group}"] = (started, completed)
    return progress
