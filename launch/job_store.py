"""Store of submitted jobs: a folder with a record, batch scripts, and one folder per job with its run's JSON."""

from __future__ import annotations

import re
import shutil
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from clap_ds.config.batch_sizes import GLOBAL_BATCH, BatchSizes
from clap_ds.config.errors import UserError, did_you_mean
from clap_ds.config.files import own_folder, read_object, write_atomically, write_object
from clap_ds.config.overrides import read_config, with_field
from clap_ds.launch import slurm
from clap_ds.launch.cluster_profile import check_environment, typed
from clap_ds.launch.sbatch import Request, script

RECORD = "jobs.json"
_NAME = re.compile(r"(?!\.\.$)[\w.-]+", re.ASCII)
ENDS = {"TIMEOUT": "timeout", "PREEMPTED": "terminated", "DEADLINE": "terminated", "CANCELLED": "terminated"}
"""`run_records.metrics_schema.State` by SLURM's state, for jobs that recorded no outcome; others count as failed."""


def stamp() -> str:
    """Return a UTC time stamp for a new folder's name."""
    return f"{datetime.now(UTC):%Y%m%dT%H%M%S.%fZ}"


@dataclass
class Job:
    name: str  # of the script, the log and the run
    nodes: int
    config: str  # path of the base JSON
    changes: dict[str, Any] = field(default_factory=dict)  # fields set in it, by dotted name
    folder: str = "."  # relative to the folder of all jobs
    slurm_id: str | None = None

    def __post_init__(self) -> None:
        for name in ("name", "folder", "slurm_id"):  # parts of paths; others may have written them
            if not _NAME.fullmatch(getattr(self, name) or "-"):
                raise ValueError(f"{name}: expected letters, digits, '.', '_' and '-', found {getattr(self, name)!r}")

    def run(self, ranks: int) -> dict[str, Any]:
        """Return the run's JSON. UserError if its batch sizes don't fit this number of ranks."""
        content = read_config(Path(self.config))
        for name, value in {**self.changes, "clap.output.run_name": self.name}.items():
            content = with_field(content, name, value)
        try:
            sizes = BatchSizes.of(content, ranks)
        except ValueError as error:
            raise UserError("\n".join(f"{self.name}: {line}" for line in str(error).splitlines())) from None
        return sizes.fill(content) if GLOBAL_BATCH in self.changes else content


class JobStatus(NamedTuple):
    """A job's state, a note, and whether it is queued or running.

    The state is a `run_records.metrics_schema.State` or, without a process, `not_submitted`, `pending`, `requeued` or `held`.
    """

    state: str
    note: str
    is_under_way: bool = False


class Jobs:
    def __init__(self, folder: Path, request: Request, jobs: list[Job]) -> None:
        self.folder, self.request, self.jobs = folder, request, jobs

    @classmethod
    def read(cls, folder: Path) -> Jobs:
        """Read the record of submitted jobs. UserError if it is malformed; it is not trusted."""
        if not folder.is_dir():
            names = [each.name for each in folder.parent.glob("*")]
            raise UserError(f"{folder}: no such folder{did_you_mean(folder.name, names, most_listed=0)}")
        content = read_object(record := folder / RECORD)
        try:
            jobs = [typed(Job, job, record) for job in content["jobs"]]
            return cls(folder, typed(Request, content["request"], record), jobs)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise UserError(f"{record}: malformed record: {error}") from None

    def save(self) -> None:
        jobs = [asdict(job) for job in self.jobs]
        write_object(self.folder / RECORD, {"request": asdict(self.request), "jobs": jobs})

    def text(self, job: Job) -> str:
        """Return the job's batch script."""
        log = f"{str(self.folder).replace('%', '%%')}/{job.name}-%j.out"  # in SLURM's notation
        own = f"-{job.name}" if len(self.jobs) > 1 else ""
        return script(self.request, job.nodes, f"clap-{self.folder.name}{own}", log, self.folder / job.folder)

    def log(self, job: Job) -> Path:
        return self.folder / f"{job.name}-{job.slurm_id}.out"

    def prepare(self) -> None:
        """Write and check each job's run JSON and script. UserError if a check fails; a new folder is then removed."""
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
        """Check one script per number of nodes, the site and every run's JSON. UserError lists the problems."""
        site = self.request.load_site()
        notes = [slurm.check_script(self.text(job)) for job in {job.nodes: job for job in jobs}.values()]
        for note in filter(None, dict.fromkeys(notes)):
            print(f"note: sbatch: {note}")
        runs = [str(self.folder / job.folder / "run.json") for job in jobs]
        print(f"python: {check_environment(site, runs, train=self.request.train)}")

    def write_scripts(self, jobs: list[Job]) -> None:
        """Write the jobs' scripts and cluster profiles, and the record."""
        for job in jobs:
            write_atomically(self.folder / f"{job.name}.sbatch", self.text(job))
            with own_folder(self.folder / job.folder) as folder:
                write_object(folder / "site.json", asdict(self.request.load_site()))
        self.save()

    def submit(self, job: Job) -> None:
        """Submit a job, and record its id."""
        job.slurm_id = None
        with own_folder(self.folder / job.folder) as folder:
            (folder / "job.json").unlink(missing_ok=True)
        self.save()
        job.slurm_id = slurm.submit(self.folder / f"{job.name}.sbatch")
        self.save()

    def standings(self) -> dict[str, JobStatus]:
        """Return the status of each job by name."""
        known = slurm.states_of([job.slurm_id for job in self.jobs if job.slurm_id])
        return {
            job.name: status_of(self.folder / job.folder, job.slurm_id, *known.get(str(job.slurm_id), ("", "")))
            for job in self.jobs
        }


def status_of(folder: Path, slurm_id: str | None, slurm_state: str, reason: str) -> JobStatus:
    """Return a job's status from its `job.json`, and its state and reason in SLURM; empty if SLURM no longer knows the job."""
    record: dict[str, Any] = {}
    with suppress(UserError):  # not written yet
        record = read_object(folder / "job.json")
    state, error = str(record.get("state") or "running"), str(record.get("error") or "")
    if slurm_id is None:
        return JobStatus("not_submitted", "")
    if "HOLD" in slurm_state or (slurm_state == "PENDING" and "held" in reason.lower()):
        return JobStatus("held", f"to release it: scontrol release {slurm_id}", True)
    if slurm_state in slurm.WAITING:
        return JobStatus("requeued" if record else "pending", error or reason, True)
    if slurm_state and slurm_state not in slurm.OVER:
        return JobStatus(state, slurm_state.lower(), True)
    if state != "running":
        return JobStatus(state, error)
    unsaid = f"SLURM: {slurm_state or 'no longer known'}; see its log"
    return JobStatus(ENDS.get(slurm_state, "failed"), error or unsaid)
