"""Resource requests of jobs, and their batch scripts."""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from clap_ds.config.arguments import CommandParser, add_checkpoint_choices, whole_number
from clap_ds.config.errors import UserError
from clap_ds.config.paths import CHECKOUT, PACKAGE, work_folder
from clap_ds.launch import slurm
from clap_ds.launch.cluster_profile import ClusterProfile, add_cluster, load_profile

TRAINING_TIME = "1-00:00:00"
GUARD = f"""\
# With --no-kill, a job that loses its first host would go on without its script. Ended jobs and later starts are left alone.
[ "$SLURM_JOB_NUM_NODES" = 1 ] ||
    srun --overlap --quiet --nodes=1 --ntasks=1 --ntasks-per-node=1 --relative=1 bash -c 'while sleep 10; do
    case $(sinfo -h -N -n "$1" -o %T)$(scontrol -o show job "$0" 2>&1) in
    down*" JobState=RUNNING "*" Restarts=$2 "*)
        trap "" TERM; scontrol requeue "$0" || exit; set -- JobId="$0" $3
        {slurm.UPDATE}
        exit;;
    *" JobState="[RS]U*" Restarts=$2 "*) ;;  # running or suspended
    *" JobState="* | *"Invalid job id"*) exit;;
    esac; done' "${{SLURM_ARRAY_JOB_ID-$SLURM_JOB_ID}}${{SLURM_ARRAY_TASK_ID+_$SLURM_ARRAY_TASK_ID}}" "$SLURMD_NODENAME" \\
    "${{SLURM_RESTART_COUNT:-0}}" "$without_spares" &"""


@dataclass(frozen=True)
class Request:
    """What jobs request of their cluster, beyond its profile."""

    profile: ClusterProfile
    gpus: int
    gres: str | None  # None if SLURM manages no GPUs
    train: bool = False
    time: str | None = None
    exclude: str | None = None
    spare_nodes: int = 0
    auto_requeue: bool = False
    train_options: list[str] = field(default_factory=list)  # checkpoint options of clap_ds/train.py

    def time_limit(self, nodes: int) -> str:
        return self.time or self.profile.walltime(nodes)

    def warning_s(self, nodes: int) -> int:
        """Return how many seconds before the time limit the run is signaled: at most half of it; training has to save."""
        minutes = -(-slurm.seconds_of(self.time_limit(nodes)) // 60)  # SLURM rounds up
        return min(300 if self.train else 60, minutes * 30)


def add_request(parser: argparse.ArgumentParser) -> None:
    """Add the options that `request_of` reads."""
    add = parser.add_argument
    add_cluster(parser)
    add("--train", action="store_true", help="train instead of running the benchmark")
    ranks_help = "set ranks per node (default: the cluster profile's, or what `sinfo` shows)"
    add("--gpus_per_node", type=whole_number(), metavar="N", help=ranks_help)
    add("--spare_nodes", type=whole_number(0), default=0, metavar="N", help="allocate N more nodes as hot spares")
    add("--auto_requeue", action="store_true", help="requeue training after each time limit until it is complete")
    add("train_options", nargs="*", metavar="-- OPTION", help="options for clap_ds/train.py, such as --restart")
    add_limits(parser)


def add_limits(parser: argparse.ArgumentParser) -> None:
    """Add the options that a later submission of the same jobs may change."""
    time_help = "set SLURM's time limit (default: the cluster profile's; for training a day)"
    parser.add_argument("--time", metavar="TIME", help=time_help)
    parser.add_argument("--exclude", metavar="HOSTS", help="avoid these hosts, in SLURM's notation")


def request_of(arguments: argparse.Namespace, most: int) -> Request:
    """Return the request of a command's options, for at most this many nodes. UserError if they conflict."""
    profile = load_profile(arguments.cluster)
    partitions = slurm.partitions(profile.partition)
    shown = max((each.gpus for each in partitions), default=0)
    gpus = arguments.gpus_per_node or profile.gpus_per_node or shown
    if not gpus:
        raise UserError("no gpus_per_node in the cluster profile, and sinfo shows no GPUs: pass --gpus_per_node")
    there, wanted = max((each.nodes for each in partitions), default=0), most + arguments.spare_nodes
    if partitions and wanted > there:
        where = profile.partition or "the default"
        raise UserError(f"--nodes: the job needs {wanted} nodes, but the partition has {there} ({where})")
    if not arguments.train and (arguments.auto_requeue or arguments.train_options):
        raise UserError("--auto_requeue and options after -- need --train")
    parser = CommandParser("… --train --", allow_abbrev=False)
    add_checkpoint_choices(parser)
    parser.parse_args(arguments.train_options)
    time = arguments.time
    if arguments.train and time is None:
        time = min([TRAINING_TIME, *(each.limit for each in partitions if each.limit)], key=slurm.seconds_of)
    gres = f"gpu:{gpus}" if shown or not partitions else None
    return Request(
        profile, gpus, gres, arguments.train, time, arguments.exclude, arguments.spare_nodes, arguments.auto_requeue,
        arguments.train_options,
    )  # fmt: skip


def script(request: Request, nodes: int, name: str, log: str, folders: Sequence[Path]) -> str:
    """Return the batch script of a job or, with several folders, of an array of jobs.

    Args:
        log: its path in SLURM's notation.
        folders: of each job, with its `run.json` and `cluster.json`.
    """
    profile = request.profile
    python = shlex.quote(sys.executable if profile.container() else profile.interpreter())
    threads = profile.cpus_per_task or "${SLURM_CPUS_PER_TASK:-1}"
    command = (Path("clap_ds") if CHECKOUT else PACKAGE) / ("train.py" if request.train else "bench.py")
    words = [shlex.quote(str(command)), '--deepspeed_config "$folder/run.json"', shlex.join(request.train_options)]
    options, guard = f"--slots={request.gpus}", []
    if request.spare_nodes:  # after lost hosts, SLURM may start the job again without them
        options += f" --spare_nodes=$((SLURM_JOB_NUM_NODES - {nodes}))"
        guard = [f"without_spares={slurm.without_spares(nodes, request.gpus)!r}", GUARD]
    options += " --auto_requeue" * request.auto_requeue
    lines = [
        "#!/bin/bash",
        *_header(request, nodes, name, log),
        *[f"#SBATCH --array=0-{len(folders) - 1}"] * (len(folders) > 1),
        "",
        "set -euo pipefail",
        f"cd {shlex.quote(str(work_folder()))}",
        *profile.setup_lines(),
        f"export OMP_NUM_THREADS=${{OMP_NUM_THREADS:-{threads}}}",
        f"export PYTHONPATH={shlex.quote(str(PACKAGE.parent))}${{PYTHONPATH:+:$PYTHONPATH}}",
        f"folders=({shlex.join(map(str, folders))})",
        "folder=${folders[${SLURM_ARRAY_TASK_ID:-0}]}",
        "",
        *guard,
        f'exec {python} -m clap_ds.launch.supervisor --folder "$folder" \\\n    {options} -- {" ".join(words).strip()}',
    ]
    return "\n".join(lines) + "\n"


def _header(request: Request, nodes: int, name: str, log: str) -> list[str]:
    profile = request.profile
    asks_for_gpus = any(re.match("--(gres|gpus)", option) for option in profile.sbatch)
    options = {
        "job-name": name,
        "output": log,
        "nodes": nodes + request.spare_nodes,
        "ntasks-per-node": request.gpus,
        "gres": None if asks_for_gpus else request.gres,
        "cpus-per-task": profile.cpus_per_task,
        "time": request.time_limit(nodes),
        "account": profile.account,
        "partition": profile.partition,
        "exclude": request.exclude,
        "signal": f"USR1@{request.warning_s(nodes)}",
        "open-mode": "append",
    }
    flags = [*profile.sbatch, "--wait-all-nodes=1", "--requeue", *(["--no-kill"] if request.spare_nodes else [])]
    flags += [f"--{key}={_quoted(value)}" for key, value in options.items() if value is not None]
    return [f"#SBATCH {flag}" for flag in flags]


def _quoted(value: object) -> str:
    """Quote a value for an #SBATCH line."""
    text = str(value)
    return '"' + text.replace('"', '\\"') + '"' if re.search(r"[\s'\"#]", text) else text
