"""Job scripts, and the checks before one is queued: what `submit.py` and `sweep.py` share.

A script is what the job asks SLURM for, the site's shell lines and variables, and two commands: the hostfile, and
`launch/job.py` with the run's own. Leaves sbatch itself to `slurm.py`.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import shlex
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from clap_ds.config.arguments import whole_number
from clap_ds.config.batch_sizes import BatchSizes
from clap_ds.config.errors import UserError
from clap_ds.config.places import CHECKOUT, PACKAGE, work_folder
from clap_ds.dist.hostfile import expand
from clap_ds.launch import slurm
from clap_ds.launch.site_check import Found, check_environment, check_scripts
from clap_ds.launch.sites import LAUNCHERS, Site, load_site

TRAINING_S, TRAINING_WARNING_S = 24 * 3600, 300
PASSED = ("OMP_NUM_THREADS", "PATH", "LD_LIBRARY_PATH")
"""Variables that ranks get from the job's shell where ssh starts them, beside the site's; srun passes on all there are."""


@dataclass(frozen=True)
class Request:
    """What jobs ask for beside what their site says."""

    site: str
    gpus: int
    gres: str | None  # None where SLURM manages no GPUs
    train: bool = False
    time: str | None = None
    launcher: str | None = None
    exclude: str | None = None
    spare_nodes: int = 0
    shrink: bool = False
    until_done: bool = False
    train_options: tuple[str, ...] = ()  # of clap_ds/train.py, for a run that has checkpoints

    def load_site(self) -> Site:
        return load_site(self.site, self.launcher)

    def time_limit(self, site: Site, nodes: int) -> str:
        return self.time or site.walltime(nodes)

    def warning_s(self, site: Site, nodes: int) -> int:
        """Seconds before the limit at which the run is signalled, at most half of it; training has to save."""
        usual = TRAINING_WARNING_S if self.train else site.warning_s
        return min(usual, -(-slurm.seconds_of(self.time_limit(site, nodes)) // 60) * 30)  # SLURM counts in minutes


def add_request(parser: argparse.ArgumentParser, **of_config: Any) -> None:
    """Options that `request_of` reads."""
    add = parser.add_argument
    add("--site", default="generic", help="name under launch/clusters/, or a file")
    add("--config", type=Path, required=True, help="the run's JSON: a file, or a packaged one's name", **of_config)
    add("--train", action="store_true", help="training in place of the benchmark")
    add("--gpus", type=whole_number(), help="ranks per node, in place of the site's")
    add("--launcher", choices=LAUNCHERS, help="what starts the ranks, in place of the site's")
    add_limits(parser)


def add_limits(parser: argparse.ArgumentParser) -> None:
    """Options that another submission of the same jobs may change."""
    parser.add_argument("--time", type=time_limit, help="time limit, in place of the site's (training: a day)")
    parser.add_argument("--exclude", metavar="HOSTS", type=host_list, help="hosts not to run on, in SLURM's notation")


def time_limit(text: str) -> str:
    try:
        slurm.seconds_of(text)
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def host_list(text: str) -> str:
    try:
        expand(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def request_of(arguments: argparse.Namespace, **more: Any) -> Request:
    """The request of a command's options; a UserError where neither they, the site nor SLURM tell the number of GPUs."""
    site, problem, nodes = load_site(arguments.site, arguments.launcher), "sinfo shows none", []
    try:
        nodes = slurm.partition_nodes(site.partition)
    except UserError as error:
        problem = f"SLURM can't be asked: {error}"
    shown = max((each.gpus for each in nodes), default=0)
    gpus = arguments.gpus or site.gpus_per_node or shown
    if not gpus:
        raise UserError(f"no gpus_per_node in the site file, give --gpus: {problem}")
    time = arguments.time
    if arguments.train and time is None:
        time = slurm.time_of(min([TRAINING_S, *(each.limit_s or TRAINING_S for each in nodes)]))
    name = arguments.site
    given = {name: getattr(arguments, name) for name in ("train", "launcher", "exclude")}
    is_file = name.endswith(".json") or "/" in name
    gres = f"gpu:{gpus}" if shown or not nodes else None
    return Request(str(Path(name).resolve()) if is_file else name, gpus, gres, time=time, **given, **more)


def check(request: Request, scripts: dict[int, str], runs: dict[str, Path]) -> Found:
    """Try the site, a script for each number of nodes, and every run's JSON, by what to call it in a message.

    Problems that all runs have are said once.
    """
    found, site = Found(), request.load_site()
    check_scripts(scripts.values(), found)
    said = check_environment(site, found, runs.values(), train=request.train)
    problems: dict[str, list[str]] = {}
    if said and not any(f"{path}:" in said for path in runs.values()):
        found.problems.append(f"the check of the configuration failed: {said.strip().rpartition(chr(10))[2].strip()}")
    for line in map(str.strip, said.removeprefix("error: ").splitlines()):
        for name, path in runs.items():
            if line.startswith(f"{path}:"):
                problems.setdefault(line.removeprefix(f"{path}:").strip(), []).append(name)
    for problem, names in problems.items():
        others = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
        found.problems.append(f"{names[0]}{others}: {problem}")
    if site.cpus_per_task is None and "--exclusive" not in site.sbatch:
        found.unchecked.append("cores: with neither cpus_per_task nor --exclusive in the site, all ranks may get one")
    return found


def check_batch(content: dict[str, Any], ranks: int, name: str) -> None:
    """A UserError where a run's batch sizes, as written, can't be those of so many ranks; `name` says whose."""
    try:
        BatchSizes.of(content, ranks)
    except ValueError as error:
        raise UserError("\n".join(f"{name}: {line}" for line in str(error).splitlines())) from None


def script(
    request: Request, nodes: int, name: str, log: str, folders: list[Path], micro_batch: str | None = None
) -> str:
    """Text of the batch script of a job, or of an array of jobs: a folder with its `run.json` each.

    `log` is the output file in SLURM's notation (`log_file`); `micro_batch` what `launch/micro_batch.py` is to try.
    """
    site = request.load_site()
    places, python = work_folder(), shlex.quote(sys.executable if site.container() else site.interpreter())
    threads = site.cpus_per_task or "${SLURM_CPUS_PER_TASK:-1}"
    lines = ["#!/bin/bash", *_header(request, site, nodes, name, log), ""]
    lines += ["set -euo pipefail", f"cd {shlex.quote(str(places))}", *site.setup_lines()]
    lines += [f"export OMP_NUM_THREADS=${{OMP_NUM_THREADS:-{threads}}}"]
    lines += [f"export PYTHONPATH={shlex.quote(str(PACKAGE.parent))}${{PYTHONPATH:+:$PYTHONPATH}}"]
    if len(folders) > 1:
        lines += [f"folders=({shlex.join(map(str, folders))})", "folder=${folders[${SLURM_ARRAY_TASK_ID:-0}]}"]
    else:
        lines += [f"folder={shlex.quote(str(folders[0]))}"]
    lines += ["", f'{python} -m clap_ds.launch.hostfile --output "$folder/hostfile" --slots {request.gpus}']
    each = "'{folder}'" if micro_batch else '"$folder"'
    command = (Path("clap_ds") if CHECKOUT else PACKAGE) / ("train.py" if request.train else "bench.py")
    run = [
        f'{python} -m clap_ds.launch.job --folder {each} --hostfile "$folder/hostfile"',
        *_job_options(request, site),
        f"-- {shlex.quote(str(command))} --deepspeed_config {each}/run.json {shlex.join(request.train_options)}".strip(),
    ]
    if micro_batch:
        trials = (
            f'{python} -m clap_ds.launch.micro_batch {micro_batch} --config "$folder/run.json" --folder "$folder" --'
        )
        run = [trials, *run]
    lines += [" \\\n    ".join(["exec " + run[0], *run[1:]])]
    return "\n".join(lines) + "\n"


def _header(request: Request, site: Site, nodes: int, name: str, log: str) -> list[str]:
    """The #SBATCH lines."""
    asks_for_gpus = any(re.match("--(gres|gpus)", option) for option in site.sbatch)  # in the site's own way
    # SLURM signals the ranks of a step of its own; under pdsh it knows of the script alone.
    to_whom = "B:" if site.launcher == "pdsh" else ""
    options = {
        "job-name": name,
        "output": log,
        "nodes": nodes + request.spare_nodes,
        "ntasks-per-node": request.gpus,
        "gres": None if asks_for_gpus else request.gres,
        "cpus-per-task": site.cpus_per_task,
        "time": request.time_limit(site, nodes),
        "account": site.account,
        "partition": site.partition,
        "exclude": request.exclude,
        "signal": f"{to_whom}USR1@{request.warning_s(site, nodes)}",
        "open-mode": "append",
    }
    flags = [*site.sbatch, "--requeue", *(["--no-kill"] if request.spare_nodes or request.shrink else [])]
    flags += [f"--{key}={_quoted(value)}" for key, value in options.items() if value is not None]
    return [f"#SBATCH {flag}" for flag in flags]


def _job_options(request: Request, site: Site) -> list[str]:
    """Options of `launch/job.py`, as the shell takes them."""
    launcher = site.launcher or "slurm"
    options: dict[str, object] = {
        "launcher": launcher,
        "srun_options": shlex.join(site.srun) or None,
        "cpu_bind": site.cpu_bind,
        "cpus_per_task": site.cpus_per_task,
        "wrapper": shlex.join(site.wrapper) or None,
        "python": site.interpreter() if site.container() else None,
        "spare_nodes": request.spare_nodes or None,
        "requeues": site.requeues,
    }
    words = [f"--{key}={shlex.quote(str(value))}" for key, value in options.items() if value is not None]
    words += [f"--{key}" for key in ("shrink", "until_done") if getattr(request, key)]
    return [*words, *([f"--pass {' '.join([*site.environment, *PASSED])}"] if launcher == "pdsh" else [])]


def _quoted(value: object) -> str:
    """A value on an #SBATCH line, where sbatch splits words but knows quotes."""
    text = str(value)
    if "\n" in text or "\\" in text:
        raise UserError(f"{text!r}: sbatch takes no backslash and no line end")
    return '"' + text.replace('"', '\\"') + '"' if re.search(r"[\s'\"#]", text) else text


def log_file(folder: Path, name: str) -> str:
    """An output file in SLURM's notation, in which a folder's own % are doubled."""
    return f"{str(folder).replace('%', '%%')}/{name}"


@contextlib.contextmanager
def finishing() -> Iterator[None]:
    """Ctrl-C takes effect after this, when sbatch's answer is on record; a second one at once."""
    heard: list[int] = []

    def hear(number: int, frame: object) -> None:
        if heard:
            raise KeyboardInterrupt
        heard.append(number)
        print("\nwaiting for sbatch's answer; Ctrl-C again doesn't", file=sys.stderr, flush=True)

    before = signal.signal(signal.SIGINT, hear)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if heard:
        raise KeyboardInterrupt("the jobs submitted so far are on record")


def stamp() -> str:
    return f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}"
