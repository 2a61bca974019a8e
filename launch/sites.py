"""A site file: what has to be known once about a cluster, checked as strictly as a run's settings.

    python launch/sites.py setup jupiter          shell lines that make the environment ready
    python launch/sites.py environment jupiter    NAME=value lines for every rank (DeepSpeed's DS_ENV_FILE)

Standard library only: it runs before the project's environment is there. Leaves job scripts to `launch/sweep.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from clap_ds.config.errors import UserError, did_you_mean, exit_code_of
from clap_ds.config.places import CHECKOUT
from clap_ds.launch.run_config import read_object

FOLDER = Path(__file__).resolve().parent / "clusters"
LAUNCHERS = ("pdsh", "slurm", "srun")

# What a rank on another host needs of the batch step's environment, where ssh starts with a bare one.
_CARRIED = re.compile(
    "PATH|LD_LIBRARY_PATH|LIBRARY_PATH|CPATH|CUDA_HOME|VIRTUAL_ENV|OMP_NUM_THREADS|TMPDIR|LANG|LC_ALL|DS_ACCELERATOR"
    "|(HF|TRANSFORMERS|TOKENIZERS|TORCH|TRITON|GLOO|FI|NCCL|UCX|SLURM_JOB)_.*|SLURM_(JOBID|NNODES|RESTART_COUNT)"
)
# Ends a shell word or is expanded, inside the double quotes DeepSpeed puts around a value, or by pdsh (%h, %n, %u).
_UNSAFE = re.compile(r'["$`\\\n!]|%[hnu]')


@dataclass(frozen=True)
class Site:
    """One cluster. Null means: nothing to say, the cluster's own default holds."""

    account: str | None = None
    partition: str | None = None
    gpus_per_node: int | None = None  # ranks per node; null takes what `sinfo` shows for the partition
    cpus_per_task: int | None = None
    sbatch: list[str] = field(default_factory=list)  # further options, such as `--exclusive`
    setup: list[str] = field(default_factory=list)  # shell lines at the start of a job, such as `module load CUDA/13`
    python: str | None = None  # of the ranks; null takes `.venv/bin/python` of the checkout, or else `python3`
    environment: dict[str, str] = field(default_factory=dict)  # of every rank: network interface and NCCL settings
    launcher: str | None = None
    """How ranks start: by DeepSpeed's `pdsh` or `slurm` or by SLURM's `srun`; null takes pdsh where there is one, else srun."""
    run_root: str = "runs"
    """Folder for runs and jobs that all nodes share; relative to the checkout or, without one, to where a job is submitted."""
    walltimes: dict[str, str] = field(default_factory=lambda: {"8": "00:15:00", "32": "00:25:00", "128": "00:30:00"})
    """Time limit of a job by the largest number of nodes it holds for; the last holds for more nodes, too."""
    warning_s: int = 60  # before the time limit, at which the run is signalled to stop

    def walltime(self, num_nodes: int) -> str:
        """Time limit of a job on this many nodes."""
        bounds = sorted(self.walltimes, key=int)
        return self.walltimes[next((bound for bound in bounds if num_nodes <= int(bound)), bounds[-1])]

    def chosen_launcher(self) -> str:
        return self.launcher or ("pdsh" if shutil.which("pdsh") else "srun")

    def interpreter(self) -> str:
        if self.python:
            return os.path.expandvars(self.python)
        local = CHECKOUT / ".venv" / "bin" / "python" if CHECKOUT else None
        return str(local) if local and local.exists() else "python3"


# What a field's type wants, in words, and whether a value is of it.
_KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "str": ("a string", lambda value: isinstance(value, str) and value != ""),
    "int": ("a whole number, at least 1", lambda value: type(value) is int and value >= 1),
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
    problems = _wrong_fields(content) or [*_wrong_values(Site(**content))]
    if problems:
        raise UserError("\n".join(f"{path}: {problem}" for problem in problems))
    return Site(**content)


def _wrong_fields(content: dict[str, Any]) -> list[str]:
    types = {each.name: str(each.type) for each in fields(Site)}
    problems = []
    for name, value in content.items():
        if name not in types:
            problems.append(f"{name}: no such field{did_you_mean(name, types)}")
            continue
        kind, _, optional = types[name].partition(" | ")
        expected, is_valid = _KINDS[kind]
        if not (is_valid(value) or (optional and value is None)):
            problems.append(f"{name}: expected {expected}{' or null' if optional else ''}, found {json.dumps(value)}")
    return problems


def _wrong_values(site: Site) -> Iterator[str]:
    if site.launcher and site.launcher not in LAUNCHERS:
        found = json.dumps(site.launcher) + did_you_mean(site.launcher, LAUNCHERS)
        yield f"launcher: expected one of {', '.join(LAUNCHERS)}, found {found}"
    for name, value in site.environment.items():
        if not re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", name):
            yield f"environment.{name}: expected a variable's name: letters, digits and _"
        elif _UNSAFE.search(value):
            expected = "no quotes, $, `, \\, !, line ends, %h, %n or %u"
            yield f"environment.{name}: expected {expected}, found {json.dumps(value)}"
    if not site.walltimes:
        yield "walltimes: expected at least one time limit"
    for bound, limit in site.walltimes.items():
        if not re.fullmatch("[1-9][0-9]*", bound):
            yield f"walltimes.{bound}: expected a number of nodes"
        elif not re.fullmatch(r"(\d+-)?\d+(:\d\d){0,2}", limit):
            yield f"walltimes.{bound}: expected a SLURM time such as 00:15:00, found {json.dumps(limit)}"
    for option in site.sbatch:
        if not re.fullmatch(r"--[a-z][a-z-]*(=\S+)?", option):
            yield f"sbatch: expected options such as --exclusive or --qos=debug, found {json.dumps(option)}"


def rank_environment(site: Site, inherited: Mapping[str, str]) -> dict[str, str]:
    """Variables for ranks on other hosts: what a rank needs of the batch step's own, and the site's over them."""
    carried = {name: value for name, value in inherited.items() if value and _CARRIED.fullmatch(name)}
    return {name: value for name, value in carried.items() if not _UNSAFE.search(value)} | site.environment


def format_environment(site: Site, inherited: Mapping[str, str]) -> str:
    """`rank_environment` as lines of NAME=value."""
    return "".join(f"{name}={value}\n" for name, value in rank_environment(site, inherited).items())


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="launch/sites.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=["setup", "environment", "check"])
    parser.add_argument("site", help="name under launch/clusters/, or a file")
    arguments = parser.parse_args(argv)
    return exit_code_of(lambda: _show(arguments.what, load_site(arguments.site)))


def _show(what: str, site: Site) -> None:
    if what == "setup":
        values = {f"export {name}": value for name, value in site.environment.items()}
        chosen = {"python": site.interpreter(), "launcher": site.chosen_launcher(), "run_root": site.run_root}
        values |= {f"site_{name}": value for name, value in chosen.items()}
        print(*site.setup, *(f"{name}={shlex.quote(value)}" for name, value in values.items()), sep="\n")
    elif what == "environment":
        print(format_environment(site, os.environ), end="")


if __name__ == "__main__":
    sys.exit(main())
