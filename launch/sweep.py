"""Many jobs from one command (scales, repeats, hyper-parameters, micro-batches), their states, and what is missing.

    python launch/sweep.py --site jupiter --config ds_configs/htsat_tiny.json --nodes 1 2 4 8 [--repeats 3] [--dry_run]
    python launch/sweep.py status runs/sweeps/htsat_tiny-…
    python launch/sweep.py resume runs/sweeps/htsat_tiny-…

A sweep is a folder: `sweep.json`, a script per job or array as sbatch got it, and a folder per job. Runs on a login node.
"""

from __future__ import annotations

import argparse
import itertools
import re
import shlex
import subprocess
import sys
from collections import Counter
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from clap_ds.config.errors import UserError, exit_code_of
from clap_ds.config.files import write_atomically
from clap_ds.config.places import CHECKOUT, find_config, work_folder
from clap_ds.launch.run_config import parse_assignment, read_config, read_object, with_field, write_object
from clap_ds.launch.sites import LAUNCHERS, load_site

BENCH = Path(__file__).resolve().parent / "bench.sbatch"
DONE = ("completed", "out_of_memory")  # states that another attempt would not change


@dataclass
class Job:
    name: str
    nodes: int
    changes: dict[str, Any]  # fields of the run's JSON by dotted name
    micro_batch: str | None = None  # `FIRST:LAST:STEP` or `auto`: this job tries micro-batches, one run after the other
    slurm_id: str | None = None


class Sweep:
    def __init__(self, folder: Path, options: dict[str, Any], jobs: list[Job]) -> None:
        self.folder, self.options, self.jobs = folder, options, jobs
        self.site = load_site(options["site"])

    @classmethod
    def read(cls, folder: Path) -> Sweep:
        """Open a sweep made earlier; a UserError where the folder holds none."""
        content = read_object(folder / "sweep.json")
        return cls(folder, content["options"], [Job(**job) for job in content["jobs"]])

    def write(self) -> None:
        """Write `sweep.json`, and each job's folder, JSON and script."""
        self.folder.mkdir(parents=True, exist_ok=True)
        content = read_config(Path(self.options["config"]))
        for job in self.jobs:
            (self.folder / job.name).mkdir(exist_ok=True)
            changed, root = content, str(self.folder / "runs")
            for name, value in {"clap.output.root": root, **job.changes, "clap.output.label": job.name}.items():
                changed = with_field(changed, name, value)
            write_object(self.folder / job.name / "run.json", changed)
        for name, jobs in self.scripts(self.jobs).items():
            write_atomically(self.folder / f"{name}.sbatch", self.script(name, jobs))
        self.save()

    def save(self) -> None:
        write_object(self.folder / "sweep.json", {"options": self.options, "jobs": [asdict(job) for job in self.jobs]})

    def scripts(self, jobs: list[Job]) -> dict[str, list[Job]]:
        """Jobs by the script that runs them: one each, or an array for all that take as many nodes."""
        groups: dict[str, list[Job]] = {}
        for job in jobs:
            groups.setdefault(f"array-n{job.nodes}" if self.options["array"] else job.name, []).append(job)
        return groups

    def script(self, name: str, jobs: list[Job]) -> str:
        """Text of the batch script of one job, or of an array of jobs."""
        folder = shlex.quote(str(self.folder))
        header = {
            "job-name": name,
            "output": f"{self.folder}/{name}-%{'A_%a' if self.options['array'] else 'j'}.out",
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
        options = {
            "site": shlex.quote(self.options["site"]),
            "config": f'{folder}/"$job"/run.json',
            "label": '"$job"',
            "folder": f'{folder}/"$job"',
            "slots": self.options["gpus"],
            "launcher": self.options["launcher"],
            "micro_batch": jobs[0].micro_batch,
            # Without a checkout the interpreter that has this package.
            "python": None if CHECKOUT or self.site.python else shlex.quote(sys.executable),
        }
        lines = ["#!/bin/bash", *(f"#SBATCH --{key}={value}" for key, value in header.items() if value is not None)]
        lines += ["#SBATCH --requeue", *(f"#SBATCH {option}" for option in self.site.sbatch), ""]
        lines += ["set -euo pipefail", f"export CLAP_ROOT={shlex.quote(str(work_folder()))}", 'cd "$CLAP_ROOT"']
        lines += [f"jobs=({' '.join(job.name for job in jobs)})", "job=${jobs[${SLURM_ARRAY_TASK_ID:-0}]}"]
        lines += [f"exec bash {shlex.quote(str(BENCH))}"]
        given = [f"    --{name} {value}" for name, value in options.items() if value is not None]
        return "\n".join(lines) + "".join(f" \\\n{option}" for option in given) + "\n"

    def submit(self, jobs: list[Job]) -> None:
        """Hand jobs to SLURM; each id is on record before the next one is submitted."""
        previous, everyone = None, self.scripts(self.jobs)
        for name, group in self.scripts(jobs).items():
            tasks = [everyone[name].index(job) for job in group]
            options = [f"--array={','.join(map(str, tasks))}"] if self.options["array"] else []
            options += [f"--dependency=afterany:{previous}"] if self.options["chain"] and previous else []
            previous = slurm(["sbatch", "--parsable", *options, f"{self.folder / name}.sbatch"]).strip().split(";")[0]
            for job, task in zip(group, tasks, strict=True):
                job.slurm_id = f"{previous}_{task}" if self.options["array"] else previous
                (self.folder / job.name / "job.json").unlink(missing_ok=True)
            self.save()
            print(f"submitted {name}: job {previous}, {group[0].nodes} nodes")

    def states(self, queue: dict[str, str]) -> dict[str, tuple[str, str]]:
        """By job name a note and the state, init or one of `record.schema.State`; `queue` is what `queued` gives."""
        states = {}
        for job in self.jobs:
            path = self.folder / job.name / "job.json"
            record = read_object(path) if path.exists() else {}
            state, note = record.get("state"), record.get("error") or ""
            if job.slurm_id in queue:
                waits = queue[job.slurm_id] in ("PENDING", "CONFIGURING", "REQUEUED")
                state, note = ("init" if waits else state or "running"), queue[job.slurm_id].lower()
            elif job.slurm_id is None:
                state, note = "init", "not submitted"
            elif state in (None, "running"):
                state, note = "failed", "SLURM no longer knows the job, and it recorded no end; see its .out file"
            states[job.name] = (state or "init", note)
        return states


def slurm(command: list[str], problem: str = "") -> str:
    """What a command of SLURM's prints; a UserError that begins with `problem` where it fails or isn't installed."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except OSError as error:
        reason = error.strerror
    except subprocess.CalledProcessError as error:
        reason = error.stderr.strip()
    raise UserError(f"{problem}{shlex.join(command)}: {reason}")


def queued() -> dict[str, str]:
    """SLURM's state by job id, of jobs that are not over."""
    return {line.split()[0]: line.split()[1] for line in slurm(["squeue", "-h", "-r", "-o", "%i %T"]).splitlines()}


def gpus_of_partition(partition: str | None) -> int:
    """GPUs of a node, as SLURM knows them; a UserError where it has none."""
    problem = "no gpus_per_node in the site file, give --gpus: "
    shown = slurm(["sinfo", "-h", "-o", "%G", *(["-p", partition] if partition else [])], problem)
    counts = [sum(map(int, re.findall(r"gpu(?::[\w.-]+)??:(\d+)", line))) for line in shown.splitlines()]
    if max(counts, default=0) < 1:
        raise UserError(f"{problem}sinfo shows no GPUs")
    return max(counts)


def plan(arguments: argparse.Namespace) -> list[Job]:
    """The jobs a command asks for: nodes × values × repeats."""
    sets = (text.partition("=") for text in arguments.set)
    choices = [[parse_assignment(f"{name}={value}") for value in values.split(",")] for name, _, values in sets]
    jobs: dict[str, Job] = {}
    repeats = range(1, arguments.repeats + 1)
    for nodes, values, repeat in itertools.product(arguments.nodes, itertools.product(*choices), repeats):
        parts = [f"n{nodes:03d}", *(f"{name.rpartition('.')[2]}_{value}" for name, value in values)]
        parts += [f"r{repeat}"] if arguments.repeats > 1 else []
        parts += ["micro_batch"] if arguments.micro_batch else []
        name = re.sub(r"[^A-Za-z0-9_.-]", "_", "-".join(parts))
        if name in jobs:
            raise UserError(f"two jobs would have the same name, {name}: a value or node count is given twice")
        jobs[name] = Job(name, nodes, dict(values), arguments.micro_batch)
    return list(jobs.values())


def start(arguments: argparse.Namespace) -> None:
    site = load_site(arguments.site)
    config = find_config(arguments.config).resolve()
    default = work_folder() / site.run_root / "sweeps" / f"{config.stem}-{datetime.now(UTC):%Y%m%dT%H%M%SZ}"
    folder = arguments.folder or default
    if (folder / "sweep.json").exists():
        raise UserError(f"{folder}: there is a sweep already: use `sweep.py resume {folder}`")
    options = {
        "site": str(Path(arguments.site).resolve()) if arguments.site.endswith(".json") else arguments.site,
        "config": str(config),
        "gpus": arguments.gpus or site.gpus_per_node or gpus_of_partition(site.partition),
        **{name: getattr(arguments, name) for name in ("launcher", "walltime", "array", "chain")},
    }
    sweep = Sweep(folder.resolve(), options, plan(arguments))
    sweep.write()
    print(f"sweep: {sweep.folder}")
    if not arguments.dry_run:
        return sweep.submit(sweep.jobs)
    for name, jobs in sweep.scripts(sweep.jobs).items():
        print(f"\n# {sweep.folder / name}.sbatch\n{sweep.script(name, jobs)}", end="")


def show_status(arguments: argparse.Namespace) -> None:
    sweep = Sweep.read(arguments.folder.resolve())
    states = sweep.states(queued())
    width = max(map(len, states))
    for job in sweep.jobs:
        state, note = states[job.name]
        print(f"{job.name:{width}}  {job.nodes:4d} nodes  {job.slurm_id or '-':>8}  {state:13}  {note[:100]}".rstrip())
    counts = Counter(state for state, _ in states.values())
    print(", ".join(f"{number} {state}" for state, number in counts.items()))


def resume(arguments: argparse.Namespace) -> None:
    """Submit again what neither came to an end that would stay nor is on its way."""
    sweep = Sweep.read(arguments.folder.resolve())
    states = sweep.states(queue := queued())
    missing = [job for job in sweep.jobs if states[job.name][0] not in DONE and job.slurm_id not in queue]
    names = ", ".join(job.name for job in missing)
    print(f"{len(missing)} of {len(sweep.jobs)} jobs are missing{': ' if missing else ''}{names}")
    if missing and not arguments.dry_run:
        sweep.submit(missing)


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("launch/sweep.py", description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    add = parser.add_argument
    if argv[:1] in (["status"], ["resume"]):
        parser.set_defaults(run=show_status if argv[0] == "status" else resume)
        add("what")
        add("folder", type=Path)
        add("--dry_run", action="store_true")
        return parser.parse_args(argv)
    parser.set_defaults(run=start)
    add("--site", default="generic", help="name under launch/clusters/, or a file")
    add("--config", type=Path, required=True, help="the run's JSON: a file, or a packaged one's name")
    add("--nodes", type=_positive, nargs="+", default=[1])
    add("--repeats", type=_positive, default=1)
    add("--set", action="append", default=[], metavar="NAME=A,B,…", help="hyper-parameters: every combination")
    add("--micro_batch", type=_micro_batches, metavar="FIRST:LAST:STEP|auto", help="micro-batches, in one job")
    add("--gpus", type=_positive, help="ranks per node")
    add("--walltime", help="time limit of every job, in place of the site's")
    add("--launcher", choices=LAUNCHERS)
    order = parser.add_mutually_exclusive_group()
    order.add_argument("--array", action="store_true", help="one job array per number of nodes")
    order.add_argument("--chain", action="store_true", help="one job after the other")
    add("--folder", type=Path, help="the sweep's folder")
    add("--dry_run", action="store_true", help="write and show the scripts, submit nothing")
    return parser.parse_args(argv)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number, at least 1")
    return int(text)


def _micro_batches(text: str) -> str:
    if text != "auto" and not re.fullmatch(r"[1-9]\d*:[1-9]\d*:[1-9]\d*", text):
        raise argparse.ArgumentTypeError(f"{text!r}: expected FIRST:LAST:STEP, such as 8:1024:8, or auto")
    return text


def main(argv: list[str] | None = None) -> int:
    arguments = parse_arguments(sys.argv[1:] if argv is None else argv)
    return exit_code_of(lambda: arguments.run(arguments))


if __name__ == "__main__":
    sys.exit(main())
