"""Job scripts, and the checks before one is queued: what `submit.py` and `sweep.py` share.

A script is the site's options, what this job asks for, and one start of `bench.sbatch`. Leaves sbatch itself to `slurm.py`.
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
from clap_ds.config.places import work_folder
from clap_ds.dist.hostfile import expand
from clap_ds.launch import slurm
from clap_ds.launch.site_check import Found, check_environment, check_partition, check_scripts
from clap_ds.launch.sites import LAUNCHERS, Site, launcher_name, load_site

BENCH = Path(__file__).resolve().parent / "bench.sbatch"
TRAINING_S = 24 * 3600
SAVING_SHARE = 0.8
"""Of the time between the warning and the limit, for a training run to save in."""


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

    def time_limit(self, site: Site, nodes: int) -> str:
        return self.time or site.walltime(nodes)

    def warning_s(self, site: Site, nodes: int) -> int:
        """Seconds before the limit at which the run is signalled: half the limit where it is too short for more."""
        limit_s = -(-slurm.seconds_of(self.time_limit(site, nodes)) // 60) * 60  # SLURM counts in minutes
        usual = site.warning(self.train)
        return limit_s // 2 if limit_s <= 2 * usual else usual

    def notes(self, site: Site, nodes: int) -> list[str]:
        """What a user should know of the choices made for a job."""
        notes = []
        warning, limit = self.warning_s(site, nodes), self.time_limit(site, nodes)
        if warning < site.warning(self.train):
            notes.append(
                f"a time limit of {limit} is short: the run is told to stop {warning} s before it, after half of it"
            )
        if site.cpus_per_task is None and "--exclusive" not in site.sbatch:
            notes.append(
                "the site has neither cpus_per_task nor --exclusive: SLURM may give all ranks of a node one core"
            )
        return notes


def add_request(parser: argparse.ArgumentParser) -> None:
    """Options that `request_of` reads."""
    add = parser.add_argument
    add("--site", default="generic", help="name under launch/clusters/, or a file")
    add("--config", type=Path, required=True, help="the run's JSON: a file, or a packaged one's name")
    add("--train", action="store_true", help="training in place of the benchmark")
    add("--gpus", type=whole_number(), help="ranks per node, in place of the site's")
    add("--launcher", type=launcher_name, choices=LAUNCHERS)
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


def request_of(arguments: argparse.Namespace, site: Site, **more: Any) -> Request:
    """The request of a command's options; a UserError where neither they, the site nor SLURM tell the number of GPUs."""
    problem, everything = "sinfo shows no GPUs in its partition", None
    with contextlib.suppress(UserError):
        everything = slurm.partitions()
    if everything is None:
        problem, nodes = "SLURM can't be asked here", []
    elif missing := slurm.missing_partition(everything, site.partition):
        raise UserError(missing)
    else:
        nodes = slurm.of_partition(everything, site.partition)
    most = max((each.gpus for each in nodes), default=0)
    gpus = arguments.gpus or site.ranks() or most
    if not gpus:
        raise UserError(f"no gpus_per_node in the site file, give --gpus: {problem}")
    time = arguments.time
    if arguments.train and time is None:
        limits = [each.limit_s or TRAINING_S for each in nodes]
        time = slurm.time_of(min([TRAINING_S, *limits]))
    name = arguments.site
    given = {name: getattr(arguments, name) for name in ("train", "launcher", "exclude")}
    is_file = name.endswith(".json") or "/" in name
    gres = f"gpu:{gpus}" if most or everything is None else None
    return Request(str(Path(name).resolve()) if is_file else name, gpus, gres, time=time, **given, **more)


def check(request: Request, site: Site, scripts: dict[int, str], runs: dict[str, Path]) -> Found:
    """Try the site, a script for each number of nodes, and every run's JSON, by what to call it in a message.

    Problems that all runs have are said once.
    """
    found, most = Found(), max(scripts) + request.spare_nodes
    limits = {request.time_limit(site, each) for each in scripts}
    own = site.own_gpus()
    if own and own[1] != request.gpus:
        found.problems.append(f"--gpus {request.gpus}: the site's sbatch options have {own[0]}")
    check_partition(site, found, nodes=most, gpus=request.gpus, time=max(limits, key=slurm.seconds_of))
    check_scripts(site, scripts.values(), found)
    said = check_environment(site, found, list(runs.values()), train=request.train)
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

    `log` is the output file in SLURM's notation (`log_file`).
    """
    site = load_site(request.site)
    warning, train = request.warning_s(site, nodes), request.train
    total = nodes + request.spare_nodes
    header = {
        "job-name": name,
        "output": log,
        "nodes": total,
        "ntasks-per-node": 1,
        "gres": request.gres,
        "cpus-per-task": site.cpus_per_task and site.cpus_per_task * request.gpus,
        "time": request.time_limit(site, nodes),
        "account": site.account,
        "partition": site.partition,
        "exclude": request.exclude,
        "signal": f"B:USR1@{warning}",
        "open-mode": "append",
    }
    own = {option.partition("=")[0].removeprefix("--") for option in site.sbatch}
    if any(name.startswith("gpus") for name in own):
        own.add("gres")  # GPUs asked for in the site's own way
    flags = [*site.sbatch, "--requeue", *(["--no-kill"] if request.spare_nodes or request.shrink else [])]
    lines = ["#!/bin/bash", *(f"#SBATCH {flag}" for flag in flags)]
    for key, value in header.items():
        if value is not None and not (key in ("gres", "cpus-per-task") and key in own):
            lines.append(f"#SBATCH --{key}={_quoted(value)}")
    lines += ["", "set -euo pipefail"]
    lines += [f"export CLAP_ROOT={shlex.quote(str(work_folder()))}", 'cd "$CLAP_ROOT"']
    if len(folders) > 1:
        lines += [f"folders=({shlex.join(map(str, folders))})", "folder=${folders[${SLURM_ARRAY_TASK_ID:-0}]}"]
    else:
        lines += [f"folder={shlex.quote(str(folders[0]))}"]
    options = {
        "site": shlex.quote(request.site),
        "config": '"$folder/run.json"',
        "folder": '"$folder"',
        "python": shlex.quote(sys.executable),
        "slots": request.gpus,
        "launcher": request.launcher,
        "micro_batch": micro_batch,
        "command": "clap_ds/train.py" if train else None,
        "grace": int(SAVING_SHARE * warning) if train else None,
        "spare_nodes": request.spare_nodes or None,
    }
    words = [f"--{key} {value}" for key, value in options.items() if value is not None]
    words += [f"--{key}" for key in ("shrink", "until_done") if getattr(request, key)]
    words += ["-- " + shlex.join(request.train_options)] if request.train_options else []
    lines += [" \\\n    ".join([f"exec bash {shlex.quote(str(BENCH))}", *words])]
    return "\n".join(lines) + "\n"


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
