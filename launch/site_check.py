"""Tries what a site file says on the cluster at hand, and a run's JSON on the Python of the ranks, before anything is queued.

The run's own checks need packages that a login node's Python may lack, so they run in the environment that a job will have:
the site's shell lines first, then its Python (`clap_ds.check_runs`). What can't be tried here is said, not refused.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from clap_ds.config.errors import UserError, did_you_mean
from clap_ds.launch import slurm
from clap_ds.launch.launchers import python_path

if TYPE_CHECKING:
    from clap_ds.launch.sites import Site

TRIAL_S = 300  # for module lines and a Python on a slow file system
_NO_MODULE = re.compile(r"Unable to locate a modulefile|module\(s\) are unknown|cannot be loaded as requested")
_NO_SUCH_NODES = "node configuration is not available"
_DEVICE = "DS_ACCELERATOR"


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


def check_site(site: Site) -> Found:
    """Everything about a site that can be tried without a job."""
    found = Found()
    check_environment(site, found)
    check_partition(site, found, nodes=1, gpus=site.ranks(), time=None)
    launcher = site.chosen_launcher()
    found.facts["launcher"] = launcher + ("" if site.launcher else " (the site names none)")
    programs = {"ssh": "ssh", "slurm": "srun", "srun": "srun"}
    if launcher in programs and not shutil.which(programs[launcher]):
        found.unchecked.append(f"launcher {launcher}: {programs[launcher]} isn't installed here")
    root = site.root()
    there = next(path for path in (root, *root.parents) if path.exists())
    if os.access(there, os.W_OK | os.X_OK) and there.is_dir():
        found.facts["run_root"] = f"{root}: writable"
    else:
        found.problems.append(f"run_root: {there} isn't a folder that can be written to")
    return found


def check_environment(site: Site, found: Found, files: list[Path] | None = None, *, train: bool = False) -> str:
    """Run the site's shell lines, then its Python on these runs' JSONs; what that says is wrong with them, if anything."""
    python, container = site.interpreter(), next((word for word in site.srun if "container" in word), None)
    program = (site.wrapper or [python])[0]
    lines = ["set -euo pipefail"]
    for number, line in enumerate(site.setup_lines(), start=1):
        lines += [f"echo clap-line {number}", line]
    lines += ["echo clap-ready", f"command -v {shlex.quote(program)} > /dev/null || {{ echo clap-missing; exit 0; }}"]
    command = [*site.wrapper, python] if not container else ["true"]
    lines += [f"exec {shlex.join([*command, *_check_words(files, train)])}"]
    result = _run(["bash", "-c", "\n".join(lines)])
    if not _judge_setup(site, result, found):
        return ""
    missing = "clap-missing" in result.stdout.splitlines()
    if container or (site.wrapper and missing):
        why = f"it is in a container ({container})" if container else f"{program} isn't installed here"
        found.unchecked.append(f"python {python}: {why}")
        own = _run([sys.executable, *_check_words(files, train)])
        if _versions(own).get("pydantic"):
            return own.stderr if own.returncode else ""
        if files:
            found.unchecked.append(f"the run's configuration: {sys.executable} has no pydantic")
        return ""
    if missing:
        found.problems.append(f"python: {program}: no such program{' on PATH' if '/' not in program else ''}")
        return ""
    can_run = _judge_python(shlex.join([*site.wrapper, python]), result, found)
    return result.stderr if can_run and result.returncode else ""


def _check_words(files: list[Path] | None, train: bool) -> list[str]:
    return ["-m", "clap_ds.check_runs", *(["--train"] if train else []), *map(str, files or [])]


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": python_path()}
    null = subprocess.DEVNULL
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=TRIAL_S, env=environment, stdin=null)
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 1, "", f"no end after {TRIAL_S} s")
    except OSError as error:
        return subprocess.CompletedProcess(command, 1, "", str(error))


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
    versions = _versions(result)
    if not versions:
        found.problems.append(f"python: {shown} can't run this package: {_last_line(result)}")
        return False
    missing = [name for name in ("torch", "deepspeed", "pydantic") if not versions.get(name)]
    if missing:
        hint = "`make setup` makes .venv, which has all, or name another python in the site file"
        found.problems.append(f"python: {shown} has no {', '.join(missing)}: {hint}")
        return False
    names = ("torch", "deepspeed")
    found.facts["python"] = ", ".join(
        [f"{shown}: Python {versions['python']}", *(f"{name} {versions[name]}" for name in names)]
    )
    return True


def _versions(result: subprocess.CompletedProcess[str]) -> dict[str, str]:
    line = re.search(r"^clap-check (\{.*\})$", result.stdout, re.MULTILINE)
    return dict(json.loads(line[1])) if line else {}


def _last_line(result: subprocess.CompletedProcess[str]) -> str:
    return (result.stderr.strip() or f"exit code {result.returncode}").rpartition("\n")[2].strip()


def check_partition(site: Site, found: Found, *, nodes: int, gpus: int | None, time: str | None) -> None:
    """Whether partition and account are there, and the partition has these nodes, with so many GPUs each, for this time."""
    if not shutil.which("sinfo"):
        found.unchecked.append("partition, GPUs and account: SLURM isn't installed here")
        return
    try:
        everything = slurm.partitions()
    except UserError as error:
        found.unchecked.append(f"partition, GPUs and account: {str(error).rpartition(chr(10))[2]}")
        return
    if missing := slurm.missing_partition(everything, site.partition):
        found.problems.append(missing)
        return
    there = slurm.of_partition(everything, site.partition)
    _check_nodes(there, everything, found, nodes, gpus, time, on_cpu=site.environment.get(_DEVICE) == "cpu")
    mine = slurm.accounts()
    if mine is None:
        found.unchecked.append("account: SLURM doesn't tell which are yours")
    elif site.account and site.account.lower() not in mine:
        known = did_you_mean(site.account.lower(), sorted(mine))
        found.problems.append(f"account: {site.account!r} is none of yours{known}")
    else:
        found.facts["account"] = site.account or f"your default (yours: {', '.join(sorted(mine))})"


def _check_nodes(
    there: list[slurm.Nodes],
    everything: list[slurm.Nodes],
    found: Found,
    nodes: int,
    gpus: int | None,
    time: str | None,
    *,
    on_cpu: bool,
) -> None:
    name = ",".join(dict.fromkeys(each.partition for each in there))
    kinds = ", ".join(f"{each.count} nodes with {each.gpus or 'no'} GPUs" for each in there)
    limits = [each.limit_s for each in there]
    longest = None if None in limits else max(each for each in limits if each is not None)
    found.facts["partition"] = f"{name}: {kinds}, time limit {slurm.time_of(longest) if longest else 'none'}"
    most = max(each.gpus for each in there)
    if not most and not on_cpu and any(each.gpus for each in everything):
        others = ", ".join(dict.fromkeys(each.partition for each in everything if each.gpus))
        found.problems.append(f"partition: {name} has no GPUs; there are some in {others}")
        return
    if gpus and 0 < most < gpus:
        found.problems.append(f"gpus_per_node: {gpus} on each node wanted; partition {name} has {kinds}")
        return
    able = sum(each.count for each in there if each.gpus >= (gpus or 0) or not most)
    if nodes > able:
        with_gpus = f" with {gpus} GPUs or more" if gpus and most else ""
        found.problems.append(f"{nodes} nodes wanted: partition {name} has {able}{with_gpus}")
    if time and longest and slurm.seconds_of(time) > longest:
        found.problems.append(f"time {time}: partition {name} has a limit of {slurm.time_of(longest)}")


def check_scripts(site: Site, texts: Iterable[str], found: Found) -> None:
    """Whether sbatch would take these scripts, unless something is wrong already that it would only say in other words."""
    if found.problems:
        return
    for text in texts:
        try:
            reason = slurm.refusal(text)
            # Asked, sbatch counts no node that is down or drained; submitted, such a job would wait for them.
            absent = slurm.out_of_service(site.partition) if _NO_SUCH_NODES in (reason or "") else ""
        except UserError as error:
            found.unchecked.append(f"whether sbatch takes the script: {error}")
            return
        if absent:
            found.unchecked.append(f"whether sbatch takes the script: {reason}; out of service: {absent}")
            return
        if reason:
            found.problems.append(f"sbatch would refuse it: {reason}")
            return
    found.facts["sbatch"] = "would take it"


def problems_of_allocation(site: Site, environment: Mapping[str, str]) -> list[str]:
    """Where the job that runs here isn't as the site says, as `sbatch` by hand may have it: what option to give."""
    problems = []
    account, partition = environment.get("SLURM_JOB_ACCOUNT"), environment.get("SLURM_JOB_PARTITION")
    by_command = "which launch/submit.py gives by itself"
    if site.account and account and account.lower() != site.account.lower():
        found = f"the site says account {site.account}, this job runs under {account}"
        problems.append(f"{found}: give sbatch --account={site.account}, {by_command}")
    if site.partition and partition and partition not in site.partition.split(","):
        found = f"the site says partition {site.partition}, this job runs in {partition}"
        problems.append(f"{found}: give sbatch --partition={site.partition}, {by_command}")
    gpus = site.gpus_per_node
    on_cpu = {**environment, **site.environment}.get(_DEVICE) == "cpu"
    shown = any(environment.get(f"SLURM_{name}") not in (None, "", "0") for name in ("GPUS_ON_NODE", "JOB_GPUS"))
    if gpus and partition and not on_cpu and not shown and _has_gpus(partition):
        found = f"the site says {gpus} GPUs on a node, this job was given none"
        problems.append(f"{found}: give sbatch --gres=gpu:{gpus}, {by_command}")
    return problems


def _has_gpus(partition: str) -> bool:
    """Whether SLURM knows of GPUs in a partition; not every SLURM is told of the GPUs there are."""
    try:
        return any(each.gpus for each in slurm.of_partition(slurm.partitions(), partition))
    except UserError:
        return False
