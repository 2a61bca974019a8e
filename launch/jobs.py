"""Jobs that were or will be submitted: a folder with a record, batch scripts, and a folder per job with its run's JSON.

What `submit.py` and `sweep.py` share, and what became of a job, by what it recorded and what SLURM knows of it. Each job's id
is on record before the next one is submitted. Leaves a script's text to `batch_script.py`.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from clap_ds.config.batch_sizes import ACCUMULATION, GLOBAL_BATCH, BatchSizes
from clap_ds.config.changes import read_config, with_field
from clap_ds.config.errors import UserError
from clap_ds.config.files import read_object, write_atomically, write_object
from clap_ds.launch import slurm
from clap_ds.launch.batch_script import Request, script
from clap_ds.launch.site_check import Findings, check_environment, check_scripts

RECORD = "jobs.json"
ENDS = {"TIMEOUT": "timeout", "PREEMPTED": "terminated", "DEADLINE": "terminated", "CANCELLED": "terminated"}
"""State (`record.schema.State`) by SLURM's of a job that recorded no end; others have failed."""


def stamp() -> str:
    """For the name of a folder that isn't there yet."""
    return f"{datetime.now(UTC):%Y%m%dT%H%M%S.%fZ}"


@dataclass
class Job:
    name: str  # of its script and log
    nodes: int
    label: str  # of its run
    config: str  # the run's JSON that this one's is made of
    changes: dict[str, Any] = field(default_factory=dict)  # fields of that by dotted name
    global_batch: int | None = None  # samples of a step on any number of nodes, kept by accumulation
    folder: str = "."  # in that of all jobs
    task: int | None = None  # in the job array
    slurm_id: str | None = None

    def run(self, ranks: int) -> dict[str, Any]:
        """The run's JSON; a UserError where its batch sizes can't be those of so many ranks."""
        content = read_config(Path(self.config))
        for name, value in {**self.changes, "clap.output.label": self.label}.items():
            content = with_field(content, name, value)
        if self.global_batch:
            content |= {GLOBAL_BATCH: self.global_batch, ACCUMULATION: None}
        try:
            sizes = BatchSizes.of(content, ranks)
        except ValueError as error:
            raise UserError("\n".join(f"{self.label}: {line}" for line in str(error).splitlines())) from None
        return sizes.fill(content) if self.global_batch else content


class Jobs:
    def __init__(self, folder: Path, request: Request, jobs: list[Job], array: bool = False) -> None:
        """`array`: a job array for all that take as many nodes."""
        self.folder, self.request, self.jobs, self.array = folder, request, jobs, array
        self.on_their_way: set[str] = set()
        """Names of the jobs that SLURM has still to end, as of the last `states`."""

    @classmethod
    def read(cls, folder: Path) -> Jobs:
        """Open what was submitted earlier; a UserError where the folder holds no such thing."""
        content = read_object(folder / RECORD)
        jobs = [Job(**job) for job in content["jobs"]]
        return cls(folder, Request(**content["request"]), jobs, content["array"])

    def save(self) -> None:
        jobs = [asdict(job) for job in self.jobs]
        write_object(self.folder / RECORD, {"request": asdict(self.request), "array": self.array, "jobs": jobs})

    def write_runs(self) -> None:
        """Write each job's folder with the run's JSON."""
        for job in self.jobs:
            (self.folder / job.folder).mkdir(parents=True, exist_ok=True)
            write_object(self.folder / job.folder / "run.json", job.run(job.nodes * self.request.gpus))

    def scripts(self, jobs: list[Job]) -> dict[str, list[Job]]:
        """Jobs by the script that runs them: one each, or an array for all that take as many nodes."""
        groups: dict[str, list[Job]] = {}
        for job in jobs:
            groups.setdefault(f"array-n{job.nodes}" if self.array else job.name, []).append(job)
        return groups

    def text(self, name: str, jobs: list[Job]) -> str:
        """Text of the batch script of one job, or of an array of jobs."""
        folders = [self.folder / job.folder for job in jobs]
        # In SLURM's notation, in which a folder's own % are doubled.
        log = f"{str(self.folder).replace('%', '%%')}/{name}-%{'A_%a' if self.array else 'j'}.out"
        own = f"-{name}" if len(self.jobs) > 1 else ""
        return script(self.request, jobs[0].nodes, f"clap-{self.folder.name}{own}", log, folders)

    def write_scripts(self) -> None:
        for name, jobs in self.scripts(self.jobs).items():
            write_atomically(self.folder / f"{name}.sbatch", self.text(name, jobs))
        self.save()

    def log(self, job: Job) -> Path:
        ((name, _),) = self.scripts([job]).items()
        return self.folder / f"{name}-{job.slurm_id}.out"

    def check(self, jobs: list[Job]) -> Findings:
        """Try the site, a script for each number of nodes, and every run's JSON. Problems that all runs have are said once."""
        found, site = Findings(), self.request.load_site()
        # Others of as many nodes ask SLURM for the same.
        texts = {group[0].nodes: self.text(name, group) for name, group in self.scripts(jobs).items()}
        check_scripts(texts.values(), found)
        paths = {str(self.folder / job.folder / "run.json"): job.label for job in jobs}
        said = check_environment(site, found, [*paths], train=self.request.train)
        problems: dict[str, str] = {}
        for line in said.splitlines():
            for path in (path for path in paths if f"{path}: " in line):
                problems.setdefault(line.partition(f"{path}: ")[2], paths[path])
        found.problems += [f"{label}: {problem}" for problem, label in problems.items()] or said.splitlines()[-1:]
        if site.cpus_per_task is None and "--exclusive" not in site.sbatch:
            found.notes.append("cores: with neither cpus_per_task nor --exclusive in the site, all ranks may get one")
        return found

    def submit(self, jobs: list[Job]) -> Iterator[tuple[str, str, Job]]:
        """Hand jobs to SLURM; the name of each script, its number and a job of it, as they are taken."""
        everyone = self.scripts(self.jobs)
        for name, group in self.scripts(jobs).items():
            for job in group:
                job.task = everyone[name].index(job) if self.array else None
                job.slurm_id = None
                (self.folder / job.folder / "job.json").unlink(missing_ok=True)
            options = [f"--array={','.join(str(job.task) for job in group)}"] if self.array else []
            self.save()
            number = slurm.submit(self.folder / f"{name}.sbatch", *options)
            for job in group:
                job.slurm_id = f"{number}_{job.task}" if self.array else number
            self.save()
            yield name, number, group[0]

    def states(self) -> dict[str, tuple[str, str]]:
        """By job name its state, init or one of `record.schema.State`, and a note."""
        known = slurm.states_of([job.slurm_id for job in self.jobs if job.slurm_id])
        states = {job.name: known.get(job.slurm_id or "") for job in self.jobs}
        self.on_their_way = {name for name, state in states.items() if slurm.is_on_its_way(state)}
        return {
            job.name: state_of(self.folder / job.folder, job.slurm_id, states[job.name], self.log(job))
            for job in self.jobs
        }

    def prepare(self) -> None:
        """Write and check everything, and print what couldn't be checked; where something is wrong, no new folder stays.

        Raises:
            UserError: something is wrong.
        """
        is_new = not self.folder.exists()
        try:
            self.write_runs()
            found = self.check(self.jobs)
            found.refuse()
            self.write_scripts()
        except BaseException:
            if is_new:
                shutil.rmtree(self.folder, ignore_errors=True)
            raise
        print("".join(f"note: {note}\n" for note in found.notes), end="")


def state_of(folder: Path, slurm_id: str | None, slurm_state: str | None, log: Path) -> tuple[str, str]:
    """State of a job, `init` or one of `record.schema.State`, and a note; `slurm_state` is None for what SLURM forgot."""
    record = recorded(folder)
    state, note = record.get("state"), str(record.get("error") or "")
    if slurm.is_on_its_way(slurm_state):
        assert slurm_state is not None
        return ("init" if slurm_state in slurm.WAITING else state or "running"), slurm_state.lower()
    if state not in (None, "running"):
        return str(state), note
    if slurm_id is None:
        return "init", "not submitted"
    ended = ENDS.get(slurm_state or "", "failed")
    if not log.exists():
        return (ended if slurm_state else "terminated"), f"{(slurm_state or 'cancelled').lower()} before it began"
    return ended, f"SLURM: {slurm_state or 'no longer known'}; see {log}"


def recorded(folder: Path) -> dict[str, Any]:
    """`job.json` of a job's folder; empty where there is none yet, or only half of one."""
    try:
        return read_object(folder / "job.json")
    except UserError:
        return {}


def figures_of(folder: Path) -> str:
    """The numbers that matter of what a job has measured or learned so far; empty where there are none."""
    try:
        summary = read_object(Path(recorded(folder)["run_directory"]) / "summary.json")
    except (KeyError, TypeError, UserError):
        return ""
    if "loss" in summary and summary.get("command") == "train":
        return f"loss {summary['loss']:.4f} at step {summary.get('step', 0):,}"
    rate = summary.get("samples_per_s_per_gpu", {}).get("mean")
    return f"{rate:,.2f} samples/s/GPU" if rate else ""
