"""Jobs that were or will be submitted: a folder with a record, batch scripts, and a folder per job with its run's JSON."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import UnionType
from typing import Any, NamedTuple, TypeVar, get_origin, get_type_hints

from clap_ds.config.batch_sizes import ACCUMULATION, GLOBAL_BATCH, BatchSizes
from clap_ds.config.errors import UserError
from clap_ds.config.files import own_folder, read_object, write_atomically, write_object
from clap_ds.config.overrides import read_config, with_field
from clap_ds.launch import slurm
from clap_ds.launch.check_cluster import check_environment, check_script
from clap_ds.launch.sbatch import Request, script

RECORD = "jobs.json"
T = TypeVar("T", "Job", Request)
_NAME = re.compile(r"(?!\.\.$)[\w.-]+", re.ASCII)
_WORDS = re.compile(r"[\w.,:/\[\]-]+", re.ASCII)  # of a time limit, and of hosts
ENDS = {"TIMEOUT": "timeout", "PREEMPTED": "terminated", "DEADLINE": "terminated", "CANCELLED": "terminated"}
"""State (`run_records.metrics_schema.State`) by SLURM's of a job that recorded no end; others have failed."""


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
    slurm_id: str | None = None

    def run(self, ranks: int) -> dict[str, Any]:
        """The run's JSON; a UserError where its batch sizes can't be those of so many ranks."""
        content = read_config(Path(self.config))
        for name, value in {**self.changes, "clap.output.run_name": self.label}.items():
            content = with_field(content, name, value)
        if self.global_batch:
            content |= {GLOBAL_BATCH: self.global_batch, ACCUMULATION: None}
        try:
            sizes = BatchSizes.of(content, ranks)
        except ValueError as error:
            raise UserError("\n".join(f"{self.label}: {line}" for line in str(error).splitlines())) from None
        return sizes.fill(content) if self.global_batch else content


def _checked(kind: type[T], content: dict[str, Any]) -> T:
    """A dataclass's object from JSON; ValueError or TypeError where a field has another type, or text that could be more than
    the names and words that paths and scripts are made of."""
    hints, allowed = get_type_hints(kind), _WORDS if kind is Request else _NAME
    for name, value in content.items():
        hint, words = hints[name], value if isinstance(value, list) else [value] * isinstance(value, str)
        is_of_type = isinstance(value, hint if isinstance(hint, UnionType) else get_origin(hint) or hint)
        is_plain = all(isinstance(each, str) and allowed.fullmatch(each) for each in words)
        if not is_of_type or not (is_plain or name in ("config", "cluster")):
            raise ValueError(f"{name}: expected {hint} of plain words, found {value!r}")
    return kind(**content)


class Standing(NamedTuple):
    """How it stands with a job: `init` or a `run_records.metrics_schema.State`, a note, and whether SLURM has yet to end it."""

    state: str
    note: str
    is_under_way: bool = False


class Jobs:
    def __init__(self, folder: Path, request: Request, jobs: list[Job]) -> None:
        self.folder, self.request, self.jobs = folder, request, jobs

    @classmethod
    def read(cls, folder: Path) -> Jobs:
        """Open what was submitted earlier; a UserError where the record, which others may have written, is of no such form."""
        content = read_object(folder / RECORD)
        try:
            return cls(folder, _checked(Request, content["request"]), [_checked(Job, job) for job in content["jobs"]])
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise UserError(f"{folder / RECORD}: not as launch/ writes it: {error}") from None

    def save(self) -> None:
        jobs = [asdict(job) for job in self.jobs]
        write_object(self.folder / RECORD, {"request": asdict(self.request), "jobs": jobs})

    def text(self, job: Job) -> str:
        """Of its batch script."""
        log = f"{str(self.folder).replace('%', '%%')}/{job.name}-%j.out"  # in SLURM's notation
        own = f"-{job.name}" if len(self.jobs) > 1 else ""
        return script(self.request, job.nodes, f"clap-{self.folder.name}{own}", log, self.folder / job.folder)

    def log(self, job: Job) -> Path:
        return self.folder / f"{job.name}-{job.slurm_id}.out"

    def prepare(self) -> None:
        """Write each job's folder with the run's JSON, and its script; a UserError, and no new folder, where a check fails."""
        is_new = not self.folder.exists()
        try:
            for job in self.jobs:
                with own_folder(self.folder / job.folder) as folder:
                    write_object(folder / "run.json", job.run(job.nodes * self.request.gpus))
            self.check(self.jobs)
            self.write_scripts(self.jobs)
        except BaseException:
            if is_new:
                shutil.rmtree(self.folder, ignore_errors=True)
            raise

    def check(self, jobs: list[Job]) -> None:
        """Try a script for each number of nodes, the site, and every run's JSON; a UserError with what is wrong."""
        site = self.request.load_site()
        notes = [check_script(self.text(job)) for job in {job.nodes: job for job in jobs}.values()]
        for note in filter(None, dict.fromkeys(notes)):
            print(f"note: sbatch: {note}")
        runs = [str(self.folder / job.folder / "run.json") for job in jobs]
        print(f"python: {check_environment(site, runs, train=self.request.train)}")

    def write_scripts(self, jobs: list[Job]) -> None:
        """Write what jobs execute, and the record."""
        for job in jobs:
            write_atomically(self.folder / f"{job.name}.sbatch", self.text(job))
            with own_folder(self.folder / job.folder) as folder:
                write_object(folder / "site.json", asdict(self.request.load_site()))
        self.save()

    def submit(self, jobs: list[Job]) -> Iterator[Job]:
        """Hand jobs to SLURM one by one, each given back when it is taken."""
        for job in jobs:
            job.slurm_id = None
            with own_folder(self.folder / job.folder) as folder:
                (folder / "job.json").unlink(missing_ok=True)
            self.save()
            job.slurm_id = slurm.submit(self.folder / f"{job.name}.sbatch")
            self.save()
            yield job

    def standings(self) -> dict[str, Standing]:
        """By job name."""
        known = slurm.states_of([job.slurm_id for job in self.jobs if job.slurm_id])
        return {
            job.name: standing_of(self.folder / job.folder, job.slurm_id, known.get(job.slurm_id or ""), self.log(job))
            for job in self.jobs
        }


def standing_of(folder: Path, slurm_id: str | None, slurm_state: str | None, log: Path) -> Standing:
    """How it stands with a job, by its `job.json` and SLURM's state of it; that is None for what SLURM forgot."""
    try:
        record = read_object(folder / "job.json")
    except UserError:  # there is none yet
        record = {}
    state = record.get("state")
    if slurm_state and slurm_state not in slurm.OVER:
        return Standing("init" if slurm_state in slurm.WAITING else str(state or "running"), slurm_state.lower(), True)
    if state not in (None, "running"):
        return Standing(str(state), str(record.get("error") or ""))
    if slurm_id is None:
        return Standing("init", "not submitted")
    return Standing(ENDS.get(slurm_state or "", "failed"), f"SLURM: {slurm_state or 'no longer known'}; see {log}")
