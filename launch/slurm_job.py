"""What a job asks SLURM about itself, and asks of it: its GPUs on each host, its time, another start. Standard library only."""

from __future__ import annotations

import os
import re
import sys

from clap_ds.config.errors import UserError
from clap_ds.dist.hostfile import expand
from clap_ds.launch import slurm

_NODES = re.compile(r"^\s+Nodes=(\S+) .*?GRES=(\S*)", re.MULTILINE)
_GPUS = re.compile(r"gpu(?::[\w.-]+)?:\d+\(IDX:([\d,-]+)\)")
ANSWER_S = 30.0


def _ask(*command: str) -> str:
    """What a command of SLURM's prints; empty where it fails or isn't there."""
    try:
        return slurm.ask([*command], timeout_s=ANSWER_S)
    except UserError:
        return ""


def job_id() -> str | None:
    return os.environ.get("SLURM_JOB_ID")


def gpus_by_host() -> dict[str, list[str]]:
    """Which GPUs of each host SLURM gave this job, by their number there; empty outside a job, and where SLURM has no GPUs."""
    if job_id() is None:
        return {}
    return parse_gpus(_ask("scontrol", "show", "job", "--details", str(job_id())))


def parse_gpus(shown: str) -> dict[str, list[str]]:
    """`gpus_by_host` of what `scontrol show job --details` prints."""
    found: dict[str, list[str]] = {}
    for nodes, resources in _NODES.findall(shown):
        numbers = [number[1:] for ranges in _GPUS.findall(resources) for number in expand(f"g[{ranges}]")]
        found |= dict.fromkeys(expand(nodes), numbers)
    return {host: gpus for host, gpus in found.items() if gpus}


def seconds_used_and_left() -> tuple[int, int] | None:
    """How long this job has run, and how long it may go on; None where nobody tells, or without a limit."""
    words = _ask("squeue", "-h", "-j", str(job_id()), "-o", "%M %L").split()
    try:
        used, left = map(slurm.seconds_of, words)
    except (UserError, ValueError):
        return None
    return used, left


def enough_nodes(without: list[str]) -> bool:
    """Whether this job's partition has as many nodes as the job wants without some: SLURM would let it wait for ever else."""
    wanted = os.environ.get("SLURM_JOB_NUM_NODES", "")
    try:
        nodes = slurm.of_partition(slurm.partitions(), os.environ.get("SLURM_JOB_PARTITION"))
    except UserError:
        return True
    return not wanted.isdecimal() or not nodes or sum(each.count for each in nodes) - len(without) >= int(wanted)


def requeue(without: list[str]) -> str | None:
    """Have SLURM start this job anew, not on some hosts; why it doesn't, or None. SIGTERM comes soon after."""
    job = str(job_id())
    # Only of a job that waits may the hosts be changed.
    commands = [["requeuehold", job], ["update", f"JobId={job}", f"ExcNodeList={','.join(without)}"], ["release", job]]
    for command in commands if without else [["requeue", job]]:
        try:
            slurm.ask(["scontrol", *command], timeout_s=ANSWER_S)
        except UserError as error:
            if command[0] != "update":
                return str(error)
            # It goes on where it may; this job avoids the hosts as far as it can.
            print(f"warning: {error}", file=sys.stderr, flush=True)
    return None
