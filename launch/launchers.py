"""Command lines: of the launchers a job can use, and of this package's scripts on other hosts.

Leaves running them, and seeing to how that ends, to `launch/job.py`.
"""

from __future__ import annotations

import argparse
import os
import shlex
from pathlib import Path

from clap_ds.config.places import PACKAGE
from clap_ds.dist.hostfile import master_port

FOLDER = Path(__file__).resolve().parent
SSH = ["ssh", "-oBatchMode=yes", "-oConnectTimeout=15", "-oServerAliveInterval=5", "-oServerAliveCountMax=3"]


def this_host() -> str:
    """Name of this host as SLURM's node lists have it."""
    return os.environ.get("SLURMD_NODENAME") or os.uname().nodename


def script_command(python: str, name: str, *arguments: str) -> list[str]:
    """Command line of a script of this folder, for any host; a Python that this package isn't installed for finds it, too."""
    given = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    path = os.pathsep.join(dict.fromkeys([str(PACKAGE.parent), *given]))
    return ["env", f"PYTHONPATH={path}", python, "-u", str(FOLDER / name), *arguments]


def on_host(host: str, command: list[str]) -> list[str]:
    """The command line that runs another one on a host: over ssh, unless it is this one."""
    return command if host == this_host() else [*SSH, host, shlex.join(command)]


def launch_command(arguments: argparse.Namespace, slots: dict[str, int], job: str) -> list[str]:
    """The launcher's command line; a ValueError where it places ranks by count and hosts have different numbers of slots."""
    command = arguments.command
    runner = [arguments.python, "-m", "deepspeed.launcher.runner", "--hostfile", str(arguments.hostfile)]
    runner += ["--master_addr", next(iter(slots)), "--master_port", str(master_port(job)), "--no_ssh_check"]
    if arguments.launcher == "pdsh":
        # A single host is where this script runs, unless the allocation was made from a login node.
        elsewhere = ["--force_multi"] if len(slots) == 1 and list(slots) != [this_host()] else []
        return [*runner, *elsewhere, *command]
    per_host, *others = set(slots.values())
    if others:
        what = "every host needs the same number of slots"
        raise ValueError(f"launcher {arguments.launcher}: {what}, found {slots}; use pdsh")
    step = [f"--nodes={len(slots)}", f"--ntasks-per-node={per_host}", "--kill-on-bad-exit=1", "--overlap"]
    if arguments.launcher == "slurm":
        # The file is `srun --export`'s stand-in, which would cut values at commas.
        if arguments.environment:
            command = [str(FOLDER / "with_environment.py"), str(arguments.environment), *command]
        return [*runner, "--force_multi", "--launcher", "slurm", "--launcher_args", " ".join(step), *command]
    every = f"--ntasks={sum(slots.values())}"
    return ["srun", every, *step, "--label", "--export=ALL", arguments.python, "-u", *command]
