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
# Before the time limit, SLURM signals the ranks. Training has to save.
BENCHMARK_WARNING_S = 60
TRAINING_WARNING_S = 300
_OPTIONS = {
    "-t --time TIME": "set SLURM's time limit (default: the cluster profile's; for training a day)",
    "-x --exclude HOSTS": "avoid these hosts, in SLURM's notation",
    "-A --account NAME": "charge this account (default: the cluster profile's)",
    "-p --partition NAME": (
        "use this partition, or one of several with commas (default: the cluster profile's)"
    ),
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
    """What jobs request of their cluster, beyond its profile.

    Attributes:
        gpus: ranks per node.
        gres: SLURM's name of a node's GPUs. None if SLURM manages none.
        train_options: checkpoint options of `clap_ds/train.py`.
        fewer_nodes: smaller numbers of nodes on which a job may continue.
        options: further options of sbatch, instead of the profile's.
        submission_options: options of the first submission only, which aren't in the script.
    """

    profile: ClusterProfile
    gpus: int
    gres: str | None
    train: bool = False
    time: str | None = None
    spare_nodes: int = 0
    fewer_nodes: list[int] = field(default_factory=list)
    auto_requeue: bool = False
    train_options: list[str] = field(default_factory=list)
    options: dict[str, str] = field(default_factory=dict)
    submission_options: list[str] = field(default_factory=list)

    def time_limit(self, nodes: int) -> str:
        return self.time or self.profile.walltime(nodes)

    def warning_s(self, nodes: int) -> int:
        """Return how many seconds before the time limit the run is signaled: at most half of it."""
        half_limit_s = slurm.parse_minutes(self.time_limit(nodes)) * 30
        return min(TRAINING_WARNING_S if self.train else BENCHMARK_WARNING_S, half_limit_s)


def add_request(parser: argparse.ArgumentParser) -> None:
    """Add the options that `build_request` reads."""
    add = parser.add_argument
    add_cluster(parser)
    add("--train", action="store_true", help="train instead of running the benchmark")
    ranks_help = "set ranks per node (default: the cluster profile's, or what `sinfo` shows)"
    add("--gpus_per_node", type=whole_number(), metavar="N", help=ranks_help)
    spare_help = "allocate N more nodes as hot spares"
    add("--spare_nodes", type=whole_number(0), default=0, metavar="N", help=spare_help)
    requeue_help = "requeue training after each time limit until it is complete"
    add("--auto_requeue", action="store_true", help=requeue_help)
    train_help = "options for clap_ds/train.py, such as --restart"
    add("train_options", nargs="*", metavar="-- OPTION", help=train_help)
    add_limits(parser)


def add_limits(parser: argparse.ArgumentParser) -> None:
    """Add sbatch's options that a later submission of the same jobs may change."""
    for usage, text in _OPTIONS.items():
        *names, metavar = usage.split()
        parser.add_argument(*names, type=one_line, metavar=metavar, help=text)


def get_limits(arguments: argparse.Namespace) -> dict[str, str]:
    """Return the values of the options of `add_limits` that the user typed, by name."""
    names = [usage.split()[-2].removeprefix("--") for usage in _OPTIONS]
    values = {name: getattr(arguments, name) for name in names}
    return {name: value for name, value in values.items() if value is not None}


def parse_limits(lines: Sequence[str]) -> dict[str, str]:
    """Return values of these options in lines of options of sbatch; the last of each counts."""
    parser = CommandParser("sbatch", add_help=False)  # sbatch takes abbreviations, too
    add_limits(parser)
    words = []
    for line in lines:
        try:
            words += shlex.split(line, comments=True)
        except ValueError as error:
            raise UserError(f"options of sbatch: {line}: {error}") from None
    arguments, _ = parser.parse_known_args(words)
    return get_limits(arguments)


def check_script(path: Path, options: Sequence[str]) -> Iterator[str]:
    """Check a script with more options of sbatch, and yield what may keep its job waiting.
    UserError if it can't start."""
    yield from slurm.check_script(path, *options)
    # sbatch accepts a time limit above the partition's, and the job waits forever.
    lines = re.findall("^#SBATCH (.*)", read_bytes(path).decode(), re.MULTILINE)
    limits = parse_limits([*lines, shlex.join(options)])
    if "time" not in limits:
        return
    partitions = slurm.list_partitions(limits.get("partition"))
    # SLURM takes the one of several partitions that allows the job.
    longest = max(
        (partition.limit for partition in partitions), key=slurm.parse_minutes, default=None
    )
    if slurm.parse_minutes(limits["time"]) <= slurm.parse_minutes(longest):
        return
    name = limits.get("partition", "(default)")
    problem = f"time limit {limits['time']}: partition {name} allows at most {longest}"
    # A QOS may override the partition's limit; --time-min lets SLURM lower the job's.
    has_qos = "qos" in limits or "SBATCH_QOS" in os.environ
    if not has_qos and "--time-min" not in " ".join(lines):
        raise UserError(f"{problem}; pass --time, or --qos if a QOS allows more")
    yield f"{problem}; unless --qos or --time-min allows it, the job never starts"


def build_request(arguments: argparse.Namespace, max_nodes: int) -> Request:
    """Return the request of a command's options, for at most this many nodes. UserError if they
    conflict."""
    _check_training_options(arguments)
    # As in sbatch, the command's options come before the profile's.
    profile = load_profile(arguments.cluster)
    profile_limits = parse_limits(profile.sbatch)
    options = get_limits(arguments)
    partition = options.get("partition") or profile.partition or profile_limits.get("partition")
    partitions = slurm.list_partitions(partition)
    sinfo_gpus = max((candidate.gpus for candidate in partitions), default=0)
    gpus = arguments.gpus_per_node or profile.gpus_per_node or sinfo_gpus
    if not gpus:
        if partition and not partitions:
            raise UserError(f"no partition {partition}{slurm.nearest_partition(partition)}")
        raise UserError(
            "no gpus_per_node in the cluster profile, and sinfo shows no GPUs: pass --gpus_per_node"
        )
    # Without an answer of sinfo, sbatch checks the request.
    if partitions:
        num_nodes = max_nodes + arguments.spare_nodes
        available = max(candidate.nodes for candidate in partitions)
        if num_nodes > available:
            raise UserError(
                f"--nodes: the job needs {num_nodes} nodes, but the partition has {available}"
                f" ({partition or 'the default'})"
            )
    time = options.pop("time", profile_limits.get("time"))
    if arguments.train and time is None:
        limits = [candidate.limit for candidate in partitions if candidate.limit]
        time = min([TRAINING_TIME, *limits], key=slurm.parse_seconds)
    # A later submission of the script wouldn't depend on the same jobs.
    submission_options = []
    if "dependency" in options:
        submission_options.append(f"--dependency={options.pop('dependency')}")
    return Request(
        profile,
        gpus,
        gres=f"gpu:{gpus}" if sinfo_gpus or not partitions else None,
        train=arguments.train,
        time=time,
        spare_nodes=arguments.spare_nodes,
        auto_requeue=arguments.auto_requeue,
        train_options=arguments.train_options,
        options=options,
        submission_options=submission_options,
    )


def _check_training_options(arguments: argparse.Namespace) -> None:
    if not arguments.train and (arguments.auto_requeue or arguments.train_options):
        raise UserError("--auto_requeue and options after -- need --train")
    parser = CommandParser("… --train --", allow_abbrev=False)
    add_checkpoint_choices(parser)
    parser.parse_args(arguments.train_options)


def format_script(
    request: Request, nodes: int, name: str, log: str, folders: Sequence[Path]
) -> str:
    """Return the batch script of a job or, with several folders, of an array of jobs.

    Args:
        nodes: without spare ones.
        log: its path in SLURM's notation.
        folders: of each job, with its `run.json` and `cluster.json`.
    """
    profile = request.profile
    sbatch_options = _sbatch_options(request, nodes, name, log)
    if len(folders) > 1:
        sbatch_options.append(f"--array=0-{len(folders) - 1}")
    header = "\n".join(f"#SBATCH {option}" for option in sbatch_options)
    setup = "\n".join([f"cd {shlex.quote(str(work_folder()))}", *profile.setup_lines()])
    threads = profile.cpus_per_task or "${SLURM_CPUS_PER_TASK:-1}"
    python_path = shlex.quote(str(PACKAGE.parent))
    # A supervisor runs outside of the ranks' container.
    python = shlex.quote(sys.executable if profile.container() else profile.interpreter())
    options = f"--slots={request.gpus}"
    guard = ""
    if request.spare_nodes:
        # After lost hosts, SLURM may start the job again without spare nodes.
        options += f" --spare_nodes=$((SLURM_JOB_NUM_NODES - {nodes}))"
        guard = f"without_spares={slurm.without_spares(nodes, request.gpus)!r}\n{GUARD}\n"
    if request.fewer_nodes:
        options += f" --fewer_nodes={','.join(map(str, request.fewer_nodes))}"
    if request.auto_requeue:
        options += " --auto_requeue"
    package = Path("clap_ds") if CHECKOUT else PACKAGE
    program = shlex.quote(str(package / ("train.py" if request.train else "bench.py")))
    command = f'{program} --deepspeed_config "$folder/run.json" {shlex.join(request.train_options)}'
    return f"""\
#!/bin/bash
{header}

set -euo pipefail
{setup}
export OMP_NUM_THREADS=${{OMP_NUM_THREADS:-{threads}}}
export PYTHONPATH={python_path}${{PYTHONPATH:+:$PYTHONPATH}}
folders=({shlex.join(map(str, folders))})
folder=${{folders[${{SLURM_ARRAY_TASK_ID:-0}}]}}

{guard}exec {python} -m clap_ds.launch.supervisor --folder "$folder" \\
    {options} -- {command.strip()}
"""


def _sbatch_options(request: Request, nodes: int, name: str, log: str) -> list[str]:
    """Return the script's options of sbatch. UserError if one isn't printable."""
    profile = request.profile
    profile_has_gpus = any(re.match("--(gres|gpus)", option) for option in profile.sbatch)
    values = {
        "job-name": name,
        "output": log,
        "nodes": nodes + request.spare_nodes,
        "ntasks-per-node": request.gpus,
        "gres": None if profile_has_gpus else request.gres,
        "cpus-per-task": profile.cpus_per_task,
        "time": request.time_limit(nodes),
        "account": profile.account,
        "partition": profile.partition,
        "signal": f"USR1@{request.warning_s(nodes)}",
        "open-mode": "append",
        **request.options,
    }
    options = [*profile.sbatch, "--wait-all-nodes=1", "--requeue"]
    if request.spare_nodes or request.fewer_nodes:
        options.append("--no-kill")
    options += [f"--{key}={_quote(value)}" for key, value in values.items() if value is not None]
    for option in options:
        # A line end would begin a line of the shell.
        if not option.isprintable():
            expectation = "expected printable characters only in options of sbatch"
            raise UserError(f"{printable(option)}: {expectation}")
    return options


def _quote(value: object) -> str:
    """Quote a value for an #SBATCH line."""
    text = str(value)
    if not re.search(r"[\s'\"#]", text):
        return text
    return '"' + text.replace('"', '\\"') + '"'
