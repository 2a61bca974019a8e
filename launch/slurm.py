"""SLURM's own commands: what they know of partitions, accounts and jobs, and handing a script to sbatch.

Runs on a login node with the standard library alone. A job's name, which no other job has, is on record before sbatch is
called, so that a job whose id didn't come back is found by it. Leaves what a job asks for to `batch_script.py`, and what
its state means to `job_states.py`.
"""

from __future__ import annotations

import getpass
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

from clap_ds.config.errors import UserError, did_you_mean

WAITING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT")
OVER = (
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "REVOKED",
    "TIMEOUT",
)  # fmt: skip
"""States of jobs that have ended; of those on their way there are many more."""
_GPUS = re.compile(r"gpu(?::[\w.-]+)??:(\d+)")
_NO_ANSWER = (
    r"(?i)timed out|unable to contact|connect failure|expected a job id|communication|zero bytes"
    r"|configuration source|fetch_?(config|_)|unknown host"
)
_TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")


@dataclass(frozen=True)
class Nodes:
    """Nodes of one kind in a partition."""

    partition: str
    is_default: bool
    count: int
    gpus: int
    limit_s: int | None  # the partition's time limit; None for none


def ask(command: list[str], problem: str = "", timeout_s: float = 120) -> str:
    """What a command of SLURM's prints; a UserError that begins with `problem` where it fails or isn't installed."""
    try:
        shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=timeout_s)
        return shown.stdout
    except OSError as error:
        reason = error.strerror
    except subprocess.TimeoutExpired:
        reason = f"no answer in {timeout_s:.0f} s"
    except subprocess.CalledProcessError as error:
        reason = error.stderr.strip()
    raise UserError(f"{problem}{shlex.join(command)}: {reason}")


def partitions() -> list[Nodes]:
    """Every partition's nodes; a UserError where SLURM can't be asked."""
    found = []
    for line in ask(["sinfo", "-h", "-e", "-o", "%P|%D|%G|%l"]).splitlines():
        name, count, gres, limit = line.split("|")
        gpus = sum(map(int, _GPUS.findall(gres)))
        known = re.fullmatch(_TIME, limit)
        limit_s = seconds_of(limit) if known else None
        found.append(Nodes(name.rstrip("*"), name.endswith("*"), int(count), gpus, limit_s))
    return found


def gpus_asked_for(option: str) -> int | None:
    """GPUs of each node that an option of sbatch asks for, a job having one task there; None where it says nothing of them."""
    name, _, value = option.partition("=")
    words = value.split(",")
    if name == "--gres":
        words = [word for word in words if re.match(r"(gres[:/])?gpu(:|$)", word)]
    elif name not in ("--gpus-per-node", "--gpus-per-task"):
        return None
    counts = [re.search(r"(?:^|:)(\d+)(\(|$)", word) for word in words]
    return sum(int(count[1]) if count else 1 for count in counts) or None


def of_partition(nodes: Iterable[Nodes], partition: str | None) -> list[Nodes]:
    """The nodes of a partition, or of several (`a,b`); of the default one where none is named."""
    names = partition.split(",") if partition else []
    return [each for each in nodes if (each.partition in names if names else each.is_default)]


def out_of_service(partition: str | None) -> str:
    """Nodes that are down or drained, of a partition or of all; empty where there are none."""
    return ",".join(ask(["sinfo", "-h", "-R", "-o", "%N", *(["-p", partition] if partition else [])]).split())


def missing_partition(nodes: Collection[Nodes], partition: str | None) -> str | None:
    """What is wrong with a site's partition, if anything: there is none of the name, or no default where it names none."""
    names = sorted({each.partition for each in nodes})
    for name in partition.split(",") if partition else ():
        if name not in names:
            return f"partition: SLURM has no {name!r}{did_you_mean(name, names)}"
    if not of_partition(nodes, partition):
        return f"partition: SLURM has no default; name one of {', '.join(names)} in the site file"
    return None


def accounts() -> set[str] | None:
    """The accounts that one's jobs may be charged to, in lower case; None where SLURM keeps no such record."""
    if not shutil.which("sacctmgr"):
        return None
    try:
        command = ["sacctmgr", "-n", "-P", "show", "assoc", f"user={getpass.getuser()}", "format=account"]
        shown = ask(command)
    except (UserError, KeyError):  # KeyError: a user without a name
        return None
    return {line.strip().lower() for line in shown.splitlines() if line.strip()} or None


def seconds_of(time: str) -> int:
    """Seconds of a time as SLURM writes it: `minutes[:seconds]`, `hours:minutes:seconds`, or `days-hours[:minutes[:seconds]]`.

    Raises:
        UserError: the text isn't one, or is no time at all.
    """
    match = _TIME.fullmatch(time)
    if not match:
        raise UserError(f"{time!r}: expected a SLURM time such as 00:15:00 or 1-00:00:00")
    days, *parts = match.groups()
    numbers = [int(part) for part in parts if part is not None]
    if days is not None or len(numbers) == 3:
        hours, minutes, seconds = [*numbers, 0, 0][:3]
    else:
        hours, (minutes, seconds) = 0, [*numbers, 0][:2]
    total = ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds
    if total < 1:
        raise UserError(f"{time!r}: expected a time above zero")
    return total


def time_of(seconds: int) -> str:
    """A time as SLURM reads it."""
    minutes, seconds = divmod(seconds, 60)
    days, hours = divmod(minutes // 60, 24)
    return f"{f'{days}-' if days else ''}{hours:02}:{minutes % 60:02}:{seconds:02}"


def states_of(ids: Iterable[str]) -> dict[str, str]:
    """SLURM's state by job id, of one's jobs that it still knows, from its queue and from accounting where there is any."""
    shown = ask(["squeue", "--me", "-h", "-r", "-t", "all", "-o", "%i %T"])
    states = dict(line.split()[:2] for line in shown.splitlines())
    if forgotten := [number for number in ids if number not in states]:
        for line in _accounting("JobID,State", "-j", ",".join(forgotten)):
            number, _, state = line.partition("|")
            states[number] = state.split()[0]
    return states


def is_on_its_way(state: str | None) -> bool:
    return state is not None and state not in OVER


def unique_name(stem: str) -> str:
    """A job name that no other job has."""
    return f"{re.sub(r'[^A-Za-z0-9_.-]', '_', stem)}-{os.urandom(4).hex()}"


class RefusedError(UserError):
    """SLURM answered, and has no such job."""


def submit(path: Path, name: str, *options: str) -> str:
    """Have SLURM queue a script under a name that is on record; the job's id.

    Raises:
        RefusedError: SLURM took no job.
        UserError: it can't be told whether it did; `find_job` may tell later, by the name.
    """
    since = now()
    command = ["sbatch", "--parsable", f"--job-name={name}", *options, str(path)]
    try:
        # In a session of its own: Ctrl-C here doesn't end it halfway.
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, start_new_session=True)
    except OSError as error:
        raise RefusedError(f"sbatch: {error.strerror}") from None
    number = done.stdout.strip().rpartition("\n")[2].split(";")[0]
    if done.returncode == 0 and number.isdecimal():
        return number
    said = f"sbatch {path}: {done.stderr.strip() or f'expected a job id, found {done.stdout.strip()!r}'}"
    if re.search(_NO_ANSWER, said):
        # Its answer may have been lost where the job was not.
        if found := find_job(name, since):
            return found
        raise UserError(said)
    raise RefusedError(said)


def refusal(text: str, timeout_s: float = 60) -> str | None:
    """Why sbatch would refuse a script, in its own words; None where it would take it.

    Raises:
        UserError: it can't be asked.
    """
    command = ["sbatch", "--test-only"]
    try:
        done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=timeout_s)
    except OSError as error:
        raise UserError(f"sbatch: {error.strerror}") from None
    except subprocess.TimeoutExpired:
        raise UserError(f"sbatch --test-only: no answer in {timeout_s:.0f} s") from None
    if done.returncode == 0:
        return None
    lines = [re.sub(r"^(sbatch: |error: |allocation failure: )+", "", line) for line in done.stderr.splitlines()]
    said = "; ".join(line for line in lines if line and not line.startswith("Try "))
    if re.search(_NO_ANSWER, said):
        raise UserError(f"sbatch --test-only: {said}")
    return said or f"exit code {done.returncode}"


def now() -> str:
    """The time, as SLURM's commands take it, in the clock of this machine."""
    return datetime.now().strftime("%Y-%m-%dT%H:%M:%S")


def find_job(name: str, since: str) -> str | None:
    """Id of the job, or of the job array, that was submitted under a name of its own; None where SLURM knows none.

    `since` is when it was submitted: an ISO time in the clock of this machine, before which accounting isn't looked through.
    """
    shown = ask(["squeue", "--me", "-h", "-t", "all", f"--name={name}", "-o", "%F"]).split()
    earliest = datetime.fromisoformat(since) - timedelta(minutes=10)  # clocks differ
    shown = shown or _accounting("JobID", f"--name={name}", "-S", earliest.isoformat(timespec="seconds"))
    return re.split(r"[_|]", shown[0])[0] if shown else None


def _accounting(columns: str, *options: str) -> list[str]:
    """Lines of `sacct`; none where there is no accounting."""
    if not shutil.which("sacct"):
        return []
    try:
        return ask(["sacct", "-n", "-X", "-P", "-o", columns, *options]).splitlines()
    except UserError:
        return []
