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
    return former if former.exists() and not path.exists() else path


@dataclass(frozen=True)
class ClusterProfile:
    """One cluster. Null means the cluster's default."""

    account: str | None = None
    partition: str | None = None
    gpus_per_node: int | None = None  # ranks per node; null uses what `sinfo` shows
    cpus_per_task: int | None = None  # CPUs and OMP_NUM_THREADS of each rank
    sbatch: list[str] = field(default_factory=list)  # more options, such as `--exclusive`
    setup: list[str] = field(
        default_factory=list
    )  # shell lines at the start of a job, such as `module load CUDA/13`
    python: str | None = None
    """Interpreter of the ranks. Null: `.venv/bin/python` of the checkout or `python3`; without a
    checkout, this Python."""
    wrapper: list[str] = field(
        default_factory=list
    )  # command prefix of every rank, such as `apptainer exec …`
    srun: list[str] = field(
        default_factory=list
    )  # options of the step that starts ranks: `--cpu-bind=cores`
    environment: dict[str, str] = field(
        default_factory=dict
    )  # variables of every rank, such as NCCL settings
    launcher: str | None = None  # one of `LAUNCHERS`; null means slurm
    # folder of runs and jobs, shared by all nodes; relative to the checkout or working folder
    run_root: str = "runs"
    walltimes: dict[str, str] = field(
        default_factory=lambda: {"8": "00:15:00", "32": "00:25:00", "128": "00:30:00"}
    )
    """Time limits of a benchmark by maximum number of nodes. The last one also applies to more
    nodes."""
    requeues: int = 2  # maximum number of requeues after losing a host

    def walltime(self, num_nodes: int) -> str:
        """Return the time limit of a benchmark on this number of nodes."""
        bounds = sorted(self.walltimes, key=int)
        return self.walltimes[
            next((bound for bound in bounds if num_nodes <= int(bound)), bounds[-1])
        ]

    def container(self) -> str | None:
        """Return the word that puts the ranks into a container, if any."""
        return next(
            (
                word
                for word in (*self.wrapper, *self.srun)
                if word in self.wrapper or "container" in word
            ),
            None,
        )

    def interpreter(self) -> str:
        if self.python:
            return os.path.expandvars(self.python)
        if CHECKOUT is None:
            return sys.executable or "python3"
        local = CHECKOUT / ".venv" / "bin" / "python"
        return str(local) if local.exists() else "python3"

    def setup_lines(self) -> list[str]:
        """Return the shell lines that set up a job's environment."""
        return [
            *self.setup,
            *(f"export {name}={shlex.quote(value)}" for name, value in self.environment.items()),
        ]

    def root(self) -> Path:
        """Return `run_root` as an absolute path."""
        return (work_folder() / self.run_root).resolve()


T = TypeVar("T")


def typed(kind: type[T], content: dict[str, Any], where: Path) -> T:
    """Build a dataclass from the JSON of a file. UserError has a line for each field that doesn't
    exist or has another type."""
    hints = get_type_hints(kind)
    problems = []
    for name, value in content.items():
        if name not in hints:
            problems.append(f"{name}: no such field{did_you_mean(name, hints)}")
        elif not _fits(value, hints[name]):
            problems.append(
                f"{name}: expected {inspect.formatannotation(hints[name])}, found {json.dumps(value)}"
            )
    _reject(where, problems)
    return kind(**content)


def _fits(value: Any, hint: Any) -> bool:
    of = get_origin(hint) or hint
    inner = get_args(hint)
    if of is UnionType:
        return any(_fits(value, each) for each in inner)
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return hint is Any or (
        type(value) is of and value != "" and all(_fits(part, inner[-1]) for part in parts)
    )


def _reject(where: Path, problems: Iterable[str]) -> None:
    if lines := [f"{where}: {problem}" for problem in problems]:
        raise UserError("\n".join(lines))


def load_profile(name: str) -> ClusterProfile:
    """Read a profile by its name under `launch/clusters/` or by path. UserError has a line for each
    wrong field."""
    path = Path(name) if name.endswith(".json") or "/" in name else FOLDER / f"{name}.json"
    if not path.exists():
        known = sorted(file.stem for file in FOLDER.glob("*.json"))
        command = shlex.join(["cp", str(FOLDER / "generic.json"), str(path)])
        hint = f"{did_you_mean(name, known)}; make one with `{command}`"
        raise UserError(f"--cluster {name}: {path}: no such file{hint}")
    profile = typed(ClusterProfile, read_object(path), path)
    _reject(path, _wrong_values(profile))
    return profile


def add_cluster(parser: argparse.ArgumentParser) -> None:
    """Add the option that names a cluster profile."""
    cluster_help = "use this cluster profile: a name under launch/clusters/, or a path"
    parser.add_argument("--cluster", default="generic", metavar="NAME", help=cluster_help)


def _wrong_values(profile: ClusterProfile) -> Iterator[str]:
    if profile.launcher and profile.launcher not in LAUNCHERS:
        yield f"launcher: {profile.launcher!r}{did_you_mean(profile.launcher, LAUNCHERS)}"
    if profile.container() and profile.launcher != "torchrun":
        yield f"{profile.container()} needs launcher torchrun: DeepSpeed's launcher starts no rank in a container"
    for bound, limit in (profile.walltimes or {"": ""}).items():
        try:
            int(bound), slurm.seconds_of(limit)
        except (ValueError, UserError) as error:
            yield f"walltimes.{bound}: {error}"


def check_environment(profile: ClusterProfile, options: Iterable[str] = ()) -> str:
    """Run the profile's shell lines, and `clap_ds.check_runs` with its Python and these options, as
    a job does. UserError has a line for each problem. Return the versions and notes, or why Python
    wasn't run."""
    python = shlex.join([*profile.wrapper, profile.interpreter()])
    if profile.container() and not (profile.wrapper and shutil.which(profile.wrapper[0])):
        return f"{python}: not checked: it is in a container that is not available here"
    check = f"{python} -m clap_ds.check_runs {shlex.join(options)}"
    command = ["bash", "-c", "\n".join(["set -euo pipefail", *profile.setup_lines(), check])]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env=environment(),
        stdin=subprocess.DEVNULL,
        cwd=work_folder(),
    )
    answer = re.search(r"^clap-check (\{.*\})$", done.stdout, re.MULTILINE)
    if done.returncode or not answer:
        said = [line.removeprefix("error: ").strip() for line in done.stderr.splitlines()]
        failed = "" if answer else f"setup or {python} failed with exit code {done.returncode}: "
        raise UserError(failed + "\n".join(said))
    versions = json.loads(answer[1])
    shown = f"{python}: Python {versions['python']}, torch {versions['torch']}, deepspeed {versions['deepspeed']}"
    return "\n".join(
        [shown, *dict.fromkeys(re.findall(r"^note: clap\..*", done.stdout, re.MULTILINE))]
    )
