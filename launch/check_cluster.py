"""Check a cluster profile on this cluster, and runs' JSONs with the ranks' Python, before jobs are queued.

The checks of a run need packages that a login node's Python may lack, so they run in the environment of a job.
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
    """Check what a cluster profile allows without a job, and print it. UserError if a check fails."""
    print(f"python  {check_environment(site)}")
    options = {"account": site.account, "partition": site.partition, "time": site.walltime(1)}
    lines = [*site.sbatch, *(f"--{name}={value}" for name, value in options.items() if value)]
    note = check_script("\n".join(["#!/bin/bash", *(f"#SBATCH {line}" for line in lines), "true\n"]))
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


def check_script(text: str) -> str:
    """Check a script with `sbatch --test-only` and return a note or "". UserError if sbatch rejects the script."""
    reason = slurm.refusal(text)
    if reason and _NO_SUCH_NODES not in reason:
        raise UserError(f"sbatch rejects the job: {reason}")
    # --test-only ignores nodes that are down or drained, but a submitted job would wait for them.
    return f"{reason}, counting only nodes in service" if reason else ""
