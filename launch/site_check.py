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
from typing import TYPE_CHECKING

from clap_ds.config.errors import UserError
from clap_ds.config.places import PACKAGE
from clap_ds.launch import slurm
from clap_ds.launch.launchers import default_launcher

if TYPE_CHECKING:
    from clap_ds.launch.sites import Site

TRIAL_S = 300  # for module lines and a Python on a slow file system
_NO_MODULE = re.compile(r"Unable to locate a modulefile|module\(s\) are unknown|cannot be loaded as requested")
_NO_SUCH_NODES = "node configuration is not available"
NOT_CHECKED = "not checked: {}"
NOT_ASKED = "partition, account, nodes and time"


@dataclass
class Findings:
    """What was tried: what is there, what would break a job, and what couldn't be tried here."""

    facts: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def refuse(self) -> None:
        """Raise a UserError with all problems, if there are any."""
        if self.problems:
            raise UserError("\n".join(self.problems))


def show_check(site: Site) -> None:
    """Print what can be tried of a site without a job; a UserError with what is wrong."""
    found = Findings()
    check_environment(site, found)
    options = {"account": site.account, "partition": site.partition, "time": site.walltime(1)}
    lines = [*site.sbatch, *(f"--{name}={value}" for name, value in options.items() if value)]
    check_scripts(["\n".join(["#!/bin/bash", *(f"#SBATCH {line}" for line in lines), "true\n"])], found)
    found.facts["launcher"] = (site.launcher or default_launcher()) + (
        "" if site.launcher else " (the site names none)"
    )
    root = site.root()
    there = next(path for path in (root, *root.parents) if path.exists())
    if os.access(there, os.W_OK | os.X_OK):
        found.facts["run_root"] = f"{root}: writable"
    else:
        found.problems.append(f"run_root: {there} isn't a folder that can be written to")
    width = max(map(len, found.facts), default=0)
    for line in [
        *(f"{name:{width}}  {text}" for name, text in found.facts.items()),
        *map(NOT_CHECKED.format, found.notes),
    ]:
        print(line)
    found.refuse()


def check_environment(site: Site, found: Findings, files: Iterable[str] = (), *, train: bool = False) -> str:
    """Run the site's shell lines, then its Python on these runs' JSONs; what that says is wrong with them, if anything."""
    python, check = [*site.wrapper, site.interpreter()], ["-m", "clap_ds.check_runs", *["--train"] * train, *files]
    if site.container() and (not site.wrapper or not shutil.which(python[0])):
        found.notes.append(f"python {python[-1]}: it is in a container that isn't here: {sys.executable} is tried")
        python = [sys.executable]
    lines = ["set -euo pipefail", "trap 'echo \"clap-failed $BASH_COMMAND\"' ERR", *site.setup_lines()]
    code, shown, said = _run(["bash", "-c", "\n".join([*lines, "echo clap-ready", shlex.join([*python, *check])])])
    last = (said.strip() or f"exit code {code}").rpartition("\n")[2].removeprefix("error: ")
    setup, ready, rest = shown.partition("clap-ready\n")
    complaint = next((line for line in said.splitlines() if _NO_MODULE.search(line)), None)  # may be with code 0
    line = re.search("clap-failed (.*)", setup)
    if complaint or not ready:
        found.problems.append(f"setup: {repr(line[1]) + ': ' if line else ''}{complaint or last}")
        return ""
    found.facts |= {"setup": f"{len(site.setup)} shell lines run"} if site.setup else {}
    answer = re.search(r"^clap-check (\{.*\})$", rest, re.MULTILINE)
    versions = json.loads(answer[1]) if answer else {}
    if not versions:
        found.problems.append(f"python: {shlex.join(python)} can't run this package: {last}")
    elif None not in versions.values():
        parts = (f"{name} {versions[name]}" for name in ("torch", "deepspeed"))
        found.facts["python"] = f"{shlex.join(python)}: Python {versions['python']}, {', '.join(parts)}"
        return said if code else ""
    elif python == [sys.executable] and site.container():
        found.notes.append(f"the run's configuration: {last}")
    else:
        found.problems.append(f"python: {last}")
    return ""


def _run(command: list[str]) -> tuple[int, str, str]:
    """Exit code and output, in an environment in which any Python finds this package."""
    path = os.pathsep.join(filter(None, [str(PACKAGE.parent), os.environ.get("PYTHONPATH")]))
    environment, null = {**os.environ, "PYTHONPATH": path}, subprocess.DEVNULL
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TRIAL_S, env=environment, stdin=null)
    except subprocess.TimeoutExpired:
        return 1, "", f"no end after {TRIAL_S} s"
    return done.returncode, done.stdout, done.stderr


def check_scripts(texts: Iterable[str], found: Findings) -> None:
    """Whether sbatch would take these scripts."""
    if not shutil.which("sbatch"):
        found.notes.append(f"{NOT_ASKED}: SLURM isn't installed here")
        return
    for text in texts:
        try:
            reason = slurm.refusal(text)
        except UserError as error:
            found.notes.append(f"{NOT_ASKED}: {error}")
            return
        # Asked, sbatch counts no node that is down or drained; submitted, such a job would wait for them.
        if _NO_SUCH_NODES in (reason or ""):
            found.notes.append(f"nodes: {reason}, as far as they are in service")
        elif reason:
            found.problems.append(f"sbatch would refuse it: {reason}")
            return
        else:
            found.facts["sbatch"] = "would take it"
