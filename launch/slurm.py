"""Wrap SLURM's commands: query partitions, nodes and jobs, and submit, signal and requeue jobs."""

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
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from clap_ds.run_records.lock import identify_slurm_job
from clap_ds.utils.errors import UserError, did_you_mean

WAITING = ("PENDING", "CONFIGURING", "REQUEUED")
OVER = (
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "REVOKED",
    "TIMEOUT",
)  # fmt: skip
"""States of jobs that have ended; the list of other states is longer."""
TRIES = 3
PAUSE_S = 3.0
UPDATE = """scontrol update "$@" 2>/dev/null || sbatch --quiet --job-name=clap-update-$SLURM_JOB_ID --ntasks=1 --time=5 \\
        --output=/dev/null ${SLURM_JOB_PARTITION:+--partition=$SLURM_JOB_PARTITION} \\
        ${SLURM_JOB_ACCOUNT:+--account=$SLURM_JOB_ACCOUNT} ${SLURM_JOB_QOS:+--qos=$SLURM_JOB_QOS} \\
        ${SLURM_JOB_RESERVATION:+--reservation=$SLURM_JOB_RESERVATION} \\
        --wrap="while scontrol update $* 2>&1 | grep -q DB.index; do sleep 3; done\""""
"""Shell command that changes this job after requeueing it. Without accounting, SLURM accepts no
change of a job that lost a node until its last process, which may be this one, has ended: another
job tries until then. SLURM changes no job that runs."""
_GPUS = re.compile(r"gpu(?::[\w.-]+)??:(\d+)")
_UNREACHABLE = re.compile(
    r"contact slurm controller|munge|authentication|configuration (file|source)", re.IGNORECASE
)
_TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")


def ask(command: Sequence[str], tries: int = TRIES) -> str:
    """Return a SLURM command's output. UserError if all tries fail; a busy controller may not
    answer."""
    for left in reversed(range(tries)):  # a new session: Ctrl-C must not interrupt the command
        try:
            done = subprocess.run(command, capture_output=True, text=True, start_new_session=True)
        except FileNotFoundError:
            remedy = "run this on a login node of a SLURM cluster; without SLURM, use `deepspeed --hostfile`"
            raise UserError(f"{command[0]} not found: {remedy}") from None
        if done.returncode == 0:
            return done.stdout
        time.sleep(PAUSE_S if left else 0)
    problem = f"{shlex.join(command)}: {done.stderr.strip() or done.returncode}"
    if _UNREACHABLE.search(done.stderr):
        problem = f"SLURM's controller can't be reached from {os.uname().nodename}; `scontrol ping` tests it. {problem}"
    raise UserError(problem)


def require_commands() -> None:
    """Raise a UserError if this host lacks commands that a job needs."""
    missing = [
        name
        for name in ("srun", "sinfo", "squeue", "scontrol", "scancel")
        if shutil.which(name) is None
    ]
    if missing:
        where = f"not in PATH on {os.uname().nodename} after `setup` of the cluster profile"
        raise UserError(f"{', '.join(missing)}: {where}; load SLURM's module there, or extend PATH")


# --- partitions and nodes


class Partition(NamedTuple):
    gpus: int  # of the nodes with most
    nodes: int  # in any state
    limit: str | None  # time limit of jobs; None for none


def partitions(names: str | None) -> list[Partition]:
    """Return one or more partitions (`a,b`), or the default."""
    names = names or os.environ.get("SBATCH_PARTITION")
    found: dict[str, Partition] = {}
    of = ["-p", names] if names else []
    for line in ask(["sinfo", "-h", "-e", *of, "-o", "%P|%G|%l|%D"]).splitlines():
        name, gres, limit, count = line.split("|")
        if names or name.endswith("*"):
            gpus, nodes, _ = found.get(name, (0, 0, None))
            gpus = max(gpus, sum(map(int, _GPUS.findall(gres))))
            nodes = nodes + int(count)
            found[name] = Partition(gpus, nodes, limit if _TIME.fullmatch(limit) else None)
    return [*found.values()]


def nearest_partition(name: str) -> str:
    """Return a hint about an unknown partition."""
    return did_you_mean(name, ask(["sinfo", "-h", "-o", "%R"]).split())


def lost_nodes(hosts: Sequence[str]) -> dict[str, str]:
    """Return those of the hosts that SLURM considers down, failing or unresponsive, with their
    states."""
    try:
        shown = ask(["sinfo", "-h", "-N", "-n", ",".join(hosts), "-o", "%N %T"])
    except (UserError, OSError):
        return {}
    states = dict(line.split()[:2] for line in shown.splitlines())
    return {
        host: states[host] for host in hosts if re.match(r"down|fail|.*\*$", states.get(host, ""))
    }


def silent_nodes(hosts: Sequence[str]) -> list[str]:
    """Return hosts of this job on which srun can't start a task though SLURM doesn't consider them
    down yet."""
    count = len(hosts)
    step = ["srun", "--overlap", f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1"]
    words = [*step, f"--nodelist={','.join(hosts)}", "printenv", "SLURMD_NODENAME"]
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        shown = subprocess.run(
            words, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=60.0
        ).stdout
        silent = [host for host in hosts if host not in shown.split()]
        return silent if len(silent) < count else []
    return []


def seconds_of(text: str) -> int:
    """Parse SLURM's `minutes[:seconds]`, `hours:minutes:seconds` or
    `days-hours[:minutes[:seconds]]`; else UserError."""
    match = _TIME.fullmatch(text)
    days, *parts = match.groups() if match else (None,)
    numbers = [int(part) for part in parts if part is not None]
    begins_with_hours = days is not None or len(numbers) == 3
    hours, minutes, seconds = ([*numbers, 0, 0] if begins_with_hours else [0, *numbers, 0, 0])[:3]
    total = ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds
    if total < 1:
        raise UserError(f"{text!r}: expected a SLURM time such as 00:15:00 or 1-00:00:00")
    return total


def minutes_of(limit: str | None) -> int:
    """Return a time limit in minutes, rounded up as by SLURM; a very large number for no limit.
    Else UserError."""
    if limit is None or limit.upper() in ("INFINITE", "UNLIMITED"):
        return sys.maxsize
    return -(-seconds_of(limit) // 60)


# --- jobs, from a login node


def submit(script: Path, *options: str) -> str:
    """Submit a script and return the job's id. UserError, with what to do next, if sbatch rejects
    it."""
    try:
        shown = ask(["sbatch", "--parsable", *options, str(script)], tries=1)
    except UserError as error:
        retry = shlex.join(["clap-ds", "sweep", "resume", str(script.parent)])
        raise UserError(
            f"{error}\nThe job's folder is kept: submit it again with `{retry}`, or delete it"
        ) from None
    return shown.strip().rpartition("\n")[2].partition(";")[0]


def check_script(path: Path, *options: str) -> Iterator[str]:
    """Check a script with `sbatch --test-only` and yield notes. UserError if sbatch rejects the
    script."""
    try:
        ask(["sbatch", "--test-only", *options, str(path)], tries=1)
    except UserError as error:
        if unknown := re.search(r"invalid partition specified: (\S+)", str(error)):
            raise UserError(f"{error}{nearest_partition(unknown[1])}") from None
        if "node configuration is not available" not in str(error):
            raise
        # --test-only ignores nodes that are down or drained, but a submitted job would wait for
        # them.
        yield f"sbatch: {error}, counting only nodes in service"


class QueuedJob(NamedTuple):
    state: str
    reason: str
    name: str


def find_jobs(ids: Iterable[str], names: Iterable[str] = ()) -> dict[str, QueuedJob]:
    """Return by id all of the user's queued jobs, and those of these ids or names that SLURM still
    knows."""
    shown = ask(["squeue", "--me", "-h", "-r", "-t", "all", "-o", "%i|%T|%r|%j"])
    jobs = dict(map(_parse_job, shown.splitlines()))
    forgotten = {"-j": {*ids} - {*jobs}, "--name": {*names} - {job.name for job in jobs.values()}}
    for option, wanted in forgotten.items():
        columns = ["-o", "JobID,State,Reason,JobName", "-S", "now-30days"]
        with contextlib.suppress(UserError, OSError):  # without accounting
            shown = (
                ask(["sacct", "-nPX", *columns, option, ",".join(sorted(wanted))], tries=1)
                if wanted
                else ""
            )
            jobs |= map(_parse_job, shown.splitlines())
    return jobs


def _parse_job(line: str) -> tuple[str, QueuedJob]:
    number, state, reason, name = f"{line}|".split("|")[:4]  # others' names may have more of them
    return number, QueuedJob(state.split()[0], reason, name)


# --- this job, from inside


def signal_step(job: str, name: str, number: signal.Signals) -> None:
    """Signal the tasks of this job's step with this name, if it exists."""
    with contextlib.suppress(UserError, OSError):
        for line in ask(["squeue", "--steps", "-h", "-j", job, "-o", "%i %j"]).splitlines():
            step, _, its_name = line.partition(" ")
            if its_name == name:
                ask(
                    ["scancel", f"--signal={number.name.removeprefix('SIG')}", step], tries=1
                )  # it may have ended


def without_spares(nodes: int, gpus: int) -> str:
    """Return the changes, for `scontrol update`, by which a requeued job waits for no spare
    nodes."""
    # SLURM derived tasks and CPUs from the nodes at submission, and would wait for as many.
    # `--ntasks-per-node` still holds.
    return f"NumNodes={nodes} NumTasks={nodes * gpus} NumCPUs=1"


def requeue(start: int, without: Sequence[str], changes: str = "") -> str | None:
    """Requeue this job; if without some hosts, with `changes`. Return the error if SLURM doesn't
    requeue it, else None.

    If SLURM has ended start number `start`, which a host that was cut off doesn't know, the job is
    left alone. Requeueing ends this job, so nothing may depend on what follows. SLURM allocates no
    host that it counts as down, and can exclude others while the job is pending. If that fails, the
    next start avoids these hosts if it can.
    """
    job = identify_slurm_job()
    lost = lost_nodes(without) if without else {}
    try:
        excluded = ask(["squeue", "-h", "-j", job, "-o", "%x"]).strip() if without else ""
        shown = ask(["scontrol", "-o", "show", "job", job])
        if f" Restarts={start} " not in shown or re.search(
            rf" JobState=({'|'.join(OVER)}) ", shown
        ):
            return f"SLURM has ended start {start} of job {job} already"
        ask(["scontrol", "requeue", job])
    except UserError as error:
        return str(error)
    updates = changes.split() if without else []
    if others := [host for host in without if host not in lost]:
        updates.append(f"ExcNodeList={','.join(filter(None, [excluded, *others]))}")
    if updates:
        subprocess.run(["bash", "-c", UPDATE, "bash", f"JobId={job}", *updates])
    return None
