"""Read and validate cluster profiles, which describe clusters.

    python launch/cluster_profile.py check mine     checks python, module lines, partition and account on this cluster

Needs only the standard library, to run before the environment is installed.
"""

import argparse
import json
import os
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, get_args, get_origin

if not __package__:  # run as a file
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from clap_ds.config.errors import UserError, did_you_mean, exit_code_of
from clap_ds.config.files import read_object
from clap_ds.config.paths import CHECKOUT, work_folder
from clap_ds.launch.check_cluster import show_check
from clap_ds.launch.launchers import LAUNCHERS
from clap_ds.launch.slurm import seconds_of

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


_EXPECTED: dict[Any, str] = {
    str: "a string", str | None: "a string or null", int: "a whole number", int | None: "a whole number or null",
    list[str]: "a list of strings", dict[str, str]: "an object of strings",
}  # fmt: skip


def load_site(name: str, launcher: str | None = None) -> Site:
    """Read a site by its name under `launch/clusters/` or by path. `launcher` overrides the site's. UserError has a line for
    each wrong field."""
    path = Path(name) if name.endswith(".json") or "/" in name else FOLDER / f"{name}.json"
    if not path.exists():
        known = sorted(file.stem for file in FOLDER.glob("*.json"))
        raise UserError(f"site {name!r}: {path}: no such file{did_you_mean(name, known)}")
    content = read_object(path)
    content.update({"launcher": launcher} if launcher else {})
    problems = [*_wrong_fields(content)] or [*_wrong_values(Site(**content))]
    if problems:
        raise UserError("\n".join(f"{path}: {problem}" for problem in problems))
    return Site(**content)


def _wrong_fields(content: dict[str, Any]) -> Iterator[str]:
    kinds: dict[str, Any] = {each.name: each.type for each in fields(Site)}
    for name, value in content.items():
        if name not in kinds:
            yield f"{name}: no such field{did_you_mean(name, kinds)}"
            continue
        kind, least = kinds[name], 0 if name == "requeues" else 1
        items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        is_small = value == "" or (type(value) is int and value < least)
        types = get_args(kind) if type(None) in get_args(kind) else (get_origin(kind) or kind,)
        if type(value) not in types or is_small or {*map(type, items)} - {str}:
            at_least = f", at least {least}" if "number" in _EXPECTED[kind] else ""
            yield f"{name}: expected {_EXPECTED[kind]}{at_least}, found {json.dumps(value)}"


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
            seconds_of(limit)
        except UserError as error:
            yield f"walltimes.{bound}: {error}"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="launch/cluster_profile.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=["check"], help="check the profile on this cluster")
    parser.add_argument("cluster", help="name under launch/clusters/, or path of a profile")
    arguments = parser.parse_args(argv)
    return exit_code_of(lambda: show_check(load_site(arguments.cluster)))


if __name__ == "__main__":
    sys.exit(main())
