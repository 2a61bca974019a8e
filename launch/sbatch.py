"""Resource requests of jobs, and their batch scripts."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from clap_ds.config.arguments import CommandParser, add_checkpoint_choices, one_line, whole_number
from clap_ds.launch import slurm
from clap_ds.launch.cluster_profile import ClusterProfile, add_cluster, load_profile
from clap_ds.utils.errors import UserError, printable
from clap_ds.utils.files import read_bytes
from clap_ds.utils.paths import CHECKOUT, PACKAGE, work_folder

TRAINING_TIME = "1-00:00:00"
_OPTIONS = {
    "-t --time TIME": "set SLURM's time limit (default: the cluster profile's; for training a day)",
    "-x --exclude HOSTS": "avoid these hosts, in SLURM's notation",
    "-A --account NAME": "charge this account (default: the cluster profile's)",
    "-p --partition NAME": "use this partition, or one of several with commas (default: the cluster profile's)",
    "-q --qos NAME": "request this quality of service",
    "-C --constraint LIST": "use nodes with these features",
    "--reservation NAME": "use nodes of this reservation",
    "-d --dependency LIST": "start after other jobs, such as afterok:123; of this submission only",
}
"""sbatch's options on the command line, and their help."""
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
    spare_nodes: int = 0
    auto_requeue: bool = False
    train_options: list[str] = field(default_factory=list)  # checkpoint options of clap_ds/train.py
    options: dict[str, str] = field(
        default_factory=dict
    )  # more options of sbatch, instead of the profile's
    once: list[str] = field(
        default_factory=list
    )  # options that aren't in the script, which may be submitted again

    def time_limit(self, nodes: int) -> str:
        return self.time or self.profile.walltime(nodes)

    def warning_s(self, nodes: int) -> int:
        """Return how many seconds before the time limit the run is signaled: at most half of it;
        training has to save."""
        return min(300 if self.train else 60, slurm.minutes_of(self.time_limit(nodes)) * 30)


def add_request(parser: argparse.ArgumentParser) -> None:
    """Add the options that `request_of` reads."""
    add = parser.add_argument
    add_cluster(parser)
    add("--train", action="store_true", help="train instead of running the benchmark")
    ranks_help = "set ranks per node (default: the cluster profile's, or what `sinfo` shows)"
    add("--gpus_per_node", type=whole_number(), metavar="N", help=ranks_help)
    add(
        "--spare_nodes",
        type=whole_number(0),
        default=0,
        metavar="N",
        help="allocate N more nodes as hot spares",
    )
    add(
        "--auto_requeue",
        action="store_true",
        help="requeue training after each time limit until it is complete",
    )
    add(
        "train_options",
        nargs="*",
        metavar="-- OPTION",
        help="options for clap_ds/train.py, such as --restart",
    )
    add_limits(parser)


def add_limits(parser: argparse.ArgumentParser) -> None:
    """Add sbatch's options that a later submission of the same jobs may change."""
    for usage, text in _OPTIONS.items():
        *names, metavar = usage.split()
        parser.add_argument(*names, type=one_line, metavar=metavar, help=text)


def options_of(arguments: argparse.Namespace) -> dict[str, str]:
    """Return the values of sbatch's options that were given, by name."""
    names = [usage.split()[-2].removeprefix("--") for usage in _OPTIONS]
    return {name: value for name in names if (value := getattr(arguments, name)) is not None}


def parse_options(lines: Sequence[str]) -> dict[str, str]:
    """Return values of these options in lines of options of sbatch; the last of each counts."""
    parser = CommandParser("sbatch", add_help=False)  # sbatch takes abbreviations, too
    add_limits(parser)
    try:
        words = [word for line in lines for word in shlex.split(line, comments=True)]
    except ValueError as error:
        raise UserError(f"options of sbatch: {' '.join(lines)}: {error}") from None
    return options_of(parser.parse_known_args(words)[0])


def check_script(path: Path, options: Sequence[str]) -> Iterator[str]:
    """Check a script with more options of sbatch, and yield what may keep its job waiting.
    UserError if it can't start."""
    lines = re.findall("^#SBATCH (.*)", read_bytes(path).decode(), re.MULTILINE)
    yield from slurm.check_script(path, *options)
    asked = parse_options([*lines, shlex.join(options)])
    time = asked.get("time")
    limits = [partition.limit for partition in slurm.partitions(asked.get("partition"))]
    longest = max(limits, key=slurm.minutes_of, default=None)
    if time and slurm.minutes_of(time) > slurm.minutes_of(longest):
        problem = f"time limit {time}: partition {asked.get('partition', '(default)')} allows at most {longest}"
        if not ("qos" in asked or "SBATCH_QOS" in os.environ or "--time-min" in " ".join(lines)):
            raise UserError(f"{problem}; pass --time, or --qos if a QOS allows more")
        yield f"{problem}; unless --qos or --time-min allows it, the job never starts"


def request_of(arguments: argparse.Namespace, most: int) -> Request:
    """Return the request of a command's options, for at most this many nodes. UserError if they
    conflict."""
    profile = load_profile(arguments.cluster)
    listed = parse_options(profile.sbatch)
    options = options_of(arguments)
    partition = options.get("partition") or profile.partition or listed.get("partition")
    partitions = slurm.partitions(partition)
    shown = max((each.gpus for each in partitions), default=0)
    gpus = arguments.gpus_per_node or profile.gpus_per_node or shown
    if partition and not (gpus or partitions):
        raise UserError(f"no partition {partition}{slurm.nearest_partition(partition)}")
    if not gpus:
        raise UserError(
            "no gpus_per_node in the cluster profile, and sinfo shows no GPUs: pass --gpus_per_node"
        )
    there = max((each.nodes for each in partitions), default=0)
    wanted = most + arguments.spare_nodes
    if partitions and wanted > there:
        raise UserError(
            f"--nodes: the job needs {wanted} nodes, but the partition has {there} ({partition or 'the default'})"
        )
    if not arguments.train and (arguments.auto_requeue or arguments.train_options):
        raise UserError("--auto_requeue and options after -- need --train")
    parser = CommandParser("… --train --", allow_abbrev=False)
    add_checkpoint_choices(parser)
    parser.parse_args(arguments.train_options)
    time = options.pop("time", listed.get("time"))
    if arguments.train and time is None:
        time = min(
            [TRAINING_TIME, *(each.limit for each in partitions if each.limit)],
            key=slurm.seconds_of,
        )
    gres = f"gpu:{gpus}" if shown or not partitions else None
    dependency = options.pop("dependency", None)
    return Request(
        profile, gpus, gres, arguments.train, time, arguments.spare_nodes, arguments.auto_requeue,
        arguments.train_options, options, [f"--dependency={dependency}"] if dependency else [],
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
    command = (Path("clap_ds") if CHECKOUT else PACKAGE) / (
        "train.py" if request.train else "bench.py"
    )
    words = [
        shlex.quote(str(command)),
        '--deepspeed_config "$folder/run.json"',
        shlex.join(request.train_options),
    ]
    options = f"--slots={request.gpus}"
    guard = []
    if request.spare_nodes:  # after lost hosts, SLURM may start the job again without them
        options += f" --spare_nodes=$((SLURM_JOB_NUM_NODES - {nodes}))"
        guard = [f"without_spares={slurm.without_spares(nodes, request.gpus)!r}", GUARD]
    if request.auto_requeue:
        options += " --auto_requeue"
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
        "signal": f"USR1@{request.warning_s(nodes)}",
        "open-mode": "append",
        **request.options,
    }
    flags = [
        *profile.sbatch,
        "--wait-all-nodes=1",
        "--requeue",
        *(["--no-kill"] if request.spare_nodes else []),
    ]
    flags += [f"--{key}={_quoted(value)}" for key, value in options.items() if value is not None]
    for flag in flags:
        if not flag.isprintable():  # a line end would begin a line of the shell
            raise UserError(
                f"{printable(flag)}: expected printable characters only in options of sbatch"
            )
    return [f"#SBATCH {flag}" for flag in flags]


def _quoted(value: object) -> str:
    """Quote a value for an #SBATCH line."""
    text = str(value)
    return '"' + text.replace('"', '\\"') + '"' if re.search(r"[\s'\"#]", text) else text
