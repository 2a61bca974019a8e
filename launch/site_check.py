"""Tries what a site file says on the cluster at hand, and runs' JSONs on the Python of the ranks, before anything is queued.

The run's own checks need packages that a login node's Python may lack, so they run in the environment that a job will have:
the site's shell lines first, then its Python (`clap_ds.check_runs`). Partition, account, nodes and time are sbatch's to judge.
What can't be tried here is said, not refused.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from clap_ds.config.errors import UserError
from clap_ds.config.places import PACKAGE
from clap_ds.launch import slurm

if TYPE_CHECKING:
    from clap_ds.launch.sites import Site

TRIAL_S = 300  # for module lines and a Python on a slow file system
_NO_MODULE = re.compile(r"Unable to locate a modulefile|module\(s\) are unknown|cannot be loaded as requested")
_NO_SUCH_NODES = "node configuration is not available"


@dataclass
class Found:
    """What was tried: what is there, what would break a job, and what couldn't be tried here."""

    facts: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)

    def format(self) -> str:
        width = max(map(len, self.facts), default=0)
        lines = [f"{name:{width}}  {text}" for name, text in self.facts.items()]
        return "\n".join([*lines, *(f"not checked: {text}" for text in self.unchecked)])

    def refuse(self) -> None:
        """Raise a UserError with all problems, if there are any."""
        if self.problems:
            raise UserError("\n".join(self.problems))


def show_check(site: Site) -> None:
    """Print what can be tried of a site without a job; a UserError with what is wrong."""
    found = Found()
    check_environment(site, found)
    options = {"account": site.account, "partition": site.partition, "time": site.walltime(1)}
    lines = [*site.sbatch, *(f"--{name}={value}" for name, value in options.items() if value)]
    check_scripts(["\n".join(["#!/bin/bash", *(f"#SBATCH {line}" for line in lines), "true\n"])], found)
    found.facts["launcher"] = site.chosen_launcher() + ("" if site.launcher else " (the site names none)")
    root = site.root()
    there = next(path for path in (root, *root.parents) if path.exists())
    if os.access(there, os.W_OK | os.X_OK) and there.is_dir():
        found.facts["run_root"] = f"{root}: writable"
    else:
        found.problems.append(f"run_root: {there} isn't a folder that can be written to")
    print(found.format())
    found.refuse()


def check_environment(site: Site, found: Found, files: Iterable[Path] = (), *, train: bool = False) -> str:
    """Run the site's shell lines, then its Python on these runs' JSONs; what that says is wrong with them, if anything."""
    words = ["-m", "clap_ds.check_runs", *(["--train"] if train else []), *map(str, files)]
    program, container = (site.wrapper or [site.interpreter()])[0], site.container()
    lines = ["set -euo pipefail"]
    for number, line in enumerate(site.setup_lines(), start=1):
        lines += [f"echo clap-line {number}", line]
    lines += ["echo clap-ready", f"command -v {shlex.quote(program)} > /dev/null || {{ echo clap-missing; exit 0; }}"]
    # A container that srun makes isn't there yet.
    outside = container is not None and not site.wrapper
    lines += ["true" if outside else f"exec {shlex.join([*site.wrapper, site.interpreter(), *words])}"]
    result = _run(["bash", "-c", "\n".join(lines)])
    if not _judge_setup(site, result, found):
        return ""
    if container and (outside or "clap-missing" in result.stdout):
        found.unchecked.append(f"python {site.interpreter()}: it is in a container ({container})")
        result = _run([sys.executable, *words, "--files_only"])
        if "has no pydantic" in result.stderr:
            found.unchecked.append(f"the run's configuration: {sys.executable} has no pydantic")
            return ""
    elif "clap-missing" in result.stdout:
        found.problems.append(f"python: {program}: no such program{' on PATH' if '/' not in program else ''}")
        return ""
    elif not _judge_python(shlex.join([*site.wrapper, site.interpreter()]), result, found):
        return ""
    return result.stderr if result.returncode else ""


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    environment, null = {**os.environ, "PYTHONPATH": python_path()}, subprocess.DEVNULL
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=TRIAL_S, env=environment, stdin=null)
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 1, "", f"no end after {TRIAL_S} s")


def python_path() -> str:
    """`PYTHONPATH` by which a Python that this package isn't installed for finds it, too."""
    given = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    return os.pathsep.join(dict.fromkeys([str(PACKAGE.parent), *given]))


def _judge_setup(site: Site, result: subprocess.CompletedProcess[str], found: Found) -> bool:
    """Whether the site's shell lines did what they should; module commands may fail with code 0."""
    lines, ready = site.setup_lines(), "clap-ready" in result.stdout.splitlines()
    complaint = next((line for line in result.stderr.splitlines() if _NO_MODULE.search(line)), None)
    if ready and complaint is None:
        if site.setup:
            found.facts["setup"] = f"{len(site.setup)} shell lines run"
        return True
    at = [int(number) for number in re.findall(r"^clap-line (\d+)$", result.stdout, re.MULTILINE)]
    line = f"{lines[at[-1] - 1]!r}: " if at and not ready else ""
    found.problems.append(f"setup: {line}{_last_line(result) if complaint is None else complaint.strip()}")
    return False


def _judge_python(shown: str, result: subprocess.CompletedProcess[str], found: Found) -> bool:
    """Whether the ranks' Python has what a run imports."""
    line = re.search(r"^clap-check (\{.*\})$", result.stdout, re.MULTILINE)
    versions = json.loads(line[1]) if line else {}
    if not versions:
        found.problems.append(f"python: {shown} can't run this package: {_last_line(result)}")
    elif None in versions.values():
        found.problems.append(f"python: {_last_line(result).removeprefix('error: ')}")
    else:
        names = ("torch", "deepspeed")
        parts = [f"{shown}: Python {versions['python']}", *(f"{name} {versions[name]}" for name in names)]
        found.facts["python"] = ", ".join(parts)
        return True
    return False


def _last_line(result: subprocess.CompletedProcess[str]) -> str:
    return (result.stderr.strip() or f"exit code {result.returncode}").rpartition("\n")[2].strip()


def check_scripts(texts: Iterable[str], found: Found) -> None:
    """Whether sbatch would take these scripts."""
    if not shutil.which("sbatch"):
        found.unchecked.append("partition, account, nodes and time: SLURM isn't installed here")
        return
    for text in texts:
        try:
            reason = slurm.refusal(text)
            # Asked, sbatch counts no node that is down or drained; submitted, such a job would wait for them.
            absent = slurm.out_of_service() if _NO_SUCH_NODES in (reason or "") else ""
        except UserError as error:
            found.unchecked.append(f"partition, account, nodes and time: {error}")
            return
        if absent:
            found.unchecked.append(f"whether sbatch takes the script: {reason}; out of service: {absent}")
            return
        if reason:
            found.problems.append(f"sbatch would refuse it: {reason}")
            return
    found.facts["sbatch"] = "would take it"
