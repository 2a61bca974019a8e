"""Many jobs from one command (scales, repeats, hyper-parameters, micro-batches), their states, and what is missing.

    python launch/sweep.py --site mine --config ds_configs/htsat_tiny.json --nodes 1 2 4 8 [--repeats 3] [--dry_run]
    python launch/sweep.py --site mine --config my_run.json --train --vary optimizer.params.lr=1e-4,3e-4
    python launch/sweep.py status runs/sweeps/htsat_tiny-…
    python launch/sweep.py resume runs/sweeps/htsat_tiny-… [--time 01:00:00] [--exclude HOSTS]

A sweep is a folder: `sweep.json`, a script per job or array as sbatch got it, a folder per job, and in `runs` what they
measured. Runs on a login node. Leaves scripts and submission to `batch_script.py`.
"""

import argparse
import itertools
import re
import shutil
import sys
from collections import Counter
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

if not __package__:  # run as a file, by any Python
    if sys.version_info < (3, 11):  # noqa: UP036
        sys.exit(f"error: launch/sweep.py needs Python 3.11 or newer; this is {sys.version.split()[0]}")
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from clap_ds.config.arguments import whole_number
from clap_ds.config.errors import UserError, did_you_mean, exit_code_of
from clap_ds.config.files import read_object, write_atomically, write_object
from clap_ds.config.places import find_config, work_folder
from clap_ds.launch import slurm
from clap_ds.launch.batch_script import (
    Request,
    add_limits,
    add_request,
    check,
    check_batch,
    finishing,
    log_file,
    request_of,
    script,
    stamp,
)
from clap_ds.launch.job_states import figures_of, state_of
from clap_ds.launch.run_config import parse_varied, read_config, with_field
from clap_ds.launch.sites import load_site

DONE = ("completed", "out_of_memory")  # states that another attempt would not change

LATER = {"status": "shows the jobs' states and what they measured", "resume": "submits again what is missing"}


@dataclass
class Job:
    name: str
    nodes: int
    changes: dict[str, Any]  # fields of the run's JSON by dotted name
    micro_batch: str | None = None  # `FIRST:LAST:STEP` or `auto`: this job tries micro-batches, one run after the other
    submitted_as: str | None = None  # the job name that SLURM has, recorded before the job is submitted
    submitted: str | None = None  # when
    task: int | None = None  # in the job array
    slurm_id: str | None = None

    def set_id(self, number: str) -> None:
        self.slurm_id = number if self.task is None else f"{number}_{self.task}"


class Sweep:
    def __init__(self, folder: Path, config: Path, request: Request, order: str | None, jobs: list[Job]) -> None:
        self.folder, self.config, self.request, self.order, self.jobs = folder, config, request, order, jobs
        self.on_their_way: set[str] = set()
        """Names of the jobs that SLURM has still to end, as of the last `states`."""

    @classmethod
    def read(cls, folder: Path) -> "Sweep":
        """Open a sweep made earlier; a UserError where the folder holds none."""
        if not (folder / "sweep.json").exists():
            sweeps = work_folder() / "runs" / "sweeps"
            known = [str(path.parent) for path in sorted(sweeps.glob("*/sweep.json"))]
            raise UserError(f"{folder}: no sweep there{did_you_mean(str(sweeps / folder.name), known)}")
        content = read_object(folder / "sweep.json")
        request, jobs = Request(**content["request"]), [Job(**job) for job in content["jobs"]]
        return cls(folder, Path(content["config"]), request, content["order"], jobs)

    def save(self) -> None:
        jobs = [asdict(job) for job in self.jobs]
        content = {"config": str(self.config), "request": asdict(self.request), "order": self.order, "jobs": jobs}
        write_object(self.folder / "sweep.json", content)

    def write_runs(self) -> dict[str, Path]:
        """Write each job's folder with the run's JSON; the JSONs by job name."""
        content, root = read_config(self.config), str(self.folder / "runs")
        for job in self.jobs:
            (self.folder / job.name).mkdir(parents=True, exist_ok=True)
            changed = content
            for name, value in {"clap.output.root": root, **job.changes, "clap.output.label": job.name}.items():
                changed = with_field(changed, name, value)
            if not job.micro_batch:
                check_batch(changed, job.nodes * self.request.gpus, job.name)
            write_object(self.folder / job.name / "run.json", changed)
        return {job.name: self.folder / job.name / "run.json" for job in self.jobs}

    def scripts(self, jobs: list[Job]) -> dict[str, list[Job]]:
        """Jobs by the script that runs them: one each, or an array for all that take as many nodes."""
        groups: dict[str, list[Job]] = {}
        for job in jobs:
            groups.setdefault(f"array-n{job.nodes}" if self.order == "array" else job.name, []).append(job)
        return groups

    def text(self, name: str, jobs: list[Job]) -> str:
        """Text of the batch script of one job, or of an array of jobs."""
        log = log_file(self.folder, f"{name}-%{'A_%a' if self.order == 'array' else 'j'}.out")
        folders = [self.folder / job.name for job in jobs]
        return script(self.request, jobs[0].nodes, name, log, folders, jobs[0].micro_batch)

    def texts(self, jobs: list[Job]) -> dict[int, str]:
        """Of the batch scripts one for each number of nodes: others of as many ask SLURM for the same."""
        return {group[0].nodes: self.text(name, group) for name, group in self.scripts(jobs).items()}

    def log(self, job: Job) -> Path:
        ((name, _),) = self.scripts([job]).items()
        return self.folder / f"{name}-{job.slurm_id}.out"

    def write_scripts(self) -> None:
        for name, jobs in self.scripts(self.jobs).items():
            write_atomically(self.folder / f"{name}.sbatch", self.text(name, jobs))
        self.save()

    def submit(self, jobs: list[Job]) -> None:
        """Hand jobs to SLURM; each one's name is on record before it is submitted, and its id before the next one is."""
        previous, everyone = None, self.scripts(self.jobs)
        for name, group in self.scripts(jobs).items():
            unique = slurm.unique_name(f"{self.folder.name}-{name}")
            options = [f"--dependency=afterany:{previous}"] if self.order == "chain" and previous else []
            for job in group:
                job.submitted_as, job.submitted, job.slurm_id = unique, slurm.now(), None
                job.task = everyone[name].index(job) if self.order == "array" else None
                (self.folder / job.name / "job.json").unlink(missing_ok=True)
            options += [f"--array={','.join(str(job.task) for job in group)}"] if self.order == "array" else []
            self.save()
            with finishing():
                try:
                    previous = slurm.submit(self.folder / f"{name}.sbatch", unique, *options)
                except slurm.RefusedError:
                    for job in group:
                        job.submitted_as = job.submitted = None
                    self.save()
                    raise
                for job in group:
                    job.set_id(previous)
                self.save()
                print(f"submitted {name}: job {previous}, {group[0].nodes} nodes", flush=True)

    def find_lost(self) -> None:
        """Look up, by their names, the ids of jobs whose submission was cut off before it was answered."""
        lost = {
            job.submitted_as: job.submitted or slurm.now() for job in self.jobs if job.submitted_as and not job.slurm_id
        }
        for name, since in lost.items():
            number = slurm.find_job(name, since)
            for job in self.jobs:
                if number and job.submitted_as == name:
                    job.set_id(number)
        if lost:
            self.save()

    def states(self) -> dict[str, tuple[str, str]]:
        """By job name its state, init or one of `record.schema.State`, and a note."""
        self.find_lost()
        known = slurm.states_of([job.slurm_id for job in self.jobs if job.slurm_id])
        slurm_states = {job.name: known.get(job.slurm_id or "") for job in self.jobs}
        self.on_their_way = {name for name, state in slurm_states.items() if slurm.is_on_its_way(state)}
        return {
            job.name: state_of(self.folder / job.name, job.slurm_id, slurm_states[job.name], self.log(job))
            for job in self.jobs
        }


def plan(arguments: argparse.Namespace) -> list[Job]:
    """The jobs a command asks for: nodes × values × repeats."""
    varied = dict(map(parse_varied, arguments.vary))
    choices = [[(name, value) for value in values] for name, values in varied.items()]
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
    """Plan a sweep and check every job of it; then write and submit it."""
    site = load_site(arguments.site)
    config = find_config(arguments.config).resolve()
    folder = (arguments.folder or site.root() / "sweeps" / f"{config.stem}-{stamp()}").resolve()
    if (folder / "sweep.json").exists():
        raise UserError(f"{folder}: there is a sweep already: use `sweep.py resume {folder}`")
    if arguments.train and arguments.micro_batch:
        raise UserError("--micro_batch tries out how fast a run is: not with --train")
    is_new = not folder.exists()
    request, jobs = request_of(arguments), plan(arguments)
    sweep = Sweep(folder, config, request, "array" if arguments.array else "chain" if arguments.chain else None, jobs)
    try:
        found = check(request, sweep.texts(jobs), sweep.write_runs())
        print("".join(f"note: {note}\n" for note in found.unchecked), end="")
        found.refuse()
        sweep.write_scripts()
    except BaseException:
        if is_new:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    print(f"sweep: {folder}")
    if not arguments.dry_run:
        return sweep.submit(sweep.jobs)
    for name, jobs in sweep.scripts(sweep.jobs).items():
        print(f"\n# {folder / name}.sbatch\n{sweep.text(name, jobs)}", end="")


def show_status(arguments: argparse.Namespace) -> None:
    sweep = Sweep.read(arguments.folder.resolve())
    states = sweep.states()
    rows = [("job", "nodes", "id", "state", "result", "note")]
    for job in sweep.jobs:
        state, note = states[job.name]
        result = figures_of(sweep.folder / job.name) if state != "init" else ""
        rows.append((job.name, str(job.nodes), job.slurm_id or "-", state, result, note[:120]))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(map(str.ljust, row, widths)).rstrip())
    counts = Counter(state for state, _ in states.values())
    print(", ".join(f"{number} {state}" for state, number in counts.items()))


def resume(arguments: argparse.Namespace) -> None:
    """Submit again what neither came to an end that would stay nor is on its way."""
    sweep = Sweep.read(arguments.folder.resolve())
    states = sweep.states()
    missing = [job for job in sweep.jobs if states[job.name][0] not in DONE and job.name not in sweep.on_their_way]
    names = ", ".join(job.name for job in missing)
    print(f"{len(missing)} of {len(sweep.jobs)} jobs are missing{': ' if missing else ''}{names}")
    if not missing or arguments.dry_run:
        return
    changes = {name: value for name in ("time", "exclude") if (value := getattr(arguments, name))}
    sweep.request = replace(sweep.request, **changes)
    runs = {job.name: sweep.folder / job.name / "run.json" for job in missing}
    check(sweep.request, sweep.texts(missing), runs).refuse()
    sweep.write_scripts()
    sweep.submit(missing)


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    if argv[:1] in (["status"], ["resume"]):
        return _parse_later(argv[0], argv[1:])
    parser = argparse.ArgumentParser(
        "launch/sweep.py",
        description=(__doc__ or "").splitlines()[0],
        epilog=f"Later: `sweep.py status FOLDER` {LATER['status']}, `sweep.py resume FOLDER` {LATER['resume']}.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    parser.set_defaults(run=start)
    add_request(parser)
    add("--nodes", type=whole_number(), nargs="+", default=[1])
    add("--repeats", type=whole_number(), default=1)
    add("--vary", action="append", default=[], metavar="NAME=A,B,…", help="hyper-parameters: every combination")
    add("--micro_batch", type=_micro_batches, metavar="FIRST:LAST:STEP|auto", help="micro-batches, in one job")
    order = parser.add_mutually_exclusive_group()
    order.add_argument("--array", action="store_true", help="one job array per number of nodes")
    order.add_argument("--chain", action="store_true", help="one job after the other")
    add("--folder", type=Path, help="the sweep's folder")
    add("--dry_run", action="store_true", help="check, write and show the scripts, submit nothing")
    return parser.parse_args(argv)


def _parse_later(what: str, argv: list[str]) -> argparse.Namespace:
    """Options of a command on a sweep made earlier."""
    parser = argparse.ArgumentParser(f"launch/sweep.py {what}", description=f"It {LATER[what]}.", allow_abbrev=False)
    parser.set_defaults(run=show_status if what == "status" else resume)
    parser.add_argument("folder", type=Path, help="the sweep's folder")
    if what == "resume":
        parser.add_argument("--dry_run", action="store_true", help="say what is missing, submit nothing")
        add_limits(parser)
    return parser.parse_args(argv)


def _micro_batches(text: str) -> str:
    if text != "auto" and not re.fullmatch(r"[1-9]\d*:[1-9]\d*:[1-9]\d*", text):
        raise argparse.ArgumentTypeError(f"{text!r}: expected FIRST:LAST:STEP, such as 8:1024:8, or auto")
    return text


def main(argv: list[str] | None = None) -> int:
    arguments = parse_arguments(sys.argv[1:] if argv is None else argv)
    return exit_code_of(lambda: arguments.run(arguments))


if __name__ == "__main__":
    sys.exit(main())
