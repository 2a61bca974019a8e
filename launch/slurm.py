"""Wrap SLURM's commands: query partitions, nodes and jobs, and submit, signal and requeue jobs."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from clap_ds.run_records.lock import identify_slurm_job
from clap_ds.utils.errors import UserError, did_you_mean

COMMANDS = ("srun", "sinfo", "squeue", "scontrol", "scancel")
PENDING_STATES = ("PENDING", "CONFIGURING", "REQUEUED")
TERMINAL_STATES = (
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY",
    "PREEMPTED", "REVOKED", "TIMEOUT",
)  # fmt: skip
"""States of jobs that have ended; the list of other states is longer."""
TRIES = 3
RETRY_PAUSE_S = 3.0
PROBE_LIMIT_S = 60.0
# Without accounting, SLURM accepts no change of a job that lost a node until its last process,
# which may be this one, has ended: another job tries until then. SLURM changes no job that runs.
UPDATE = """scontrol update "$@" 2>/dev/null || sbatch --quiet --job-name=clap-update-$SLURM_JOB_ID --ntasks=1 --time=5 \\
        --output=/dev/null ${SLURM_JOB_PARTITION:+--partition=$SLURM_JOB_PARTITION} \\
        ${SLURM_JOB_ACCOUNT:+--account=$SLURM_JOB_ACCOUNT} ${SLURM_JOB_QOS:+--qos=$SLURM_JOB_QOS} \\
        ${SLURM_JOB_RESERVATION:+--reservation=$SLURM_JOB_RESERVATION} \\
        --wrap="while scontrol update $* 2>&1 | grep -q DB.index; do sleep 3; done\""""
"""Shell command that changes this job after requeueing it."""
_GPUS = re.compile(r"gpu(?::[\w.-]+)??:(\d+)")
_UNREACHABLE = re.compile(
    r"contact slurm controller|munge|authentication|configuration (file|source)", re.IGNORECASE
)
_TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")


def run_slurm(command: Sequence[str], tries: int = TRIES) -> str:
    """Return a SLURM command's output. UserError if all tries fail; a busy controller may not
    respond."""
    for attempt in range(tries):
        if attempt:
            time.sleep(RETRY_PAUSE_S)
        try:
            # A new session: Ctrl-C must not interrupt the command.
            done = subprocess.run(command, capture_output=True, text=True, start_new_session=True)
        except FileNotFoundError:
            remedy = "run this on a login node of a SLURM cluster"
            without_slurm = "without SLURM, use `deepspeed --hostfile`"
            problem = f"{command[0]} not found: {remedy}; {without_slurm}"
            raise UserError(problem) from None
        if done.returncode == 0:
            return done.stdout
    problem = f"{shlex.join(command)}: {done.stderr.strip() or done.returncode}"
    if _UNREACHABLE.search(done.stderr):
        host = os.uname().nodename
        problem = (
            f"SLURM's controller can't be reached from {host}; `scontrol ping` tests it. {problem}"
        )
    raise UserError(problem)


def require_commands() -> None:
    """Raise a UserError if this host lacks commands that a job needs."""
    missing = [name for name in COMMANDS if shutil.which(name) is None]
    if missing:
        reason = f"not in PATH on {os.uname().nodename} after `setup` of the cluster profile"
        raise UserError(
            f"{', '.join(missing)}: {reason}; load SLURM's module there, or extend PATH"
        )


# --- partitions and nodes


class Partition(NamedTuple):
    """A partition.

    Attributes:
        gpus: of the nodes with most.
        nodes: in any state.
        limit: time limit of jobs; None for none.
    """

    gpus: int
    nodes: int
    limit: str | None


def list_partitions(names: str | None) -> list[Partition]:
    """Return one or more partitions (`a,b`), or the default."""
    names = names or os.environ.get("SBATCH_PARTITION")
    command = ["sinfo", "-h", "-e"]
    if names:
        command += ["-p", names]
    partitions: dict[str, Partition] = {}
    # A line for each kind of node in a partition. The default's name ends with `*`.
    for line in run_slurm([*command, "-o", "%P|%G|%l|%D"]).splitlines():
        name, gres, limit, num_nodes = line.split("|")
        if not names and not name.endswith("*"):
            continue
        gpus, nodes, _ = partitions.get(name, Partition(0, 0, None))
        gpus = max(gpus, sum(map(int, _GPUS.findall(gres))))
        has_limit = _TIME.fullmatch(limit) is not None
        partitions[name] = Partition(gpus, nodes + int(num_nodes), limit if has_limit else None)
    return [*partitions.values()]


def nearest_partition(name: str) -> str:
    """Return a hint about an unknown partition."""
    return did_you_mean(name, run_slurm(["sinfo", "-h", "-o", "%R"]).split())


def find_lost_nodes(hosts: Sequence[str]) -> dict[str, str]:
    """Return those of the hosts that SLURM considers down, failing or unresponsive, with their
    states."""
    try:
        output = run_slurm(["sinfo", "-h", "-N", "-n", ",".join(hosts), "-o", "%N %T"])
    except (UserError, OSError):
        return {}
    states = dict(line.split()[:2] for line in output.splitlines())
    # SLURM marks nodes that don't respond by `*`.
    is_lost = re.compile(r"down|fail|.*\*$").match
    return {host: states[host] for host in hosts if is_lost(states.get(host, ""))}


def find_silent_nodes(hosts: Sequence[str]) -> list[str]:
    """Return hosts of this job on which srun can't start a task though SLURM doesn't consider them
    down yet. Empty if none responds: then srun itself fails."""
    size = f"--nodes={len(hosts)} --ntasks={len(hosts)} --ntasks-per-node=1".split()
    command = ["srun", "--overlap", *size, f"--nodelist={','.join(hosts)}"]
    try:
        done = subprocess.run(
            [*command, "printenv", "SLURMD_NODENAME"],
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=PROBE_LIMIT_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    responding = done.stdout.split()
    silent = [host for host in hosts if host not in responding]
    return silent if len(silent) < len(hosts) else []


def parse_seconds(text: str) -> int:
    """Parse SLURM's `minutes[:seconds]`, `hours:minutes:seconds` or
    `days-hours[:minutes[:seconds]]`; else UserError."""
    match = _TIME.fullmatch(text)
    seconds = 0
    if match is not None:
        days, *parts = match.groups()
        numbers = [int(part) for part in parts if part is not None]
        if days is None and len(numbers) < 3:
            numbers.insert(0, 0)  # no hours
        hours, minutes, seconds = [*numbers, 0, 0][:3]
        seconds += 60 * (minutes + 60 * (hours + 24 * int(days or 0)))
    if seconds < 1:
        raise UserError(f"{text!r}: expected a SLURM time such as 00:15:00 or 1-00:00:00")
    return seconds


def parse_minutes(limit: str | None) -> int:
    """Return a time limit in minutes, rounded up as by SLURM; a very large number for no limit.
    Else UserError."""
    if limit is None or limit.upper() in ("INFINITE", "UNLIMITED"):
        return sys.maxsize
    return -(-parse_seconds(limit) // 60)


# --- jobs, from a login node


def submit(script: Path, *options: str) -> str:
    """Submit a script and return the job's id. UserError, with what to do next, if sbatch rejects
    it."""
    try:
        output = run_slurm(["sbatch", "--parsable", *options, str(script)], tries=1)
    except UserError as error:
        retry = shlex.join(["clap-ds", "sweep", "resume", str(script.parent)])
        remedy = f"The job's folder is kept: submit it again with `{retry}`, or delete it"
        raise UserError(f"{error}\n{remedy}") from None
    # After messages of a site's plugins, the last line is `ID` or `ID;CLUSTER`.
    return output.strip().rpartition("\n")[2].partition(";")[0]


def check_script(path: Path, *options: str) -> Iterator[str]:
    """Check a script with `sbatch --test-only` and yield notes. UserError if sbatch rejects the
    script."""
    try:
        run_slurm(["sbatch", "--test-only", *options, str(path)], tries=1)
    except UserError as error:
        unknown = re.search(r"invalid partition specified: (\S+)", str(error))
        if unknown:
            raise UserError(f"{error}{nearest_partition(unknown[1])}") from None
        if "node configuration is not available" not in str(error):
            raise
        # --test-only ignores nodes that are down or drained, but a submitted job would wait for
        # them.
        yield f"sbatch: {error}, counting only nodes in service"


class QueuedJob(NamedTuple):
    """A job as SLURM knows it."""

    state: str
    reason: str
    name: str


def find_jobs(ids: Iterable[str], names: Iterable[str] = ()) -> dict[str, QueuedJob]:
    """Return by id all of the user's queued jobs, and those of these ids or names that SLURM still
    knows."""
    queue = run_slurm(["squeue", "--me", "-h", "-r", "-t", "all", "-o", "%i|%T|%r|%j"])
    jobs = dict(map(_parse_job, queue.splitlines()))
    jobs |= _find_in_accounting("-j", {*ids} - {*jobs})
    jobs |= _find_in_accounting("--name", {*names} - {job.name for job in jobs.values()})
    return jobs


def _find_in_accounting(option: str, values: set[str]) -> dict[str, QueuedJob]:
    if not values:
        return {}
    columns = ["-o", "JobID,State,Reason,JobName", "-S", "now-30days"]
    try:
        output = run_slurm(["sacct", "-nPX", *columns, option, ",".join(sorted(values))], tries=1)
    except (UserError, OSError):
        return {}  # the cluster has no accounting
    return dict(map(_parse_job, output.splitlines()))


def _parse_job(line: str) -> tuple[str, QueuedJob]:
    # The `|` ends a last column that is missing. Names of other users' jobs may have more of them.
    number, state, reason, name = f"{line}|".split("|")[:4]
    return number, QueuedJob(state.split()[0], reason, name)


# --- this job, from inside


def signal_step(job: str, name: str, number: signal.Signals) -> None:
    """Signal the tasks of this job's step with this name, if it exists."""
    with suppress(UserError, OSError):
        for line in run_slurm(["squeue", "--steps", "-h", "-j", job, "-o", "%i %j"]).splitlines():
            step, _, step_name = line.partition(" ")
            if step_name == name:
                short_name = number.name.removeprefix("SIG")
                # One try, as the step may have ended.
                run_slurm(["scancel", f"--signal={short_name}", step], tries=1)


def without_spares(nodes: int, gpus: int) -> str:
    """Return the changes, for `scontrol update`, by which a requeued job waits for no spare
    nodes."""
    # SLURM derived tasks and CPUs from the nodes at submission, and would wait for as many.
    # `--ntasks-per-node` still holds.
    return f"NumNodes={nodes} NumTasks={nodes * gpus} NumCPUs=1"


def requeue(start: int, excluded: Sequence[str], changes: str = "") -> str | None:
    """Requeue this job, and return the error if SLURM doesn't requeue it, else None.

    Requeueing ends this job, so nothing may depend on what follows. SLURM allocates no host that it
    counts as down, and can exclude others while the job is pending. If that fails, the next start
    avoids these hosts if it can.

    Args:
        start: number of this start. If SLURM has ended it, which a host that was cut off doesn't
            know, the job is left alone.
        excluded: hosts to avoid.
        changes: of the job if hosts are excluded, for `scontrol update`.
    """
    job = identify_slurm_job()
    lost = find_lost_nodes(excluded) if excluded else {}
    excluded_earlier = ""
    try:
        if excluded:
            excluded_earlier = run_slurm(["squeue", "-h", "-j", job, "-o", "%x"]).strip()
        description = run_slurm(["scontrol", "-o", "show", "job", job])
        has_ended = re.search(rf" JobState=({'|'.join(TERMINAL_STATES)}) ", description)
        if has_ended or f" Restarts={start} " not in description:
            return f"SLURM has ended start {start} of job {job} already"
        run_slurm(["scontrol", "requeue", job])
    except UserError as error:
        return str(error)
    if not excluded:
        return None
    updates = changes.split()
    suspects = [host for host in excluded if host not in lost]
    if suspects:
        hosts = [excluded_earlier, *suspects] if excluded_earlier else suspects
        updates.append(f"ExcNodeList={','.join(hosts)}")
    if updates:
        subprocess.run(["bash", "-c", UPDATE, "bash", f"JobId={job}", *updates])
    return None
