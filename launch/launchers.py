"""Commands that start a run's ranks: DeepSpeed's launcher with one srun, or torchrun on each
host."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from clap_ds.distributed.hostfile import create_key, format_hostfile, free_port
from clap_ds.utils.files import write_atomically
from clap_ds.utils.paths import PACKAGE

if TYPE_CHECKING:
    from clap_ds.launch.cluster_profile import ClusterProfile

LAUNCHERS = ("slurm", "torchrun")
# torchrun reads PET_NODE_RANK. Only a shell that srun starts on a host knows the host's number.
SET_NODE_RANK = ("sh", "-c", 'PET_NODE_RANK=$SLURM_NODEID exec "$@"', "sh")
FORWARDED_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"


def launch_command(
    profile: ClusterProfile,
    python: str,
    slots: Mapping[str, int],
    hostfile: Path,
    words: Sequence[str],
    step: str = "clap",
) -> list[str]:
    """Return the command line that runs `words`, a script and its arguments, in every slot.

    Args:
        python: interpreter of DeepSpeed's launcher and of the ranks.
        slots: ranks by host, equally many on each.
        step: name of the SLURM step.
    """
    first_host, ranks_per_host = next(iter(slots.items()))
    if profile.launcher == "torchrun":
        # A task on each host is a torchrun.
        srun = _srun_options(profile, slots, step, tasks_per_host=1, ranks_per_task=ranks_per_host)
        torchrun = [
            "-m",
            "torch.distributed.run",
            f"--nnodes={len(slots)}",
            f"--nproc_per_node={ranks_per_host}",
            # The other rendezvous, c10d, runs what it unpickles from a port that anyone may reach.
            "--rdzv_backend=static",
            f"--master_addr={first_host}",
            f"--master_port={free_port()}",
            f"--signals-to-handle={FORWARDED_SIGNALS}",
        ]
        agent = [*SET_NODE_RANK, *profile.wrapper, python, "-u", *torchrun]
        return ["srun", f"--ntasks={len(slots)}", *srun, "--export=ALL", *agent, *words]
    # DeepSpeed's launcher runs one srun with a task for each rank.
    srun = _srun_options(profile, slots, step, tasks_per_host=ranks_per_host, ranks_per_task=1)
    launcher = [python, "-m", "deepspeed.launcher.runner"]
    launcher += ["--hostfile", str(hostfile), "--launcher", "slurm"]
    # Without `--force_multi` it would start a single host's ranks here and not by srun.
    launcher += ["--force_multi", "--no_ssh_check", "--quiet"]
    launcher += ["--master_addr", first_host, "--master_port", str(free_port())]
    return [*launcher, f"--launcher_args={shlex.join(srun)}", *words]


def _srun_options(
    profile: ClusterProfile,
    slots: Mapping[str, int],
    step: str,
    *,
    tasks_per_host: int,
    ranks_per_task: int,
) -> list[str]:
    options = [
        "--kill-on-bad-exit=1",
        # The guard of jobs with spare nodes is another step on these CPUs.
        "--overlap",
        f"--nodes={len(slots)}",
        f"--nodelist={','.join(slots)}",
        f"--ntasks-per-node={tasks_per_host}",
        # By which the supervisor finds the step to signal it.
        f"--job-name={step}",
    ]
    if profile.cpus_per_task:
        options.append(f"--cpus-per-task={profile.cpus_per_task * ranks_per_task}")
    return [*options, *profile.srun]


def prepare_attempt(folder: Path, slots: Mapping[str, int]) -> None:
    """Write an attempt's hostfile, and the key by which its ranks recognize each other."""
    write_atomically(folder / "hostfile", format_hostfile(slots))
    create_key(folder)


def environment() -> dict[str, str]:
    """Return this process's environment with this package on PYTHONPATH."""
    paths = [str(PACKAGE.parent)]
    if os.environ.get("PYTHONPATH"):
        paths.append(os.environ["PYTHONPATH"])
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
