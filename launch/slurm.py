"""What SLURM's own commands answer."""

from __future__ import annotations

import re
import shlex
import subprocess

from clap_ds.config.errors import UserError


def slurm(command: list[str], problem: str = "") -> str:
    """What a command of SLURM's prints.

    Raises:
        UserError: it fails, or isn't installed; the message begins with `problem`.
    """
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except OSError as error:
        reason = error.strerror
    except subprocess.CalledProcessError as error:
        reason = error.stderr.strip()
    raise UserError(f"{problem}{shlex.join(command)}: {reason}")


def queued() -> dict[str, str]:
    """SLURM's state by job id, of jobs that are not over."""
    return {line.split()[0]: line.split()[1] for line in slurm(["squeue", "-h", "-r", "-o", "%i %T"]).splitlines()}


def gpus_of_partition(partition: str | None) -> int:
    """GPUs of a node, as SLURM knows them.

    Raises:
        UserError: SLURM has none.
    """
    problem = "no gpus_per_node in the site file, give --gpus: "
    shown = slurm(["sinfo", "-h", "-o", "%G", *(["-p", partition] if partition else [])], problem)
    counts = [sum(map(int, re.findall(r"gpu(?::[\w.-]+)??:(\d+)", line))) for line in shown.splitlines()]
    if max(counts, default=0) < 1:
        raise UserError(f"{problem}sinfo shows no GPUs")
    return max(counts)
