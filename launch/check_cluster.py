"""Tries what a site file says on the cluster at hand, and runs' JSONs on the Python of the ranks, before anything is queued.

The run's own checks need packages that a login node's Python may lack, so they run in the environment that a job will have.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterable
from typing import TYPE_CHECKING

from clap_ds.config.errors import UserError
from clap_ds.config.paths import PACKAGE
from clap_ds.launch import slurm

if TYPE_CHECKING:
    from clap_ds.launch.cluster_profile import Site

_NO_SUCH_NODES = "node configuration is not available"


def show_check(site: Site) -> None:
    """Print what can be tried of a site without a job; a UserError with what is wrong."""
    print(f"python  {check_environment(site)}")
    options = {"account": site.account, "partition": site.partition, "time": site.walltime(1)}
    lines = [*site.sbatch, *(f"--{name}={value}" for name, value in options.items() if value)]
    note = check_script("\n".join(["#!/bin/bash", *(f"#SBATCH {line}" for line in lines), "true\n"]))
    print(f"sbatch  {note or 'would take it'}")


def check_environment(site: Site, files: Iterable[str] = (), *, train: bool = False) -> str:
    """Run the site's shell lines, then its Python on these runs' JSONs: its versions, or why it wasn't tried; a UserError with
    a line for each problem."""
    python = shlex.join([*site.wrapper, site.interpreter()])
    if site.container() and not (site.wrapper and shutil.which(site.wrapper[0])):
        return f"{python}: not tried, for it is in a container that isn't here"
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


def check_script(text: str) -> str:
    """Have sbatch judge a script; a UserError where it would refuse it, else what is to be noted, if anything."""
    reason = slurm.refusal(text)
    if reason and _NO_SUCH_NODES not in reason:
        raise UserError(f"sbatch would refuse it: {reason}")
    # Asked, sbatch counts no node that is down or drained; submitted, such a job would wait for them.
    return f"{reason}, as far as nodes are in service" if reason else ""
