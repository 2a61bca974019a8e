"""Commands that start a run's ranks: DeepSpeed's launcher with one srun, or torchrun on each
host."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from clap_ds.distributed.hostfile import format_hostfile, free_port
from clap_ds.distributed.rendezvous import create_key
from clap_ds.utils.files import write_atomically
from clap_ds.utils.paths import PACKAGE

if TYPE_CHECKING:
    from clap_ds.launch.cluster_profile import ClusterProfile

LAUNCHERS = ("slurm", "torchrun")


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
        step: name of the SLURM step.
    """
    (first, ranks), port = next(iter(slots.items())), str(free_port())
    by_torchrun = profile.launcher == "torchrun"
    tasks, cores = (
        (1, (profile.cpus_per_task or 0) * ranks) if by_torchrun else (ranks, profile.cpus_per_task)
    )
    srun = [
        "--kill-on-bad-exit=1",
        "--overlap",
        f"--nodes={len(slots)}",
        f"--nodelist={','.join(slots)}",
    ]
    srun += [
        f"--ntasks-per-node={tasks}",
        f"--job-name={step}",
        *([f"--cpus-per-task={cores}"] if cores else []),
    ]
    srun += profile.srun
    if by_torchrun:
        # torchrun's other rendezvous, c10d, runs what it unpickles from a port that anyone may
        # reach.
        number_host = ["sh", "-c", 'PET_NODE_RANK=$SLURM_NODEID exec "$@"', "sh"]
        torchrun = [
            "-m",
            "torch.distributed.run",
            f"--nnodes={len(slots)}",
            f"--nproc_per_node={ranks}",
        ]
        torchrun += ["--rdzv_backend=static", f"--master_addr={first}", f"--master_port={port}"]
        torchrun += ["--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"]
        return [
            "srun",
            f"--ntasks={len(slots)}",
            *srun,
            "--export=ALL",
            *number_host,
            *profile.wrapper,
            python,
            "-u",
            *torchrun,
            *words,
        ]
    options = [
        "--hostfile",
        str(hostfile),
        "--launcher",
        "slurm",
        "--force_multi",
        "--no_ssh_check",
        "--quiet",
    ]
    options += [
        "--master_addr",
        first,
        "--master_port",
        port,
        f"--launcher_args={shlex.join(srun)}",
    ]
    return [python, "-m", "deepspeed.launcher.runner", *options, *words]


def prepare_attempt(folder: Path, slots: Mapping[str, int]) -> None:
    """Write an attempt's hostfile, and the key by which its ranks recognize each other."""
    write_atomically(folder / "hostfile", format_hostfile(slots))
    create_key(folder)


def environment() -> dict[str, str]:
    """Return this process's environment with this package on PYTHONPATH."""
    python_path = os.pathsep.join(filter(None, [str(PACKAGE.parent), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": python_path, "PYTHONUNBUFFERED": "1"}
