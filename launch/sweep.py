"""Many jobs from one command (scales, repeats, hyper-parameters, micro-batches), their states, and what is missing.

    python launch/sweep.py --site jupiter --config ds_configs/htsat_tiny.json --nodes 1 2 4 8 [--repeats 3] [--dry_run]
    python launch/sweep.py status runs/sweeps/htsat_tiny-…
    python launch/sweep.py resume runs/sweeps/htsat_tiny-…

A sweep is a folder: `sweep.json`, a script per job (or per array) as sbatch got it, and a folder per job. Leaves
running a job to `launch/bench.sbatch`. No torch, no DeepSpeed: it runs on a login node.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from clap_ds.config.files import write_atomically
from clap_ds.config.places import CHECKOUT, find_config, work_folder
from clap_ds.launch.run_config import parse_assignment, read_config, with_field
from clap_ds.launch.sites import LAUNCHERS, Site, SiteError, load_site

BENCH = Path(__file__).resolve().parent / "bench.sbatch"
DONE = ("completed", "out_of_memory")
"""States that another attempt would not change."""


@dataclass
class Job:
    """One job of a sweep."""

    name: str
    nodes: int
    changes: dict[str, Any] = field(default_factory=dict)
    """Fields of the run's JSON by dotted name."""
    micro_batch: str | None = None
    """`FIRST:LAST:STEP` or `auto`: this job tries micro-batches, one run after the other."""
    slurm_id: str | None = None


class Sweep:
    """A sweep's folder."""

    def __init__(self, folder: Path, options: dict[str, Any], jobs: list[Job]) -> None:
        self.folder, self.options, self.jobs = folder, options, jobs
        self.site = load_site(options["site"])

    @classmethod
    def read(cls, folder: Path) -> Sweep:
        """Open a sweep made earlier.

        Raises:
            ValueError: the folder holds no sweep.
        """
        try:
            content = json.loads((folder / "sweep.json").read_text())
        except (OSError, ValueError):
            raise ValueError(f"{folder}: no sweep here: expected a folder with a sweep.json") from None
        return cls(folder, content["options"], [Job(**job) for job in content["jobs"]])

    def write(self) -> None:
        """Write `sweep.json`, and each job's folder, JSON and script."""
        self.folder.mkdir(parents=True, exist_ok=True)
        content = read_config(Path(self.options["config"]))
        for job in self.jobs:
            (self.folder / job.name).mkdir(exist_ok=True)
            changed = with_field(content, "clap.output.root", str(self.folder / "runs"))
            for name, value in job.changes.items():
                changed = with_field(changed, name, value)
            changed = with_field(changed, "clap.output.label", job.name)
            write_atomically(str(self.folder / job.name / "run.json"), json.dumps(changed, indent=2) + "\n")
        for name, jobs in self.scripts(self.jobs).items():
            write_atomically(str(self.folder / f"{name}.sbatch"), self.script(name, jobs))
        self.save()

    def save(self) -> None:
        content = {"options": self.options, "jobs": [asdict(job) for job in self.jobs]}
        write_atomically(str(self.folder / "sweep.json"), json.dumps(content, indent=2) + "\n")

    def scripts(self, jobs: list[Job]) -> dict[str, list[Job]]:
        """Jobs by the script that runs them: one each, or an array for all that take as many nodes."""
        if not self.options["array"]:
            return {job.name: [job] for job in jobs}
        groups: dict[str, list[Job]] = {}
        for job in jobs:
            groups.setdefault(f"array-n{job.nodes}", []).append(job)
        return groups

    def script(self, name: str, jobs: list[Job]) -> str:
        """Text of the batch script of one job, or of an array of jobs."""
        array = self.options["array"]
        header = {
            "job-name": name,
            "output": f"{self.folder}/{name}-%{'A_%a' if array else 'j'}.out",
            "nodes": jobs[0].nodes,
            "ntasks-per-node": self.options["gpus"],
            "gres": f"gpu:{self.options['gpus']}",
            "cpus-per-task": self.site.cpus_per_task,
            "time": self.options["walltime"] or self.site.walltime(jobs[0].nodes),
            "account": self.site.account,
            "partition": self.site.partition,
            "signal": f"B:USR1@{self.site.warning_s}",
            "open-mode": "append",
        }
        lines = ["#!/bin/bash", *(f"#SBATCH --{key}={value}" for key, value in header.items() if value is not None)]
        lines += ["#SBATCH --requeue", *(f"#SBATCH {option}" for option in self.site.sbatch), ""]
        lines += ["set -euo pipefail", f"export CLAP_ROOT={shlex.quote(str(work_folder()))}", 'cd "$CLAP_ROOT"']
        if array:
            names = [job.name for job in self.jobs if job.nodes == jobs[0].nodes]
            lines += [f"jobs=({' '.join(names)})", "job=${jobs[$SLURM_ARRAY_TASK_ID]}"]
        else:
            lines += [f"job={jobs[0].name}"]
        folder = shlex.quote(str(self.folder))
        options = [
            f"--site {shlex.quote(self.options['site'])}",
            f'--config {folder}/"$job"/run.json',
            '--label "$job"',
        ]
        options += [f'--folder {folder}/"$job"', f"--slots {self.options['gpus']}"]
        options += [f"--launcher {self.options['launcher']}"] if self.options["launcher"] else []
        options += [f"--micro_batch {jobs[0].micro_batch}"] if jobs[0].micro_batch else []
        if not (CHECKOUT or self.site.python):
            options += [f"--python {shlex.quote(sys.executable)}"]  # the one that has this package
        return "\n".join([*lines, f"exec bash {shlex.quote(str(BENCH))} \\", "    " + " \\\n    ".join(options)]) + "\n"

    def submit(self, jobs: list[Job]) -> None:
        """Hand jobs to SLURM; each id is on record before the next one is submitted."""
        previous = None
        for name, group in self.scripts(jobs).items():
            command = ["sbatch", "--parsable"]
            if self.options["chain"] and previous:
                command.append(f"--dependency=afterany:{previous}")
            if self.options["array"]:
                peers = [job.name for job in self.jobs if job.nodes == group[0].nodes]
                command.append("--array=" + ",".join(str(peers.index(job.name)) for job in group))
            result = subprocess.run([*command, str(self.folder / f"{name}.sbatch")], capture_output=True, text=True)
            if result.returncode:
                raise ValueError(f"sbatch refuses {self.folder / name}.sbatch: {result.stderr.strip()}")
            previous = result.stdout.strip().split(";")[0]
            for job in group:
                job.slurm_id = f"{previous}_{peers.index(job.name)}" if self.options["array"] else previous
                (self.folder / job.name / "job.json").unlink(missing_ok=True)
            self.save()
            print(f"submitted {name}: job {previous}, {group[0].nodes} nodes")

    def states(self) -> dict[str, tuple[str, str]]:
        """State and a note by job name: init, running, completed, failed, out_of_memory, timeout or terminated."""
        queue = queued()
        states = {}
        for job in self.jobs:
            told = {}
            path = self.folder / job.name / "job.json"
            if path.exists():
                told = json.loads(path.read_text())
            state, note = told.get("state"), told.get("error") or ""
            if job.slurm_id in queue:
                waits = queue[job.slurm_id] in ("PENDING", "CONFIGURING", "REQUEUED")
                state, note = ("init" if waits else state or "running"), queue[job.slurm_id].lower()
            elif job.slurm_id is None:
                state, note = "init", "not submitted"
            elif state in (None, "running"):
                state, note = "failed", "SLURM no longer knows the job, and it left no end; see its .out file"
            states[job.name] = (state or "init", note)
        return states


def queued() -> dict[str, str]:
    """SLURM's state by job id, of jobs that are not over."""
    result = subprocess.run(["squeue", "-h", "-r", "-o", "%i %T"], capture_output=True, text=True)
    if result.returncode:
        raise ValueError(f"squeue: {result.stderr.strip()}")
    rows = [line.split() for line in result.stdout.splitlines()]
    return {row[0]: row[1] for row in rows}


def gpus_of_partition(partition: str | None) -> int:
    """GPUs of a node, as SLURM knows them.

    Raises:
        ValueError: SLURM has none.
    """
    command = ["sinfo", "-h", "-o", "%G", *(["-p", partition] if partition else [])]
    try:
        shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise ValueError(f"no gpus_per_node in the site file, and sinfo can't tell: {error}") from None
    counts = [sum(map(int, re.findall(r"gpu(?::[\w.-]+)??:(\d+)", line))) for line in shown.splitlines()]
    if not counts or max(counts) < 1:
        raise ValueError("no gpus_per_node in the site file, and sinfo shows no GPUs: give --gpus")
    return max(counts)


def plan(arguments: argparse.Namespace) -> list[Job]:
    """The jobs a command asks for: nodes × values × repeats."""
    choices = []
    for text in arguments.set:
        name, _, values = text.partition("=")
        choices.append([parse_assignment(f"{name}={value}") for value in values.split(",")])
    jobs = []
    for nodes, values, repeat in itertools.product(
        arguments.nodes, itertools.product(*choices), range(1, arguments.repeats + 1)
    ):
        parts = [f"n{nodes:03d}", *(f"{name.rpartition('.')[2]}_{value}" for name, value in values)]
        parts += [f"r{repeat}"] if arguments.repeats > 1 else []
        parts += ["micro_batch"] if arguments.micro_batch else []
        name = re.sub(r"[^A-Za-z0-9_.-]", "_", "-".join(parts))
        jobs.append(Job(name, nodes, dict(values), arguments.micro_batch))
    if len({job.name for job in jobs}) < len(jobs):
        raise ValueError("two jobs would have the same name: a value or node count is given twice")
    return jobs


def start(arguments: argparse.Namespace) -> int:
    site: Site = load_site(arguments.site)
    config = find_config(arguments.config).resolve()
    read_config(config)
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    folder = arguments.folder or work_folder() / site.run_root / "sweeps" / f"{config.stem}-{stamp}"
    if (folder / "sweep.json").exists():
        raise ValueError(f"{folder}: there is a sweep already: use `sweep.py resume {folder}`")
    options = {
        "site": str(Path(arguments.site).resolve()) if arguments.site.endswith(".json") else arguments.site,
        "config": str(config),
        "gpus": arguments.gpus or site.gpus_per_node or gpus_of_partition(site.partition),
        "launcher": arguments.launcher,
        "walltime": arguments.walltime,
        "array": arguments.array,
        "chain": arguments.chain,
    }
    sweep = Sweep(folder.resolve(), options, plan(arguments))
    sweep.write()
    print(f"sweep: {sweep.folder}")
    if arguments.dry_run:
        for name, jobs in sweep.scripts(sweep.jobs).items():
            print(f"\n# {sweep.folder / name}.sbatch\n{sweep.script(name, jobs)}", end="")
        return 0
    sweep.submit(sweep.jobs)
    return 0


def show_status(sweep: Sweep) -> int:
    states = sweep.states()
    width = max(map(len, states))
    for job in sweep.jobs:
        state, note = states[job.name]
        print(f"{job.name:{width}}  {job.nodes:4d} nodes  {job.slurm_id or '-':>8}  {state:13}  {note[:100]}".rstrip())
    counts = {state: sum(each == state for each, _ in states.values()) for state, _ in states.values()}
    print(", ".join(f"{number} {state}" for state, number in counts.items()))
    return 0


def resume(sweep: Sweep, dry_run: bool) -> int:
    states = sweep.states()
    queue = queued()
    missing = [job for job in sweep.jobs if states[job.name][0] not in DONE and job.slurm_id not in queue]
    print(
        f"{len(missing)} of {len(sweep.jobs)} jobs are missing{': ' if missing else ''}{', '.join(j.name for j in missing)}"
    )
    if missing and not dry_run:
        sweep.submit(missing)
    return 0


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="launch/sweep.py", description=(__doc__ or "").splitlines()[0], allow_abbrev=False
    )
    if argv[:1] in (["status"], ["resume"]):
        parser.add_argument("what")
        parser.add_argument("folder", type=Path)
        parser.add_argument("--dry_run", action="store_true")
        return parser.parse_args(argv)
    parser.set_defaults(what="start")
    parser.add_argument("--site", default="generic", help="name under launch/clusters/, or a file")
    parser.add_argument("--config", type=Path, required=True, help="the run's JSON: a file, or a packaged one's name")
    parser.add_argument("--nodes", type=_positive, nargs="+", default=[1])
    parser.add_argument("--repeats", type=_positive, default=1)
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=A,B,…", help="hyper-parameters: every combination"
    )
    parser.add_argument(
        "--micro_batch", type=_micro_batches, metavar="FIRST:LAST:STEP|auto", help="micro-batches, in one job"
    )
    parser.add_argument("--gpus", type=_positive, help="ranks per node")
    parser.add_argument("--walltime", help="time limit of every job, in place of the site's")
    parser.add_argument("--launcher", choices=LAUNCHERS)
    order = parser.add_mutually_exclusive_group()
    order.add_argument("--array", action="store_true", help="one job array per number of nodes")
    order.add_argument("--chain", action="store_true", help="one job after the other")
    parser.add_argument("--folder", type=Path, help="the sweep's folder")
    parser.add_argument("--dry_run", action="store_true", help="write and show the scripts, submit nothing")
    return parser.parse_args(argv)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number, at least 1")
    return int(text)


def _micro_batches(text: str) -> str:
    if text != "auto" and not re.fullmatch(r"[1-9]\d*:[1-9]\d*:[1-9]\d*", text):
        raise argparse.ArgumentTypeError(f"{text!r}: expected FIRST:LAST:STEP, such as 8:1024:8, or auto")
    return text


def main(argv: Iterable[str] | None = None) -> int:
    arguments = parse_arguments(list(sys.argv[1:] if argv is None else argv))
    try:
        if arguments.what == "start":
            return start(arguments)
        sweep = Sweep.read(arguments.folder.resolve())
        return show_status(sweep) if arguments.what == "status" else resume(sweep, arguments.dry_run)
    except (SiteError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
