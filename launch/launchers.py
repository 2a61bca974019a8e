"""Command lines of the launchers a job can use: DeepSpeed's own over pdsh or srun, and srun by itself.

Leaves running them, and seeing to how that ends, to `launch/job.py`.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from clap_ds.launch.agents import this_host

WITH_ENVIRONMENT = Path(__file__).resolve().parent / "with_environment.py"


def launch_command(arguments: argparse.Namespace, slots: dict[str, int], job: str) -> list[str]:
    """The launcher's command line.

    Raises:
        ValueError: hosts with different numbers of slots under a launcher that places ranks by count.
    """
    command = arguments.command
    port = str(master_port(job))
    runner = [arguments.python, "-m", "deepspeed.launcher.runner", "--hostfile", str(arguments.hostfile)]
    first = ["--master_addr", next(iter(slots)), "--master_port", port, "--no_ssh_check"]
    if arguments.launcher == "pdsh":
        # A single host is where this script runs, unless the allocation was made from a login node.
        elsewhere = ["--force_multi"] if list(slots) != [this_host()] and len(slots) == 1 else []
        return [*runner, *first, *elsewhere, *command]
    if len(set(slots.values())) > 1:
        raise ValueError(
            f"launcher {arguments.launcher}: every host needs the same number of slots, found {slots}; use pdsh"
        )
    per_host = next(iter(slots.values()))
    step = [f"--nodes={len(slots)}", f"--ntasks-per-node={per_host}", "--kill-on-bad-exit=1"]
    if arguments.launcher == "slurm":
        # The file is `srun --export`'s stand-in, which would cut values at commas.
        if arguments.environment:
            command = [str(WITH_ENVIRONMENT), str(arguments.environment), *command]
        return [
            *runner,
            *first,
            "--force_multi",
            "--launcher",
            "slurm",
            "--launcher_args",
            " ".join([*step, "--overlap"]),
            *command,
        ]
    return [
        "srun",
        f"--ntasks={sum(slots.values())}",
        *step,
        "--overlap",
        "--label",
        "--export=ALL",
        arguments.python,
        "-u",
        *command,
    ]


def master_port(job: str) -> int:
    """A port below the ephemeral range, another one for each job and each of its starts."""
    number = sum(int(part) * factor for part, factor in zip(re.findall(r"\d+", job), (7, 1), strict=False))
    return 16000 + number % 16000
