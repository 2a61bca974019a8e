"""Jobs of a folder: their record, batch scripts, and one folder per job with its run's JSON."""

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
from clap_ds.config.batch_sizes import ACCUMULATION, GLOBAL_BATCH, BatchSizes
from clap_ds.launch import slurm
from clap_ds.launch.attempt import read_summary
from clap_ds.launch.cluster_profile import (
    ATTEMPTS,
    PROFILE,
    SUBMISSION,
    build_checked,
    check_environment,
    job_file,
)
from clap_ds.launch.sbatch import Request, check_script, format_script
from clap_ds.utils.errors import UserError, did_you_mean
from clap_ds.utils.files import read_object, write_atomically, write_object

_NAME = re.compile(r"(?!\.\.$)[\w.-]+", re.ASCII)
STATE_BY_SLURM_STATE = {
    "TIMEOUT": "timeout",
    "PREEMPTED": "terminated",
    "DEADLINE": "terminated",
    "CANCELLED": "terminated",
}
"""A run's state for jobs that recorded no outcome; other states of SLURM count as failed."""


def clean_name(text: str) -> str:
    """Replace characters that names of jobs and files shouldn't have."""
    return re.sub(r"[^A-Za-z0-9_.-]", "_", text)


def utc_timestamp() -> str:
    """Return a UTC time stamp for a new folder's name."""
    return f"{datetime.now(UTC):%Y%m%dT%H%M%S.%fZ}"


@dataclass
class Job:
    """A run on a number of nodes.

    Attributes:
        name: of the script, the log and the run.
        config: path of the base JSON.
        changes: fields set in it, by dotted name.
        folder: relative to the folder of all jobs.
    """

    name: str
    nodes: int
    config: str
    changes: dict[str, Any] = field(default_factory=dict)
    folder: str = "."
    slurm_id: str | None = None

    def __post_init__(self) -> None:
        # Parts of paths, which others may have written.
        for name in ("name", "folder", "slurm_id"):
            value = getattr(self, name)
            if value is not None and not _NAME.fullmatch(value):
                expected = "letters, digits, '.', '_' and '-'"
                raise ValueError(f"{name}: expected {expected}, found {value!r}")

    def build_run(self, ranks: int) -> dict[str, Any]:
        """Return the run's JSON. UserError if its batch sizes don't fit this number of ranks."""
        content = read_config(Path(self.config))
        for name, value in {**self.changes, "clap.output.run_name": self.name}.items():
            content = with_field(content, name, value)
        try:
            sizes = BatchSizes.from_config(content, ranks)
        except ValueError as error:
            lines = [f"{self.name}: {line}" for line in str(error).splitlines()]
            raise UserError("\n".join(lines)) from None
        if GLOBAL_BATCH in self.changes:
            return sizes.fill(content)
        return content


class JobStatus(NamedTuple):
    """A job's state, a note, and whether it is queued or running.

    The state is a `run_records.schema.State` or, without a process, `not_submitted`, `pending`,
    `requeued` or `held`.
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
            names = [path.name for path in folder.parent.glob("*")]
            hint = did_you_mean(folder.name, names, most_listed=0)
            raise UserError(f"{folder}: no such folder{hint}")
        record = job_file(folder, SUBMISSION)
        content = read_object(record)
        try:
            jobs = [build_checked(Job, job, record) for job in content["jobs"]]
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise UserError(f"{record}: malformed record: {error}") from None
        return cls(folder, jobs, array=content.get("array") is True)

    def save(self) -> None:
        """Write the record."""
        content = {"array": self.array, "jobs": [asdict(job) for job in self.jobs]}
        write_object(self.folder / SUBMISSION, content)

    def script_path(self, job: Job) -> Path:
        """Return the path of a job's script."""
        return self.folder / f"{'array' if self.array else job.name}.sbatch"

    def log_path(self, job: Job) -> Path:
        """Return the path of a job's log."""
        return self.folder / f"{job.name}-{job.slurm_id}.out"

    def slurm_name(self, job: Job) -> str:
        """Return the name under which SLURM knows a job, or the array of all jobs. No other
        folder's jobs have it."""
        # The digest tells apart folders of the same name.
        suffix = "" if self.array or len(self.jobs) == 1 else f"-{job.name}"
        digest = hashlib.sha256(f"{self.folder.resolve()}{suffix}".encode()).hexdigest()
        return clean_name(f"clap-{self.folder.name}{suffix}")[:100] + f"-{digest[:8]}"

    def prepare(self, request: Request) -> None:
        """Write each job's run JSON, cluster profile and script, and check them. UserError, without
        the folder, if a check fails."""
        self.folder.mkdir(parents=True)
        try:
            for job in self.jobs:
                folder = self.folder / job.folder
                folder.mkdir(exist_ok=True)
                run = job.build_run(job.nodes * request.gpus)
                if request.fewer_nodes:
                    # It depends on how many nodes are left.
                    run[ACCUMULATION] = None
                write_object(folder / "run.json", run)
                write_object(folder / PROFILE, asdict(request.profile))
            self._write_scripts(request)
            self.check_scripts(self.jobs, request.submission_options)
            options = [str(self.folder / job.folder / "run.json") for job in self.jobs]
            if request.train:
                options.append("--train")
            if request.submission_options:
                # Jobs on which these depend may make their files.
                options.append("--may_appear")
            print(f"python: {check_environment(request.profile, options)}")
            self.save()
        except BaseException:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise

    def _write_scripts(self, request: Request) -> None:
        # In SLURM's notation, %% is a percent sign, %A_%a an array's task, and %j a job.
        log_folder = str(self.folder).replace("%", "%%")
        for jobs in self._split_into_submissions(self.jobs):
            job = jobs[0]
            log_name = f"{job.name}-%j.out" if len(jobs) == 1 else "%A_%a.out"
            text = format_script(
                request,
                job.nodes,
                self.slurm_name(job),
                f"{log_folder}/{log_name}",
                [self.folder / task.folder for task in jobs],
            )
            write_atomically(self.script_path(job), text)

    def _split_into_submissions(self, jobs: list[Job]) -> list[list[Job]]:
        """Return the jobs that are submitted at once, as a list for each submission."""
        if self.array and jobs:
            return [jobs]
        return [[job] for job in jobs]

    def check_scripts(self, jobs: list[Job], options: Sequence[str]) -> None:
        """Check the script of each number of nodes with more options of sbatch, and print what may
        keep jobs waiting."""
        # Scripts of equally many nodes differ only in names.
        scripts = {job.nodes: self.script_path(job) for job in jobs}
        notes: dict[str, None] = {}
        for path in scripts.values():
            notes |= dict.fromkeys(check_script(path, options))
        for note in notes:
            print(f"note: {note}")

    def submit(self, jobs: list[Job], *options: str) -> Iterator[Job]:
        """Submit jobs with more options of sbatch, and yield each after SLURM accepted it."""
        for submission in self._split_into_submissions(jobs):
            for job in submission:
                # A former submission's outcome would be taken for that of the new one.
                job.slurm_id = None
                job_file(self.folder / job.folder, ATTEMPTS).unlink(missing_ok=True)
            # If this process is killed now, `statuses` finds the jobs by their names.
            self.save()
            tasks = [str(self.jobs.index(job)) for job in submission]
            array_options = [f"--array={','.join(tasks)}"] if self.array else []
            try:
                number = slurm.submit(self.script_path(submission[0]), *array_options, *options)
            except KeyboardInterrupt:
                status_command = f"clap-ds sweep status {self.folder}"
                message = (
                    f"SLURM may have accepted {submission[0].name}: `{status_command}` finds out"
                )
                raise KeyboardInterrupt(message) from None
            for job, task in zip(submission, tasks, strict=True):
                job.slurm_id = f"{number}_{task}" if self.array else number
            self.save()
            yield from submission

    def statuses(self) -> dict[str, JobStatus]:
        """Return the status of each job by name."""
        names = [self.slurm_name(job) for job in self.jobs if not job.slurm_id]
        ids = [job.slurm_id for job in self.jobs if job.slurm_id]
        queue = slurm.find_jobs(ids, names)
        self._record_ids(queue)
        statuses = {}
        for job in self.jobs:
            queued = queue.get(str(job.slurm_id), slurm.QueuedJob("", "", ""))
            folder = self.folder / job.folder
            statuses[job.name] = read_status(folder, job.slurm_id, queued.state, queued.reason)
        return statuses

    def _record_ids(self, queue: dict[str, slurm.QueuedJob]) -> None:
        """Record ids of jobs that were submitted by hand, or by a process that was killed before it
        could do so."""
        for job in self.jobs:
            slurm_id = self._find_slurm_id(job, queue)
            if slurm_id != job.slurm_id:
                job.slurm_id = slurm_id
                self.save()
                print(f"{job.name}: recorded job {slurm_id}, which SLURM has under this job's name")

    def _find_slurm_id(self, job: Job, queue: dict[str, slurm.QueuedJob]) -> str | None:
        """Return the id of the newest job that SLURM has under a job's name. If all of them have
        ended, the recorded id counts."""
        name = self.slurm_name(job)
        suffix = f"_{self.jobs.index(job)}" if self.array else ""
        ended = []
        under_way = []
        for number, queued in queue.items():
            if queued.name != name or not number.endswith(suffix):
                continue
            if queued.state in slurm.TERMINAL_STATES:
                ended.append(number)
            else:
                under_way.append(number)
        if job.slurm_id is None and not under_way:
            under_way = ended
        if not under_way or job.slurm_id in under_way:
            return job.slurm_id
        # An array's task is `JOB_TASK`.
        return max(under_way, key=lambda number: int(number.partition("_")[0]))


def read_status(
    folder: Path, slurm_id: str | None, slurm_state: str, slurm_reason: str
) -> JobStatus:
    """Return a job's status from its `attempts.json`, and its state and reason in SLURM, empty if
    SLURM forgot the job."""
    record: dict[str, Any] = {}
    with suppress(UserError):  # not written yet
        record = read_object(job_file(folder, ATTEMPTS))
    state = str(record.get("state") or "running")
    error = str(record.get("error") or "")
    if slurm_id is None:
        return JobStatus("not_submitted", "")
    # `scontrol hold` leaves a job PENDING, a requeue with hold gives REQUEUE_HOLD.
    is_held = slurm_state == "PENDING" and "held" in slurm_reason.lower()
    if is_held or "HOLD" in slurm_state:
        return JobStatus("held", f"to release it: scontrol release {slurm_id}", True)
    if slurm_state in slurm.PENDING_STATES:
        return JobStatus("requeued" if record else "pending", error or slurm_reason, True)
    if slurm_state and slurm_state not in slurm.TERMINAL_STATES:
        return JobStatus(state, slurm_state.lower(), True)
    if record.get("state") == "running":
        # The supervisor was killed, but the run may have recorded its own end.
        attempts = (folder / "attempts").glob("*")
        last = max(attempts, key=lambda attempt: attempt.lstat().st_mtime, default=folder)
        summary = read_summary(last)
        state = str(summary.get("state") or state)
        error = str(summary.get("error") or error)
    if state != "running":
        return JobStatus(state, error)
    state = STATE_BY_SLURM_STATE.get(slurm_state, "failed")
    return JobStatus(state, error or f"SLURM: {slurm_state or 'no longer known'}; see its log")
