"""A site file: what has to be known once about a cluster, checked as strictly as a run's settings.

    python launch/sites.py check mine     tries what the file says on this cluster: python, module lines, partition, account
    python launch/sites.py setup mine     shell lines that make the environment ready, inside a job

Standard library only: it runs before the project's environment is there. Leaves trying to `site_check.py`, and job scripts
to `batch_script.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from clap_ds.config.errors import UserError, did_you_mean, exit_code_of
from clap_ds.config.files import read_object
from clap_ds.config.places import CHECKOUT, work_folder
from clap_ds.launch import slurm
from clap_ds.launch.site_check import check_site, problems_of_allocation

FOLDER = Path(__file__).resolve().parent / "clusters"
LAUNCHERS = ("ssh", "slurm", "srun", "torchrun")
OWN_SBATCH_OPTIONS = {
    **{"--account": "account", "--partition": "partition", "--time": "walltimes", "--signal": "warning_s"},
    **dict.fromkeys(("--array", "--job-name", "--nodes", "--ntasks-per-node", "--open-mode", "--output"), ""),
}
"""Options that the site's other fields, or the commands that write job scripts, decide."""


def launcher_name(text: str) -> str:
    """One of `LAUNCHERS`, by its name or by the one DeepSpeed has for it; anything else as it is."""
    return "ssh" if text == "pdsh" else text


@dataclass(frozen=True)
class Site:
    """One cluster. Null means: nothing to say, the cluster's own default holds."""

    account: str | None = None
    partition: str | None = None
    gpus_per_node: int | None = (
        None  # ranks per node; null takes that of a `--gres` in `sbatch`, or else what `sinfo` shows
    )
    cpus_per_task: int | None = None  # of each rank, and its OMP_NUM_THREADS
    sbatch: list[str] = field(default_factory=list)  # further options, such as `--exclusive`
    setup: list[str] = field(default_factory=list)  # shell lines at the start of a job, such as `module load CUDA/13`
    python: str | None = None
    """Of the ranks; null takes `.venv/bin/python` of the checkout or else `python3`, and without a checkout the Python that
    has this package."""
    wrapper: list[str] = field(
        default_factory=list
    )  # words in front of every rank's python, such as `apptainer exec …`
    srun: list[str] = field(default_factory=list)  # options of the step that reaches the hosts: `--container-image=…`
    environment: dict[str, str] = field(default_factory=dict)  # of every rank: network interface and NCCL settings
    not_passed: list[str] = field(default_factory=list)  # variables that ranks don't get: names or patterns (fnmatch)
    launcher: str | None = None
    """How hosts are reached and ranks started, one of `LAUNCHERS`; null takes slurm where srun is installed, else ssh."""
    run_root: str = "runs"
    """Folder for runs and jobs that all nodes share; relative to the checkout or, without one, to where a job is submitted."""
    walltimes: dict[str, str] = field(default_factory=lambda: {"8": "00:15:00", "32": "00:25:00", "128": "00:30:00"})
    """Time limit of a benchmark by the largest number of nodes it holds for; the last holds for more nodes, too."""
    warning_s: int = 60  # before a benchmark's time limit, at which it is signalled to stop; training has 300
    start_limit_s: int | None = None  # that hosts and ranks have to come up; null: 120, and 1 more for every 4 hosts
    lost_after_s: int = field(default=60, metadata={"least": 60})  # of silence after which a host counts as lost
    requeues: int = field(default=2, metadata={"least": 0})  # how often a job queues itself again after losing a host

    def own_gpus(self) -> tuple[str, int] | None:
        """The option of `sbatch` that says how many GPUs a node has for a job, and that number; None where none does."""
        asked = [(option, count) for option in self.sbatch if (count := slurm.gpus_asked_for(option))]
        return asked[-1] if asked else None

    def ranks(self) -> int | None:
        """Ranks per node; None where the site leaves that to what `sinfo` shows."""
        own = self.own_gpus()
        return own[1] if own else self.gpus_per_node

    def walltime(self, num_nodes: int) -> str:
        """Time limit of a job on this many nodes."""
        bounds = sorted(self.walltimes, key=int)
        return self.walltimes[next((bound for bound in bounds if num_nodes <= int(bound)), bounds[-1])]

    def warning(self, train: bool) -> int:
        """Seconds before its time limit at which a run is told to stop: training has to save."""
        return 300 if train else self.warning_s

    def chosen_launcher(self) -> str:
        return self.launcher or ("slurm" if shutil.which("srun") else "ssh")

    def step(self, launcher: str) -> list[str] | None:
        """Options of the srun step by which a launcher reaches the hosts; None where that is ssh."""
        in_job = "SLURM_JOB_ID" in os.environ and shutil.which("srun") is not None
        return self.srun if launcher in ("srun", "slurm") or (launcher == "torchrun" and in_job) else None

    def interpreter(self) -> str:
        if self.python:
            return os.path.expandvars(self.python)
        if CHECKOUT is None:
            return sys.executable or "python3"
        local = CHECKOUT / ".venv" / "bin" / "python"
        return str(local) if local.exists() else "python3"

    def setup_lines(self) -> list[str]:
        """Shell lines that make a job's environment ready: the site's own, then its variables."""
        return [*self.setup, *(f"export {name}={shlex.quote(value)}" for name, value in self.environment.items())]

    def root(self) -> Path:
        """`run_root`, as a path that holds everywhere."""
        return (work_folder() / self.run_root).resolve()


# What a field's type wants, in words, and whether a value is of it.
_KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "str": ("a string", lambda value: isinstance(value, str) and value != ""),
    "int": ("a whole number", lambda value: type(value) is int),
    "list[str]": ("a list of strings", lambda value: isinstance(value, list) and {*map(type, value)} <= {str}),
    "dict[str, str]": ("an object of strings", lambda v: isinstance(v, dict) and {*map(type, v.values())} <= {str}),
}


def load_site(name: str) -> Site:
    """Read a site by its name under `launch/clusters/`, or by a file's path; a UserError names every wrong field."""
    path = Path(name) if name.endswith(".json") or "/" in name else FOLDER / f"{name}.json"
    if not path.exists():
        known = sorted(file.stem for file in FOLDER.glob("*.json"))
        raise UserError(f"site {name!r}: {path}: no such file{did_you_mean(name, known)}")
    content = read_object(path)
    problems = _wrong_fields(content)
    if not problems:
        site = Site(**content)
        site = replace(site, launcher=site.launcher and launcher_name(site.launcher))
        problems = [*_wrong_values(site)]
    if problems:
        raise UserError("\n".join(f"{path}: {problem}" for problem in problems))
    return site


def _wrong_fields(content: dict[str, Any]) -> list[str]:
    known = {each.name: each for each in fields(Site)}
    problems = []
    for name, value in content.items():
        if name not in known:
            problems.append(f"{name}: no such field{did_you_mean(name, known)}")
            continue
        kind, _, optional = str(known[name].type).partition(" | ")
        expected, is_valid = _KINDS[kind]
        least = known[name].metadata.get("least", 1) if kind == "int" else None
        expected += "" if least is None else f", at least {least}"
        if value is None and optional:
            continue
        if not is_valid(value) or (least is not None and value < least):
            problems.append(f"{name}: expected {expected}{' or null' if optional else ''}, found {json.dumps(value)}")
    return problems


def _wrong_values(site: Site) -> Iterator[str]:
    if site.launcher and site.launcher not in LAUNCHERS:
        found = json.dumps(site.launcher) + did_you_mean(site.launcher, LAUNCHERS)
        yield f"launcher: expected one of {', '.join(LAUNCHERS)}, found {found}"
    for name, value in site.environment.items():
        if not re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", name):
            yield f"environment.{name}: expected a variable's name: letters, digits and _"
        elif "\0" in value:
            yield f"environment.{name}: expected no zero byte, found {json.dumps(value)}"
    if not site.walltimes:
        yield "walltimes: expected at least one time limit"
    for bound, limit in site.walltimes.items():
        if not re.fullmatch("[1-9][0-9]*", bound):
            yield f"walltimes.{bound}: expected a number of nodes"
        elif not re.fullmatch(r"(\d+-)?\d+(:\d\d){0,2}", limit):
            yield f"walltimes.{bound}: expected a SLURM time such as 00:15:00, found {json.dumps(limit)}"
    for option in site.sbatch:
        name = option.partition("=")[0]
        if not re.fullmatch(r"--[a-z][a-z-]*(=\S+)?", option):
            yield f"sbatch: expected options such as --exclusive or --qos=debug, found {json.dumps(option)}"
        elif name in OWN_SBATCH_OPTIONS:
            place = OWN_SBATCH_OPTIONS[name]
            yield f"sbatch: {name} is decided {f'by the field {place}' if place else 'when a job is submitted'}"
    own = site.own_gpus()
    if own and site.gpus_per_node not in (None, own[1]):
        yield f"gpus_per_node: {site.gpus_per_node}, but sbatch has {own[0]}: both are the number of GPUs of each node"
    for name in ("wrapper", "srun", "not_passed"):
        if "" in getattr(site, name):
            yield f"{name}: expected no empty string"
    for option in site.srun:
        if not option.startswith("-"):
            yield f"srun: expected options such as --mpi=none, found {json.dumps(option)}"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="launch/sites.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=["setup", "check"])
    parser.add_argument("site", help="name under launch/clusters/, or a file")
    arguments = parser.parse_args(argv)
    return exit_code_of(lambda: _show(arguments.what, load_site(arguments.site)))


def _show(what: str, site: Site) -> None:
    if what == "check":
        found = check_site(site)
        print(found.format())
        found.refuse()
        return
    if problems := problems_of_allocation(site, os.environ):
        raise UserError("\n".join(problems))
    if site.sbatch and "SLURM_JOB_ID" in os.environ and "CLAP_ROOT" not in os.environ:  # which written scripts set
        options = " ".join(site.sbatch)
        note = f"this job was submitted by hand: it has the site's {options} only if sbatch was given that"
        print(f"note: {note}; launch/submit.py does it by itself", file=sys.stderr)
    print(*site.setup_lines(), f"site_run_root={shlex.quote(site.run_root)}", sep="\n")
    print(f"site_cpus_per_task={site.cpus_per_task or ''}")


if __name__ == "__main__":
    sys.exit(main())
