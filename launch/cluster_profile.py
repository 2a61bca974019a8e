"""Read and check cluster profiles, which describe clusters.

    python launch/cluster_profile.py check mine     checks python, module lines, partition and account on this cluster

Needs only the standard library, to run before the environment is installed. The checks of a run need packages that a login
node's Python may lack, so they run with the ranks' Python.
"""

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

if not __package__:  # run as a file
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from clap_ds.config.errors import UserError, did_you_mean, exit_code_of
from clap_ds.config.files import read_object
from clap_ds.config.paths import CHECKOUT, PACKAGE, work_folder
from clap_ds.launch import slurm
from clap_ds.launch.launchers import LAUNCHERS

FOLDER = Path(__file__).resolve().parent / "clusters"


@dataclass(frozen=True)
class Site:
    """One cluster. Null means the cluster's default."""

    account: str | None = None
    partition: str | None = None
    gpus_per_node: int | None = None  # ranks per node; null uses what `sinfo` shows
    cpus_per_task: int | None = None  # CPUs and OMP_NUM_THREADS of each rank
    sbatch: list[str] = field(default_factory=list)  # more options, such as `--exclusive`
    setup: list[str] = field(default_factory=list)  # shell lines at the start of a job, such as `module load CUDA/13`
    python: str | None = None
    """Interpreter of the ranks. Null: `.venv/bin/python` of the checkout or `python3`; without a checkout, this Python."""
    wrapper: list[str] = field(default_factory=list)  # command prefix of every rank, such as `apptainer exec …`
    srun: list[str] = field(default_factory=list)  # options of the step that starts ranks: `--cpu-bind=cores`
    environment: dict[str, str] = field(default_factory=dict)  # variables of every rank, such as NCCL settings
    launcher: str | None = None  # one of `LAUNCHERS`; null means slurm
    run_root: str = "runs"  # folder of runs and jobs, shared by all nodes; relative to the checkout or working folder
    walltimes: dict[str, str] = field(default_factory=lambda: {"8": "00:15:00", "32": "00:25:00", "128": "00:30:00"})
    """Time limits of a benchmark by maximum number of nodes. The last one also applies to more nodes."""
    requeues: int = 2  # maximum number of requeues after losing a host

    def walltime(self, num_nodes: int) -> str:
        """Return the time limit of a benchmark on this number of nodes."""
        bounds = sorted(self.walltimes, key=int)
        return self.walltimes[next((bound for bound in bounds if num_nodes <= int(bound)), bounds[-1])]

    def container(self) -> str | None:
        """Return the word that puts the ranks into a container, if any."""
        return next((word for word in (*self.wrapper, *self.srun) if word in self.wrapper or "container" in word), None)

    def interpreter(self) -> str:
        if self.python:
            return os.path.expandvars(self.python)
        if CHECKOUT is None:
            return sys.executable or "python3"
        local = CHECKOUT / ".venv" / "bin" / "python"
        return str(local) if local.exists() else "python3"

    def setup_lines(self) -> list[str]:
        """Return the shell lines that set up a job's environment."""
        return [*self.setup, *(f"export {name}={shlex.quote(value)}" for name, value in self.environment.items())]

    def root(self) -> Path:
        """Return `run_root` as an absolute path."""
        return (work_folder() / self.run_root).resolve()


T = TypeVar("T")
_EXPECTED = {str: "a string", int: "a whole number", list: "a list of strings", dict: "an object of strings"}
_FROM_ZERO = ("requeues", "spare_nodes")  # other numbers are at least 1


def typed(kind: type[T], content: dict[str, Any], where: Path) -> T:
    """Build a dataclass from the JSON of a file. UserError has a line for each field that doesn't exist or has another type."""
    hints, problems = get_type_hints(kind), []
    for name, value in content.items():
        if name not in hints:
            problems.append(f"{name}: no such field{did_you_mean(name, hints)}")
            continue
        hint, *null = get_args(hints[name]) if isinstance(hints[name], UnionType) else [hints[name]]
        of, low = get_origin(hint) or hint, int(name not in _FROM_ZERO)
        items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        texts = Any in get_args(hint) or all(isinstance(each, str) for each in items)
        is_right = type(value) is of and texts and value != "" and not (of is int and value < low)
        if not is_right and not (null and value is None):
            words = _EXPECTED.get(of, "true or false") + " or null" * bool(null)
            words += f", at least {low}" * (of is int)
            problems.append(f"{name}: expected {words}, found {json.dumps(value)}")
    _reject(where, problems)
    return kind(**content)


def _reject(where: Path, problems: Iterable[str]) -> None:
    if lines := [f"{where}: {problem}" for problem in problems]:
        raise UserError("\n".join(lines))


def load_site(name: str, launcher: str | None = None) -> Site:
    """Read a site by its name under `launch/clusters/` or by path. `launcher` overrides the site's. UserError has a line for
    each wrong field."""
    path = Path(name) if name.endswith(".json") or "/" in name else FOLDER / f"{name}.json"
    if not path.exists():
        known = sorted(file.stem for file in FOLDER.glob("*.json"))
        raise UserError(f"site {name!r}: {path}: no such file{did_you_mean(name, known)}")
    content = read_object(path)
    content.update({"launcher": launcher} if launcher else {})
    site = typed(Site, content, path)
    _reject(path, _wrong_values(site))
    return site


def _wrong_values(site: Site) -> Iterator[str]:
    if site.launcher and site.launcher not in LAUNCHERS:
        found = json.dumps(site.launcher) + did_you_mean(site.launcher, LAUNCHERS)
        yield f"launcher: expected one of {', '.join(LAUNCHERS)}, found {found}"
    if site.container() and site.launcher != "torchrun":
        yield f"{site.container()} needs launcher torchrun: DeepSpeed's launcher starts no rank in a container"
    if not site.walltimes or not all(map(str.isdecimal, site.walltimes)):
        yield f"walltimes: expected time limits by number of nodes, found {json.dumps(site.walltimes)}"
    for bound, limit in site.walltimes.items():
        try:
            slurm.seconds_of(limit)
        except UserError as error:
            yield f"walltimes.{bound}: {error}"


def show_check(site: Site) -> None:
    """Check what a cluster profile allows without a job, and print it. UserError if a check fails."""
    print(f"python  {check_environment(site)}")
    options = {"account": site.account, "partition": site.partition, "time": site.walltime(1)}
    lines = [*site.sbatch, *(f"--{name}={value}" for name, value in options.items() if value)]
    note = slurm.check_script("\n".join(["#!/bin/bash", *(f"#SBATCH {line}" for line in lines), "true\n"]))
    print(f"sbatch  {note or 'accepts the options'}")


def check_environment(site: Site, files: Iterable[str] = (), *, train: bool = False) -> str:
    """Run the site's shell lines and check runs' JSONs with its Python; UserError has a line for each problem.
    Return the versions, or why Python wasn't run."""
    python = shlex.join([*site.wrapper, site.interpreter()])
    if site.container() and not (site.wrapper and shutil.which(site.wrapper[0])):
        return f"{python}: not checked: it is in a container that is not available here"
    check = f"{python} -m clap_ds.check_runs {shlex.join([*['--train'] * train, *files])}"
    path = os.pathsep.join(filter(None, [str(PACKAGE.parent), os.environ.get("PYTHONPATH")]))
    command = ["bash", "-c", "\n".join(["set -euo pipefail", *site.setup_lines(), "echo clap-ready", check])]
    kept = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, capture_output=True, text=True, env=kept, stdin=subprocess.DEVNULL)
    said = [line.removeprefix("error: ").strip() for line in done.stderr.splitlines()]
    answer = re.search(r"^clap-check (\{.*\})$", done.stdout, re.MULTILINE)
    if not answer:
        reason = said[-1] if said else f"exit code {done.returncode}"
        is_ready = "clap-ready\n" in done.stdout
        raise UserError(f"python: {python} can't run this package: {reason}" if is_ready else f"setup: {reason}")
    if done.returncode:
        raise UserError("\n".join(said))
    versions = json.loads(answer[1])
    return f"{python}: Python {versions['python']}, torch {versions['torch']}, deepspeed {versions['deepspeed']}"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="launch/cluster_profile.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=["check"], help="check the profile on this cluster")
    parser.add_argument("cluster", help="name under launch/clusters/, or path of a profile")
    arguments = parser.parse_args(argv)
    return exit_code_of(lambda: show_check(load_site(arguments.cluster)))


if __name__ == "__main__":
    sys.exit(main())
