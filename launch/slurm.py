"""SLURM's own commands: what they know of partitions, nodes and jobs, handing a script to sbatch, and starting a job anew.

Runs on login nodes and inside jobs, with the standard library alone. Leaves what a job asks for to `batch_script.py`, and
what its state means to `jobs.py`.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from clap_ds.config.errors import UserError

WAITING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT")
OVER = (
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "REVOKED",
    "TIMEOUT",
)  # fmt: skip
"""States of jobs that have ended; of those on their way there are many more."""
TRIES, PAUSE_S, ANSWER_S = 3, 3.0, 60.0
_GPUS = re.compile(r"gpu(?::[\w.-]+)??:(\d+)")
_NO_ANSWER = (
    r"(?i)timed out|unable to contact|connect failure|communication|zero bytes"
    r"|configuration source|fetch_?(config|_)|unknown host|no answer|connection refused|temporarily|try again|^$"
)
_TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")


class RefusedError(UserError):
    """SLURM answered, and has no such job."""


def ask(command: Sequence[str]) -> str:
    """What a command of SLURM's prints. One that gets no answer, as happens where the controller is busy, is tried again.

    Raises:
        UserError: it fails, or isn't installed.
    """
    for left in reversed(range(TRIES)):
        try:
            return subprocess.run(command, capture_output=True, text=True, check=True, timeout=ANSWER_S).stdout
        except OSError as error:
            raise UserError(f"{shlex.join(command)}: {error.strerror}") from None
        except subprocess.TimeoutExpired:
            reason = f"no answer in {ANSWER_S:.0f} s"
        except subprocess.CalledProcessError as error:
            reason = error.stderr.strip()
        if not re.search(_NO_ANSWER, reason):
            break
        time.sleep(PAUSE_S if left else 0)
    raise UserError(f"{shlex.join(command)}: {reason or 'failed without a word'}")


# --- partitions and nodes


class Nodes(NamedTuple):
    """Nodes of one kind in a partition."""

    number: int
    gpus: int
    limit: str | None  # of time; None for none


def partition_nodes(partition: str | None) -> list[Nodes]:
    """The nodes of a partition, or of several (`a,b`), or of the default one; a UserError where SLURM can't be asked."""
    names, found = partition.split(",") if partition else [], []
    for line in ask(["sinfo", "-h", "-e", "-o", "%P|%D|%G|%l"]).splitlines():
        name, count, gres, limit = line.split("|")
        if name.rstrip("*") in names if names else name.endswith("*"):
            gpus = sum(map(int, _GPUS.findall(gres)))
            found.append(Nodes(int(count), gpus, limit if _TIME.fullmatch(limit) else None))
    return found


def lost_nodes(hosts: Sequence[str]) -> dict[str, str]:
    """Which of these hosts SLURM takes for down, failing or not responding, and its word for that; none where it can't tell."""
    try:
        shown = ask(["sinfo", "-h", "-N", "-n", ",".join(hosts), "-o", "%N %T"])
    except UserError:
        return {}
    states = dict(line.split()[:2] for line in shown.splitlines())
    return {host: states[host] for host in hosts if re.match(r"down|fail|.*\*$", states.get(host, ""))}


def silent_nodes(hosts: Sequence[str]) -> list[str]:
    """On which of these hosts of this job srun can't start a task, though SLURM doesn't count them as down yet."""
    count = len(hosts)
    step = ["srun", "--overlap", f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1"]
    words = [*step, f"--nodelist={','.join(hosts)}", "printenv", "SLURMD_NODENAME"]
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        shown = subprocess.run(words, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=ANSWER_S).stdout
        silent = [host for host in hosts if host not in shown.split()]
        return silent if len(silent) < count else []
    return []


def seconds_of(text: str) -> int:
    """Seconds of a time as SLURM writes it: `minutes[:seconds]`, `hours:minutes:seconds`, or `days-hours[:minutes[:seconds]]`.

    Raises:
        UserError: the text isn't one, or is no time at all.
    """
    match = _TIME.fullmatch(text)
    if not match:
        raise UserError(f"{text!r}: expected a SLURM time such as 00:15:00 or 1-00:00:00")
    days, *parts = match.groups()
    numbers = [int(part) for part in parts if part is not None]
    begins_with_hours = days is not None or len(numbers) == 3
    hours, minutes, seconds = ([*numbers, 0, 0] if begins_with_hours else [0, *numbers, 0])[:3]
    total = ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds
    if total < 1:
        raise UserError(f"{text!r}: expected a time above zero")
    return total


# --- jobs, from a login node


def submit(path: Path, *options: str) -> str:
    """Have SLURM queue a script; the job's id. A UserError where it takes none, or where it can't be told whether it did."""
    try:
        shown = _sbatch("--parsable", *options, str(path))
        if not re.fullmatch(r"\d+(;.*)?", shown):
            raise UserError(f"sbatch {path}: expected a job id, found {shown!r}")
    except RefusedError:
        raise
    except UserError as error:
        raise UserError(f"{error}\n`squeue --me` tells whether SLURM has the job nevertheless") from None
    return shown.partition(";")[0]


def refusal(text: str) -> str | None:
    """Why sbatch would refuse a script, in its own words; None where it would take it. A UserError where it gives no answer."""
    try:
        _sbatch("--test-only", text=text)
    except RefusedError as error:
        return str(error).removeprefix("sbatch --test-only: ")
    return None


def _sbatch(*words: str, text: str = "") -> str:
    """The last line that sbatch prints; a RefusedError with what it says against it, a UserError where it gives no answer."""
    try:  # in a session of its own: Ctrl-C here doesn't end it halfway
        done = subprocess.run(
            ["sbatch", *words], input=text, capture_output=True, text=True, start_new_session=True, timeout=ANSWER_S
        )
    except OSError as error:
        raise RefusedError(f"sbatch: {error.strerror}") from None
    except subprocess.TimeoutExpired:
        raise UserError(f"sbatch {words[-1]}: no answer in {ANSWER_S:.0f} s") from None
    if done.returncode == 0:
        return done.stdout.strip().rpartition("\n")[2]
    lines = [re.sub(r"^(sbatch: |error: |allocation failure: )+", "", line) for line in done.stderr.splitlines()]
    said = "; ".join(line for line in lines if line and not line.startswith("Try "))
    kind = UserError if re.search(_NO_ANSWER, said) else RefusedError
    raise kind(f"sbatch {words[-1]}: {said or f'exit code {done.returncode}'}")


def states_of(ids: Iterable[str]) -> dict[str, str]:
    """SLURM's state by job id, of one's jobs that it still knows, from its queue and from accounting where there is any."""
    shown = ask(["squeue", "--me", "-h", "-r", "-t", "all", "-o", "%i %T"])
    states = dict(line.split()[:2] for line in shown.splitlines())
    if forgotten := [number for number in ids if number not in states]:
        for line in _accounting("JobID,State", "-X", "-j", ",".join(forgotten)):
            number, _, state = line.partition("|")
            states[number] = state.split()[0]
    return states


def is_on_its_way(state: str | None) -> bool:
    return state is not None and state not in OVER


def _accounting(columns: str, *options: str) -> list[str]:
    """Lines of `sacct`; none where there is no accounting."""
    if not shutil.which("sacct"):
        return []
    try:
        return ask(["sacct", "-n", "-P", "-o", columns, *options]).splitlines()
    except UserError:
        return []


# --- this job, from inside


def job_id() -> str | None:
    return os.environ.get("SLURM_JOB_ID")


def step_state(job: str) -> str | None:
    """SLURM's state of a job's newest step, such as OUT_OF_MEMORY or NODE_FAIL; None where there is no accounting."""
    lines = [line.partition("|") for line in _accounting("JobID,State", "-j", job)]
    states = {int(step[1]): state for name, _, state in lines if (step := re.fullmatch(r"\d+\.(\d+)", name))}
    return states[max(states)].split()[0] if states else None


def signal_step(name: str, number: signal.Signals) -> None:
    """Signal the tasks of this job's step of a name, by which its ranks were started; nothing where there is none by now."""
    with contextlib.suppress(UserError):
        for line in ask(["squeue", "--steps", "-h", "-j", str(job_id()), "-o", "%i %j"]).splitlines():
            step, _, its_name = line.partition(" ")
            if its_name == name:
                ask(["scancel", f"--signal={number.name.removeprefix('SIG')}", step])


def enough_nodes(without: Sequence[str]) -> bool:
    """Whether this job's partition has as many nodes as the job wants without some: SLURM would let it wait for ever else."""
    wanted = os.environ.get("SLURM_JOB_NUM_NODES", "")
    try:
        nodes = partition_nodes(os.environ.get("SLURM_JOB_PARTITION"))
    except UserError:
        return True
    return not wanted.isdecimal() or not nodes or sum(each.number for each in nodes) - len(without) >= int(wanted)


def requeue(without: Sequence[str]) -> str | None:
    """Have SLURM start this job anew, not on some hosts; why it doesn't, or None. SIGTERM comes soon after."""
    job = str(job_id())
    # Only of a job that waits may the hosts be changed.
    commands = [["requeuehold", job], ["update", f"JobId={job}", f"ExcNodeList={','.join(without)}"], ["release", job]]
    for command in commands if without else [["requeue", job]]:
        try:
            ask(["scontrol", *command])
        except UserError as error:
            if command[0] != "update":
                return str(error)
            # It goes on where it may; this job avoids the hosts as far as it can.
            print(f"warning: {error}", file=sys.stderr, flush=True)
    return None
