"""What SLURM's environment says of a rank: its place in a step that no other launcher has given it, and where it must not be.

Standard library only.
"""

from __future__ import annotations

import contextlib
import os

from clap_ds.config.errors import UserError
from clap_ds.ranks.hostfile import expand, master_port, parse_tasks

LARGEST_STEP = 0xFFFFFFF0  # numbers from here on are of batch scripts, interactive shells and the like


def this_host() -> str:
    """Name of this host as SLURM's node lists have it."""
    return os.environ.get("SLURMD_NODENAME") or os.uname().nodename


def adopt_slurm_step() -> None:
    """Set RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT from the SLURM step this process is a
    task of.

    Does nothing when a launcher has set RANK, or outside of a step that srun made: a batch script's own process has
    SLURM_PROCID, too, but is no rank.
    """
    tasks, step = os.environ.get("SLURM_STEP_NUM_TASKS", ""), os.environ.get("SLURM_STEP_ID", "")
    is_step = step.isdecimal() and int(step) < LARGEST_STEP and tasks.isdecimal() and "SLURM_PROCID" in os.environ
    if os.environ.get("RANK") or not is_step:
        return
    hosts = expand(os.environ["SLURM_STEP_NODELIST"])
    local_tasks = parse_tasks(os.environ["SLURM_STEP_TASKS_PER_NODE"])[int(os.environ["SLURM_NODEID"])]
    os.environ.update(RANK=os.environ["SLURM_PROCID"], WORLD_SIZE=tasks)
    os.environ.update(LOCAL_RANK=os.environ["SLURM_LOCALID"], LOCAL_WORLD_SIZE=str(local_tasks))
    if int(tasks) > 1:  # one alone has nobody to meet, and there may be several in an interactive step
        os.environ.setdefault("MASTER_ADDR", hosts[0])
        os.environ.setdefault("MASTER_PORT", str(master_port(f"{os.environ['SLURM_JOB_ID']}.{step}")))


def slurm_hosts(world_size: int) -> list[str]:
    """Every rank's host, as far as SLURM tells."""
    with contextlib.suppress(ValueError):
        hosts = expand(os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_JOB_NODELIST") or "")
        per_host, odd = divmod(world_size, len(hosts))
        return [] if odd else [host for host in hosts for _ in range(per_host)]
    return []


def check_allocation() -> None:
    """A UserError where a launcher started this rank on a host beside the allocation, such as the login node of an salloc."""
    nodes = os.environ.get("SLURM_JOB_NODELIST")
    if not nodes or not os.environ.get("RANK"):
        return
    here = this_host()
    try:
        allocated = {host.partition(".")[0] for host in expand(nodes)}
    except ValueError:
        return
    if here.partition(".")[0] not in allocated:
        raise UserError(
            f"this host, {here}, isn't in the allocation, {nodes}: DeepSpeed's launcher starts the ranks of a single host here;"
            " give it --force_multi, and --launcher slurm"
        )
