"""A SLURM cluster shared by all tests here, and jobs submitted as users do."""

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

from clap_ds.config.arguments import with_field
from clap_ds.launch.cluster_profile import load_profile
from clap_ds.launch.sbatch import Request, script
from tests import needs
from tests.cluster.slurm_cluster import OVER, SlurmCluster
from tests.conftest import ROOT, micro_run

RANKS = (
    r"clap_ds/(?:bench|train)\.py|deepspeed\.launcher|distributed\.run|clap_ds\.launch\.supervisor"
)
"""Matches the command line of everything a job starts."""
STEPS = 80
TRAINING: dict[str, Any] = {
    "model": {"preset": "micro"},
    "train": {"max_samples": 16 * STEPS, "log_every_steps": 1},
}
ENDLESS = {
    "bench": {"warmup_steps": 100000, "windows": 2, "steps_per_window": 2, "breakdown_steps": 0}
}


@pytest.fixture(scope="session")
def cluster() -> Iterator[SlurmCluster]:
    """Three nodes and a controller."""
    needs.programs(*needs.CLUSTER)
    needs.namespaces()
    with contextlib.closing(SlurmCluster(3)) as cluster:
        yield cluster


@dataclass
class Submitted:
    """A job on the cluster, and its records."""

    cluster: SlurmCluster
    number: str
    folder: Path

    def wait(self, timeout: float = 300, confirm_s: float = 30) -> dict[str, str]:
        """Wait until it ends and return its fields. It stays COMPLETING if a node can't be reached
        to confirm the end."""
        state = lambda: self.cluster.job(self.number)["JobState"]  # noqa: E731
        self.cluster.wait_until(lambda: state() in OVER, timeout, f"the end of job {self.number}")
        with contextlib.suppress(AssertionError):
            self.cluster.wait_until(
                lambda: state() != "COMPLETING", confirm_s, "nodes to confirm the end"
            )
        return self.cluster.job(self.number)

    def ends(self, state: str, exit_code: int) -> None:
        """Wait until it ends in the expected state, with no process left."""
        job = self.wait()
        assert (job["JobState"], job["ExitCode"]) == (state, f"{exit_code}:0"), self.output
        assert self.cluster.left_behind(RANKS) == {}

    @property
    def output(self) -> str:
        return "".join(path.read_text() for path in self.folder.glob("*.out"))

    @property
    def record(self) -> dict[str, Any]:
        """`attempts.json`."""
        return dict(json.loads((self.folder / "job" / "attempts.json").read_text()))

    @property
    def runs(self) -> list[Path]:
        return sorted(path for path in (self.folder / "runs").glob("*-*Z*") if path.is_dir())

    @property
    def summaries(self) -> list[dict[str, Any]]:
        """`summary.json` of each run."""
        return [json.loads((run / "summary.json").read_text()) for run in self.runs]

    def wait_for_steps(self, runs: int = 1) -> None:
        """Wait until the run, or a restart, has made some steps, which the hang limit depends
        on."""
        over = lambda: self.cluster.job(self.number)["JobState"] in OVER - {"COMPLETING"}  # noqa: E731
        files = lambda: self.folder.glob("runs/*/metrics.jsonl")  # noqa: E731
        stepped = lambda: sum(path.read_bytes().count(b"\n") >= 3 for path in files()) >= runs  # noqa: E731
        self.cluster.wait_until(lambda: stepped() or over(), 300, f"steps of job {self.number}")
        assert not over(), self.output

    def ranks(self, host: str) -> dict[str, dict[str, str]]:
        """Return the environments of the ranks on a host, by process id on the host."""
        lines = self.cluster.processes(r"python\S* -u \S*clap_ds/(?:bench|train)\.py").get(host, [])
        found = {}
        for pid, program in (line.split()[:2] for line in lines):
            text = self.cluster.run(host, "cat", f"/proc/{pid}/environ", check=False).stdout
            variables = dict(line.partition("=")[::2] for line in text.split("\0"))
            if program != "srun" and variables.get("SLURM_JOB_ID") == self.number:
                found[pid] = variables
        return found


def site_file(folder: Path, **changes: Any) -> str:
    """Return a site for the test cluster that writes runs to the test's folder."""
    variables = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "CLAP_TEST_LIST": "Tree,Ring"}
    site = {
        "gpus_per_node": 2,
        "python": sys.executable,
        "run_root": str(folder / "runs"),
        "requeues": 0,
    }
    site |= {"environment": variables}
    (folder / "cluster.json").write_text(json.dumps({**site, **changes}))
    return str(folder / "cluster.json")


Submit = Callable[..., Submitted]


@pytest.fixture
def submit(cluster: SlurmCluster, tmp_path: Path) -> Iterator[Submit]:
    """Submit the script of a micro run: `submit(nodes, launcher, sbatch=(…), site={…}, clap={…})`.

    Each job has its own folder. `variables`: environment of the submitting shell; `site`: changes
    of the profile; `asks`: other fields of the `Request`. The network is slow, so that ranks wait
    for it and leave processors to other tests.
    """
    cluster.wait_until_idle()

    def start(
        nodes: int, launcher: str = "slurm", *, sbatch: tuple[str, ...] = (), asks: dict[str, Any] | None = None,
        variables: dict[str, str] | None = None, site: dict[str, Any] | None = None, **changes: Any,
    ) -> Submitted:  # fmt: skip
        folder = tmp_path / f"job{len([*tmp_path.glob('job*')]) + 1}"
        (folder / "job").mkdir(parents=True)
        (folder / "runs").mkdir()
        output = {"run_name": "micro", "dir": str(folder / "runs")}
        run = with_field(micro_run(**changes), "clap.output", output)
        (folder / "job" / "run.json").write_text(json.dumps(run))
        profile = load_profile(site_file(folder, launcher=launcher, **(site or {})))
        request = Request(profile, 2, None, time="00:10:00", **(asks or {}))
        (folder / "job" / "cluster.json").write_text(json.dumps(asdict(profile)))
        text = script(request, nodes, "micro", f"{folder}/%j.out", [folder / "job"])
        (folder / "job.sbatch").write_text(text)
        given = [f"{name}={value}" for name, value in (variables or {}).items()]
        words = ["sbatch", "--parsable", "--gpus-per-node=2", *sbatch, str(folder / "job.sbatch")]
        return Submitted(
            cluster, cluster.run("ctl", *given, *words, folder=ROOT).stdout.strip(), folder
        )

    with cluster.slow_network("8mbit"):
        yield start
    cluster.run("ctl", "scancel", "--user=root")  # left by a failed test
