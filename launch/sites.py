"""A site file: what has to be known once about a cluster, checked as strictly as a run's settings.

    python launch/sites.py check mine     tries what the file says on this cluster: python, module lines, partition, account

Standard library only: it runs before the project's environment is there. Leaves trying to `site_check.py`, and job scripts
to `batch_script.py`.
"""

import argparse
import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

if not __package__:  # run as a file, by any Python
    if sys.version_info < (3, 11):  # noqa: UP036
        sys.exit(f"error: launch/sites.py needs Python 3.11 or newer; this is {sys.version.split()[0]}")
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from clap_ds.config.errors import UserError, did_you_mean, exit_code_of
from clap_ds.config.files import read_object
from clap_ds.config.places import CHECKOUT, work_folder
from clap_ds.launch.launchers import LAUNCHERS
from clap_ds.launch.site_check import show_check
from clap_ds.launch.slurm import seconds_of

FOLDER = Path(__file__).resolve().parent / "clusters"


@dataclass(frozen=True)
class Site:
    """One cluster. Null means: nothing to say, the cluster's own default holds."""

    account: str | None = None
    partition: str | None = None
    gpus_per_node: int | None = None  # ranks per node; null takes what `sinfo` shows
    cpus_per_task: int | None = None  # of each rank, and its OMP_NUM_THREADS
    sbatch: list[str] = field(default_factory=list)  # further options, such as `--exclusive`
    setup: list[str] = field(default_factory=list)  # shell lines at the start of a job, such as `module load CUDA/13`
    python: str | None = None
    """Of the ranks; null takes `.venv/bin/python` of the checkout or else `python3`, and without a checkout the Python that
    has this package."""
    wrapper: list[str] = field(default_factory=list)  # words before every rank's python, such as `apptainer exec …`
    srun: list[str] = field(default_factory=list)  # options of the step that starts ranks: `--container-image=…`
    environment: dict[str, str] = field(default_factory=dict)  # of every rank: network interface and NCCL settings
    launcher: str | None = None
    """What starts the ranks, one of `LAUNCHERS`; null takes slurm where srun is installed, else pdsh."""
    cpu_bind: str | None = None  # srun's `--cpu-bind`; under pdsh any value has DeepSpeed bind ranks to cores
    run_root: str = "runs"
    """Folder for runs and jobs that all nodes share; relative to the checkout or, without one, to where a job is submitted."""
    walltimes: dict[str, str] = field(default_factory=lambda: {"8": "00:15:00", "32": "00:25:00", "128": "00:30:00"})
    """Time limit of a benchmark by the largest number of nodes it holds for; the last holds for more nodes, too."""
    warning_s: int = 60  # before a benchmark's time limit, at which it is signalled to stop; training has 300
    requeues: int = field(default=2, metadata={"least": 0})  # how often a job queues itself again after losing a host

    def walltime(self, num_nodes: int) -> str:
        """Time limit of a job on this many nodes."""
        bounds = sorted(self.walltimes, key=int)
        return self.walltimes[next((bound for bound in bounds if num_nodes <= int(bound)), bounds[-1])]

    def container(self) -> str | None:
        """What puts the ranks into a container of their own, with another Python than the job's; None where nothing does."""
        return next((word for word in (*self.wrapper, *self.srun) if word in self.wrapper or "container" in word), None)

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
_KINDS: dict[Any, tuple[str, Callable[[Any], bool]]] = {
    str: ("a string", lambda value: isinstance(value, str) and value != ""),
    int: ("a whole number", lambda value: type(value) is int),
    list[str]: ("a list of strings", lambda value: isinstance(value, list) and {*map(type, value)} <= {str}),
    dict[str, str]: ("an object of strings", lambda v: isinstance(v, dict) and {*map(type, v.values())} <= {str}),
}


def load_site(name: str, launcher: str | None = None) -> Site:
    """Read a site by its name under `launch/clusters/`, or by a file's path, with another launcher if one is given.

    Raises:
        UserError: there is no such site, or some of its fields are wrong: a line each.
    """
    path = Path(name) if name.endswith(".json") or "/" in name else FOLDER / f"{name}.json"
    if not path.exists():
        known = sorted(file.stem for file in FOLDER.glob("*.json"))
        raise UserError(f"site {name!r}: {path}: no such file{did_you_mean(name, known)}")
    content = read_object(path)
    content.update({"launcher": launcher} if launcher else {})
    problems = _wrong_fields(content) or [*_wrong_values(Site(**content))]
    if problems:
        raise UserError("\n".join(f"{path}: {problem}" for problem in problems))
    return Site(**content)


def _wrong_fields(content: dict[str, Any]) -> list[str]:
    known = {each.name: each for each in fields(Site)}
    problems = []
    for name, value in content.items():
        if name not in known:
            problems.append(f"{name}: no such field{did_you_mean(name, known)}")
            continue
        kind: Any = known[name].type
        optional = "" if kind in _KINDS else " or null"
        kind = kind if kind in _KINDS else kind.__args__[0]
        expected, is_valid = _KINDS[kind]
        least = known[name].metadata.get("least", 1) if kind is int else None
        expected += "" if least is None else f", at least {least}"
        if value is None and optional:
            continue
        if not is_valid(value) or (least is not None and value < least):
            problems.append(f"{name}: expected {expected}{optional}, found {json.dumps(value)}")
    return problems


def _wrong_values(site: Site) -> Iterator[str]:
    if site.launcher and site.launcher not in LAUNCHERS:
        found = json.dumps(site.launcher) + did_you_mean(site.launcher, LAUNCHERS)
        yield f"launcher: expected one of {', '.join(LAUNCHERS)}, found {found}"
    container = site.container()
    if container and site.launcher != "torchrun":
        place = "wrapper" if site.wrapper else "srun"
        yield f"{place}: {container} needs launcher torchrun: DeepSpeed's launcher starts no rank in a container"
    for name in site.environment:
        if not re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", name):
            yield f"environment.{name}: expected a variable's name: letters, digits and _"
    if not site.walltimes:
        yield "walltimes: expected at least one time limit"
    for bound, limit in site.walltimes.items():
        if not re.fullmatch("[1-9][0-9]*", bound):
            yield f"walltimes.{bound}: expected a number of nodes"
        try:
            seconds_of(limit)
        except UserError as error:
            yield f"walltimes.{bound}: {error}"
    for name in ("sbatch", "srun"):
        for option in getattr(site, name):
            if not re.match("--[a-z]|-[A-Za-z]", option) or "\n" in option:
                yield f"{name}: expected options such as --exclusive or --mpi=none, found {json.dumps(option)}"
    if "" in site.wrapper:
        yield "wrapper: expected no empty string"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="launch/sites.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=["check"])
    parser.add_argument("site", help="name under launch/clusters/, or a file")
    arguments = parser.parse_args(argv)
    return exit_code_of(lambda: show_check(load_site(arguments.site)))


if __name__ == "__main__":
    sys.exit(main())
