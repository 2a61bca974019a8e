"""Store of submitted jobs: a folder with a record, batch scripts, and one folder per job with its
run's JSON."""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from clap_ds.config.arguments import read_config, with_field
from clap_ds.config.batch_sizes import GLOBAL_BATCH, BatchSizes
from clap_ds.launch import slurm
from clap_ds.launch.attempt import summary_of
from clap_ds.launch.cluster_profile import (
    ATTEMPTS,
    PROFILE,
    SUBMISSION,
    check_environment,
    job_file,
    typed,
)
from clap_ds.launch.sbatch import Request, check_script, script
from clap_ds.utils.errors import UserError, did_you_mean
from clap_ds.utils.files import read_object, write_atomically, write_object

_NAME = re.compile(r"(?!\.\.$)[\w.-]+", re.ASCII)
ENDS = {
    "TIMEOUT": "timeout",
    "PREEMPTED": "terminated",
    "DEADLINE": "terminated",
    "CANCELLED": "terminated",
}
"""`run_records.metrics_schema.State` by SLURM's state, for jobs that recorded no outcome; others
count as failed."""


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
                raise ValueError(
                    f"{name}: expected letters, digits, '.', '_' and '-', found {getattr(self, name)!r}"
                )

    def run(self, ranks: int) -> dict[str, Any]:
        """Return the run's JSON. UserError if its batch sizes don't fit this number of ranks."""
        content = read_config(Path(self.config))
        for name, value in {**self.changes, "clap.output.run_name": self.name}.items():
            content = with_field(content, name, value)
        try:
            sizes = BatchSizes.of(content, ranks)
        except ValueError as error:
            raise UserError(
                "\n".join(f"{self.name}: {line}" for line in str(error).splitlines())
            ) from None
        return sizes.fill(content) if GLOBAL_BATCH in self.changes else content


class JobStatus(NamedTuple):
    """A job's state, a note, and whether it is queued or running.

    The state is a `run_records.metrics_schema.State` or, without a process, `not_submitted`,
    `pending`, `requeued` or `held`.
    """

    state: str
    note: str
    is_under_way: bool = False


class Jobs:
    """Jobs of a folder; as an array they have one script and are submitted at once."""

    def __init__(self, folder: Path, jobs: list[Job], *, array: bool = False) -> None:
        self.folder = folder
        self.jobs = jobs
        self.array = array and len(jobs) > 1

    @classmethod
    def read(cls, folder: Path) -> Jobs:
        """Read the record of submitted jobs. UserError if it is malformed; it is not trusted."""
        if not folder.is_dir():
            names = [each.name for each in folder.parent.glob("*")]
            raise UserError(
                f"{folder}: no such folder{did_you_mean(folder.name, names, most_listed=0)}"
            )
        content = read_object(record := job_file(folder, SUBMISSION))
        try:
            jobs = [typed(Job, job, record) for job in content["jobs"]]
            return cls(folder, jobs, array=content.get("array") is True)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise UserError(f"{record}: malformed record: {error}") from None

    def save(self) -> None:
        write_object(
            self.folder / SUBMISSION,
            {"array": self.array, "jobs": [asdict(job) for job in self.jobs]},
        )

    def script(self, job: Job) -> Path:
        return self.folder / f"{'array' if self.array else job.name}.sbatch"

    def _submissions(self, jobs: list[Job]) -> list[list[Job]]:
        return [jobs] if self.array else [[job] for job in jobs]

    def slurm_name(self, job: Job) -> str:
        """Return the name under which SLURM knows a job, or the array of all jobs. No other
        folder's jobs have it."""
        part = "" if self.array or len(self.jobs) == 1 else f"-{job.name}"
        unique = hashlib.sha256(f"{self.folder.resolve()}{part}".encode()).hexdigest()[:8]
        return (
            re.sub(r"[^A-Za-z0-9_.-]", "_", f"clap-{self.folder.name}{part}")[:100] + f"-{unique}"
        )

    def log(self, job: Job) -> Path:
        return self.folder / f"{job.name}-{job.slurm_id}.out"

    def prepare(self, request: Request) -> None:
        """Write each job's run JSON, cluster profile and script, and check them. UserError, without
          the folder, if a check
        fails."""
        self.folder.mkdir(parents=True)
        try:
            for job in self.jobs:
                folder = self.folder / job.folder
                folder.mkdir(exist_ok=True)
                write_object(folder / "run.json", job.run(job.nodes * request.gpus))
                write_object(folder / PROFILE, asdict(request.profile))
            place = str(self.folder).replace("%", "%%")  # in SLURM's notation
            for first, *others in self._submissions(self.jobs):
                log = f"{place}/%A_%a.out" if others else f"{place}/{first.name}-%j.out"
                folders = [self.folder / job.folder for job in (first, *others)]
                text = script(request, first.nodes, self.slurm_name(first), log, folders)
                write_atomically(self.script(first), text)
            self.check_scripts(self.jobs, request.once)
            options = [str(self.folder / job.folder / "run.json") for job in self.jobs]
            if request.train:
                options.append("--train")
            if request.once:  # other jobs may make its files
                options.append("--may_appear")
            print(f"python: {check_environment(request.profile, options)}")
            self.save()
        except BaseException:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise

    def check_scripts(self, jobs: list[Job], options: Sequence[str]) -> None:
        """Check the script of each number of nodes with more options of sbatch, and print what may
        keep jobs waiting."""
        scripts = {job.nodes: self.script(job) for job in jobs}.values()
        for note in dict.fromkeys(note for path in scripts for note in check_script(path, options)):
            print(f"note: {note}")

    def submit(self, jobs: list[Job], *options: str) -> Iterator[Job]:
        """Submit jobs with more options of sbatch, and yield each after SLURM accepted it."""
        for each in self._submissions(jobs) if jobs else []:
            for job in each:
                job.slurm_id = None
                job_file(self.folder / job.folder, ATTEMPTS).unlink(missing_ok=True)
            self.save()
            tasks = [str(self.jobs.index(job)) for job in each]
            try:
                number = slurm.submit(
                    self.script(each[0]), *[f"--array={','.join(tasks)}"] * self.array, *options
                )
            except KeyboardInterrupt:
                unsure = f"SLURM may have accepted {each[0].name}: `clap-ds sweep status {self.folder}` finds out"
                raise KeyboardInterrupt(unsure) from None
            for job, task in zip(each, tasks, strict=True):
                job.slurm_id = f"{number}_{task}" if self.array else number
            self.save()
            yield from each

    def standings(self) -> dict[str, JobStatus]:
        """Return the status of each job by name."""
        names = [self.slurm_name(job) for job in self.jobs if not job.slurm_id]
        known = slurm.find_jobs([job.slurm_id for job in self.jobs if job.slurm_id], names)
        self._record_ids(known)
        return {
            job.name: status_of(
                self.folder / job.folder, job.slurm_id, *known.get(str(job.slurm_id), ("", ""))[:2]
            )
            for job in self.jobs
        }

    def _record_ids(self, known: dict[str, slurm.QueuedJob]) -> None:
        """Record ids of jobs that were submitted by hand, or by a process that was killed before it
        could do so."""
        for task, job in enumerate(self.jobs):
            name = self.slurm_name(job)
            suffix = f"_{task}" if self.array else ""
            named = [
                number for number in known if known[number].name == name and number.endswith(suffix)
            ]
            candidates = [number for number in named if known[number].state not in slurm.OVER]
            if job.slurm_id is None:
                candidates = candidates or named
            if candidates and job.slurm_id not in candidates:
                job.slurm_id = max(candidates, key=lambda number: int(number.partition("_")[0]))
                self.save()
                print(
                    f"{job.name}: recorded job {job.slurm_id}, which SLURM has under this job's name"
                )


def status_of(folder: Path, slurm_id: str | None, slurm_state: str, reason: str) -> JobStatus:
    """Return a job's status from its `attempts.json`, and its state and reason in SLURM, empty if
    SLURM forgot the job."""
    record: dict[str, Any] = {}
    with suppress(UserError):  # not written yet
        record = read_object(job_file(folder, ATTEMPTS))
    state = str(record.get("state") or "running")
    error = str(record.get("error") or "")
    if slurm_id is None:
        return JobStatus("not_submitted", "")
    if "HOLD" in slurm_state or (slurm_state == "PENDING" and "held" in reason.lower()):
        return JobStatus("held", f"to release it: scontrol release {slurm_id}", True)
    if slurm_state in slurm.WAITING:
        return JobStatus("requeued" if record else "pending", error or reason, True)
    if slurm_state and slurm_state not in slurm.OVER:
        return JobStatus(state, slurm_state.lower(), True)
    if (
        record.get("state") == "running"
    ):  # the supervisor was killed, but the run may have recorded its own end
        attempts = (folder / "attempts").glob("*")
        summary = summary_of(
            max(attempts, key=lambda attempt: attempt.lstat().st_mtime, default=folder)
        )
        state = str(summary.get("state") or state)
        error = str(summary.get("error") or error)
    if state != "running":
        return JobStatus(state, error)
    unsaid = f"SLURM: {slurm_state or 'no longer known'}; see its log"
    return JobStatus(ENDS.get(slurm_state, "failed"), error or unsaid)
