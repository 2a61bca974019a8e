"""Read and check cluster profiles, which describe clusters.

Needs only the standard library, to run before the environment is installed. The checks of a run
need packages that a login node's Python may lack, so they run with the ranks' Python.
"""

from __future__ import annotations

import argparse
import inspect
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

from clap_ds.launch import slurm
from clap_ds.launch.launchers import LAUNCHERS, environment
from clap_ds.utils.errors import UserError, did_you_mean
from clap_ds.utils.files import read_object
from clap_ds.utils.paths import CHECKOUT, work_folder

FOLDER = Path(__file__).resolve().parent / "clusters"
PROFILE = "cluster.json"
"""File in a job's folder with the job's cluster profile."""
SUBMISSION = "submission.json"
"""File with the submitted jobs of a folder."""
ATTEMPTS = "attempts.json"
"""File in a job's folder with its attempts and outcome."""
_FORMER = {PROFILE: "site.json", SUBMISSION: "jobs.json", ATTEMPTS: "job.json"}


def job_file(folder: Path, name: str) -> Path:
    """Return the path of one of these files, by its former name if only that exists."""
    path = folder / name
    former = folder / _FORMER[name]
    if former.exists() and not path.exists():
        return former
    return path


@dataclass(frozen=True)
class ClusterProfile:
    """One cluster. Null means the cluster's default. docs/cluster_profile.md lists the fields."""

    account: str | None = None
    partition: str | None = None
    # Ranks per node. Null: as many as `sinfo` shows GPUs.
    gpus_per_node: int | None = None
    # CPUs and OMP_NUM_THREADS of each rank.
    cpus_per_task: int | None = None
    # More options of sbatch, such as `--exclusive`.
    sbatch: list[str] = field(default_factory=list)
    # Shell lines at the start of a job, such as `module load CUDA/13`.
    setup: list[str] = field(default_factory=list)
    # Interpreter of the ranks. Null: `.venv/bin/python` of the checkout or `python3`; without a
    # checkout, this Python.
    python: str | None = None
    # Command prefix of every rank, such as `apptainer exec …`.
    wrapper: list[str] = field(default_factory=list)
    # Options of the step that starts the ranks, such as `--cpu-bind=cores`.
    srun: list[str] = field(default_factory=list)
    # Variables of every rank, such as NCCL settings.
    environment: dict[str, str] = field(default_factory=dict)
    # One of `LAUNCHERS`; null means slurm.
    launcher: str | None = None
    # Folder of runs and jobs, shared by all nodes; relative to the checkout or working folder.
    run_root: str = "runs"
    # Time limits of a benchmark by maximum number of nodes. The last one also applies to more.
    walltimes: dict[str, str] = field(
        default_factory=lambda: {"8": "00:15:00", "32": "00:25:00", "128": "00:30:00"}
    )
    # Maximum number of requeues after losing a host.
    requeues: int = 2

    def walltime(self, num_nodes: int) -> str:
        """Return the time limit of a benchmark on this number of nodes."""
        bounds = sorted(self.walltimes, key=int)
        large_enough = (bound for bound in bounds if num_nodes <= int(bound))
        return self.walltimes[next(large_enough, bounds[-1])]

    def container(self) -> str | None:
        """Return the word that puts the ranks into a container, if any."""
        if self.wrapper:
            return self.wrapper[0]
        return next((option for option in self.srun if "container" in option), None)

    def interpreter(self) -> str:
        """Return the ranks' Python."""
        if self.python:
            return os.path.expandvars(self.python)
        if CHECKOUT is None:
            return sys.executable or "python3"
        local = CHECKOUT / ".venv" / "bin" / "python"
        return str(local) if local.exists() else "python3"

    def setup_lines(self) -> list[str]:
        """Return the shell lines that set up a job's environment."""
        exports = [
            f"export {name}={shlex.quote(value)}" for name, value in self.environment.items()
        ]
        return [*self.setup, *exports]

    def root(self) -> Path:
        """Return `run_root` as an absolute path."""
        return (work_folder() / self.run_root).resolve()


T = TypeVar("T")


def build_checked(record_type: type[T], content: dict[str, Any], path: Path) -> T:
    """Build a dataclass from the JSON of a file. UserError has a line for each field that doesn't
    exist or has another type."""
    hints = get_type_hints(record_type)
    problems = []
    for name, value in content.items():
        if name not in hints:
            problems.append(f"{name}: no such field{did_you_mean(name, hints)}")
        elif not _has_type(value, hints[name]):
            expected = inspect.formatannotation(hints[name])
            problems.append(f"{name}: expected {expected}, found {json.dumps(value)}")
    _reject(path, problems)
    return record_type(**content)


def _has_type(value: Any, hint: Any) -> bool:
    """Return whether a value of a JSON has an annotated type. Empty text has none."""
    if hint is Any:
        return True
    if isinstance(hint, UnionType):
        return any(_has_type(value, option) for option in get_args(hint))
    if type(value) is not (get_origin(hint) or hint) or value == "":
        return False
    if isinstance(value, dict):
        value = [*value.values()]
    if isinstance(value, list):
        part_hint = get_args(hint)[-1]
        return all(_has_type(part, part_hint) for part in value)
    return True


def _reject(path: Path, problems: Iterable[str]) -> None:
    lines = [f"{path}: {problem}" for problem in problems]
    if lines:
        raise UserError("\n".join(lines))


def load_profile(name: str) -> ClusterProfile:
    """Read a profile by its name under `launch/clusters/` or by path. UserError has a line for each
    wrong field."""
    is_path = name.endswith(".json") or "/" in name
    path = Path(name) if is_path else FOLDER / f"{name}.json"
    if not path.exists():
        packaged = sorted(file.stem for file in FOLDER.glob("*.json"))
        command = shlex.join(["cp", str(FOLDER / "generic.json"), str(path)])
        hint = f"{did_you_mean(name, packaged)}; make one with `{command}`"
        raise UserError(f"--cluster {name}: {path}: no such file{hint}")
    profile = build_checked(ClusterProfile, read_object(path), path)
    _reject(path, _find_wrong_values(profile))
    return profile


def add_cluster(parser: argparse.ArgumentParser) -> None:
    """Add the option that names a cluster profile."""
    cluster_help = "use this cluster profile: a name under launch/clusters/, or a path"
    parser.add_argument("--cluster", default="generic", metavar="NAME", help=cluster_help)


def _find_wrong_values(profile: ClusterProfile) -> Iterator[str]:
    container = profile.container()
    if profile.launcher and profile.launcher not in LAUNCHERS:
        yield f"launcher: {profile.launcher!r}{did_you_mean(profile.launcher, LAUNCHERS)}"
    if container and profile.launcher != "torchrun":
        yield (
            f"{container} needs launcher torchrun:"
            " DeepSpeed's launcher starts no rank in a container"
        )
    if not profile.walltimes:
        yield "walltimes: expected at least one time limit"
    for bound, limit in profile.walltimes.items():
        try:
            int(bound)
            slurm.parse_seconds(limit)
        except (ValueError, UserError) as error:
            yield f"walltimes.{bound}: {error}"


def check_environment(profile: ClusterProfile, options: Iterable[str] = ()) -> str:
    """Check the ranks' Python and the runs as a job would: run the profile's shell lines, then
    `clap_ds.check_runs` with these options.

    Returns:
        The versions and notes, or why Python wasn't run.

    Raises:
        UserError: has a line for each problem.
    """
    python = shlex.join([*profile.wrapper, profile.interpreter()])
    if profile.container():
        is_startable_here = profile.wrapper and shutil.which(profile.wrapper[0])
        if not is_startable_here:
            return f"{python}: not checked: it is in a container that is not available here"
    check = f"{python} -m clap_ds.check_runs {shlex.join(options)}"
    done = subprocess.run(
        ["bash", "-c", "\n".join(["set -euo pipefail", *profile.setup_lines(), check])],
        capture_output=True,
        text=True,
        env=environment(),
        stdin=subprocess.DEVNULL,
        cwd=work_folder(),
    )
    report = re.search(r"^clap-check (\{.*\})$", done.stdout, re.MULTILINE)
    if done.returncode or not report:
        problems = [line.removeprefix("error: ").strip() for line in done.stderr.splitlines()]
        if not report:
            failure = f"setup or {python} failed with exit code {done.returncode}: "
            raise UserError(failure + "\n".join(problems))
        raise UserError("\n".join(problems))
    versions = json.loads(report[1])
    torch_versions = f"torch {versions['torch']}, deepspeed {versions['deepspeed']}"
    notes = dict.fromkeys(re.findall(r"^note: clap\..*", done.stdout, re.MULTILINE))
    return "\n".join([f"{python}: Python {versions['python']}, {torch_versions}", *notes])
