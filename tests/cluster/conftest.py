"""A SLURM cluster shared by all tests here, and jobs submitted as users do."""

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

from clap_ds.config.arguments import with_field
from clap_ds.launch.cluster_profile import load_profile
from clap_ds.launch.sbatch import Request, format_script
from tests import needs
from tests.cluster.slurm_cluster import TERMINAL_STATES, SlurmCluster
from tests.conftest import ROOT, micro_run

# Matches the command line of everything that a job starts.
PROGRAMS = (
    r"clap_ds/(?:bench|train)\.py|deepspeed\.launcher|distributed\.run|clap_ds\.launch\.supervisor"
)
# A hang is detected after a minute, or later if the run paused longer before.
DETECTION_LIMIT_S = 240
STEPS = 80
TRAINING: dict[str, Any] = {
    "model": {"preset": "micro"},
    "train": {"max_samples": 16 * STEPS, "log_every_steps": 1},
}
BENCH = {"windows": 2, "steps_per_window": 2, "breakdown_steps": 0}
ENDLESS = {"bench": {"warmup_steps": 100000, **BENCH}}


@pytest.fixture(scope="session")
def cluster() -> Iterator[SlurmCluster]:
    """Three nodes and a controller."""
    needs.programs(*needs.CLUSTER)
    needs.namespaces()
    with contextlib.closing(SlurmCluster(3)) as cluster:
        yield cluster


@dataclass
class SubmittedJob:
    """A job on the cluster, and its records."""

    cluster: SlurmCluster
    number: str
    folder: Path

    @property
    def state(self) -> str:
        """Return SLURM's state of the job."""
        return self.cluster.job(self.number)["JobState"]

    def wait(self, timeout_s: float = 300, confirm_s: float = 30) -> str:
        """Wait until it ends and return its state. It stays COMPLETING if a node can't be reached
        to confirm the end; a job that SLURM requeues is COMPLETING only briefly."""
        completing_since = None

        def is_over() -> bool:
            nonlocal completing_since
            state = self.state
            if state != "COMPLETING":
                completing_since = None
                return state in TERMINAL_STATES
            if completing_since is None:
                completing_since = time.monotonic()
            return time.monotonic() - completing_since > confirm_s

        self.cluster.wait_until(is_over, timeout_s, f"the end of job {self.number}")
        return self.state

    def check_end(self, state: str, exit_code: int) -> None:
        """Wait until it ends in the expected state, with no process left."""
        assert self.wait() == state, self.output
        assert self.cluster.job(self.number)["ExitCode"] == f"{exit_code}:0", self.output
        assert self.cluster.left_behind(PROGRAMS) == {}

    @property
    def output(self) -> str:
        return "".join(path.read_text() for path in self.folder.glob("*.out"))

    @property
    def record(self) -> dict[str, Any]:
        """Return `attempts.json`."""
        return dict(json.loads((self.folder / "job" / "attempts.json").read_text()))

    @property
    def runs(self) -> list[Path]:
        return sorted(path for path in (self.folder / "runs").glob("*-*Z*") if path.is_dir())

    @property
    def summaries(self) -> list[dict[str, Any]]:
        """Return `summary.json` of each run."""
        return [json.loads((run / "summary.json").read_text()) for run in self.runs]

    def wait_for_restart(self) -> None:
        """Wait until SLURM has requeued the job and started it again."""
        restarts = lambda: self.cluster.job(self.number)["Restarts"]  # noqa: E731
        self.cluster.wait_until(lambda: restarts() == "1", DETECTION_LIMIT_S, "another start")

    def wait_for_steps(self, num_runs: int = 1) -> None:
        """Wait until the run, or a restart, has made some steps, which the hang limit depends
        on."""

        def have_stepped() -> bool:
            assert self.state not in TERMINAL_STATES - {"COMPLETING"}, self.output
            metrics = self.folder.glob("runs/*/metrics.jsonl")
            return sum(path.read_bytes().count(b"\n") >= 3 for path in metrics) >= num_runs

        self.cluster.wait_until(have_stepped, 300, f"steps of job {self.number}")

    def ranks(self, host: str) -> dict[str, dict[str, str]]:
        """Return the environments of the ranks on a host, by process id on the host."""
        pattern = r"python\S* -u \S*clap_ds/(?:bench|train)\.py"
        environments = {}
        for line in self.cluster.processes(pattern).get(host, []):
            pid, program = line.split()[:2]
            text = self.cluster.run(host, "cat", f"/proc/{pid}/environ", check=False).stdout
            variables = dict(entry.partition("=")[::2] for entry in text.split("\0"))
            if program != "srun" and variables.get("SLURM_JOB_ID") == self.number:
                environments[pid] = variables
        return environments


def write_profile(folder: Path, **changes: Any) -> str:
    """Write a profile of the test cluster, with runs in the test's folder, and return its path."""
    profile = {
        "gpus_per_node": 2,
        "python": sys.executable,
        "run_root": str(folder / "runs"),
        "requeues": 0,
        "environment": {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "CLAP_TEST_LIST": "a,b"},
        **changes,
    }
    (folder / "cluster.json").write_text(json.dumps(profile))
    return str(folder / "cluster.json")


Submit = Callable[..., SubmittedJob]


@pytest.fixture
def submit(cluster: SlurmCluster, tmp_path: Path) -> Iterator[Submit]:
    """Submit a micro run: `submit(nodes, launcher, request={…}, profile={…}, clap={…})`.

    Each job has its own folder. `request`: fields of the `Request`; `profile`: changes of the
    profile; `variables`: environment of the submitting shell; other arguments: changes of the run.
    The network is slow, so that ranks wait for it and leave processors to other tests.
    """
    cluster.wait_until_idle()

    def start(
        nodes: int,
        launcher: str = "slurm",
        *,
        sbatch: tuple[str, ...] = (),
        request: dict[str, Any] | None = None,
        variables: dict[str, str] | None = None,
        profile: dict[str, Any] | None = None,
        **changes: Any,
    ) -> SubmittedJob:
        folder = tmp_path / f"job{len([*tmp_path.glob('job*')]) + 1}"
        job_folder = folder / "job"
        job_folder.mkdir(parents=True)
        (folder / "runs").mkdir()
        output = {"run_name": "micro", "dir": str(folder / "runs")}
        run = with_field(micro_run(**changes), "clap.output", output)
        (job_folder / "run.json").write_text(json.dumps(run))
        cluster_profile = load_profile(write_profile(folder, launcher=launcher, **(profile or {})))
        (job_folder / "cluster.json").write_text(json.dumps(asdict(cluster_profile)))
        fields = Request(cluster_profile, 2, None, time="00:10:00", **(request or {}))
        text = format_script(fields, nodes, "micro", f"{folder}/%j.out", [job_folder])
        (folder / "job.sbatch").write_text(text)
        shell = [f"{name}={value}" for name, value in (variables or {}).items()]
        command = ["sbatch", "--parsable", "--gpus-per-node=2", *sbatch, str(folder / "job.sbatch")]
        number = cluster.run("ctl", *shell, *command, folder=ROOT).stdout.strip()
        return SubmittedJob(cluster, number, folder)

    with cluster.slow_network("8mbit"):
        yield start
    cluster.run("ctl", "scancel", "--user=root")  # left by a failed test
