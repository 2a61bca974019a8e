"""Complete jobs with a fake launcher, and decisions of a job without hosts."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from clap_ds.distributed.root_cause import KILLED
from clap_ds.launch import supervisor
from clap_ds.launch.attempt import IMPORT, AttemptOutcome
from clap_ds.launch.supervisor import RunningJob, main
from clap_ds.run_records.lock import FolderLock
from tests.launch.conftest import FakeSlurm

ROOT = Path(__file__).resolve().parents[2]
RANK = """
import json, sys
from pathlib import Path
from clap_ds.distributed import error_file
folder = Path(sys.argv[sys.argv.index("--job_folder") + 1])
(run := folder.parents[1] / "run").mkdir()
(folder / "run_directory").write_text(f"{run}\\n")
(run / "summary.json").write_text(json.dumps({"state": "running"}))
error_file.set_error_dir(folder, 0, "n1")
error_file.write_error_file("error", "KeyError: no such key", 1)
sys.exit(143)
"""


@pytest.fixture(autouse=True)
def job_id(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")


def _job(folder: Path, hosts: int, spare_nodes: int = 0) -> RunningJob:
    """Return a job on n1, n2, … before its start."""
    (folder / "hostfile").write_text(
        "".join(f"n{index} slots=4\n" for index in range(1, hosts + 1))
    )
    (folder / "cluster.json").write_text('{"requeues": 1}')
    return RunningJob(folder, ["bench.py"], spare_nodes, auto_requeue=True)


def test_nothing_here_needs_torch_or_pydantic() -> None:
    """The package is found through PYTHONPATH alone, as on hosts without an installation."""
    scripts = sorted(path.stem for path in (ROOT / "launch").glob("*.py"))
    program = f"import sys; [__import__('clap_ds.launch.' + name) for name in {scripts}]; print(sorted(sys.modules))"
    shown = subprocess.run(
        [sys.executable, "-S", "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert not {"torch", "pydantic", "numpy", "deepspeed"} & {
        name.split(".")[0] for name in eval(shown.stdout)
    }


def test_error_of_a_rank_reaches_the_records(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    slurm: FakeSlurm,
) -> None:
    """The program's own error ends the job after one attempt, and not with srun's code for ranks
    that it killed."""
    launch = lambda site, python, slots, hostfile, words, step: [sys.executable, "-c", RANK, *words]  # noqa: E731
    monkeypatch.setattr(supervisor, "launch_command", launch)
    slurm.write("partitions", "n1 idle\n")
    assert _job(tmp_path, 1).run() == 1
    record = json.loads((tmp_path / "attempts.json").read_text())
    assert (record["state"], record["exit_code"]) == ("failed", 1)
    assert "KeyError: no such key" in record["error"]
    assert record["error"] in capfd.readouterr().err
    assert [each["error"] for each in record["attempts"]] == [record["error"]]
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["error"] == record["error"]


def test_a_second_job_in_a_folder_changes_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    slurm: FakeSlurm,
) -> None:
    job = _job(tmp_path, 2)
    job.begin(job.slots)
    FolderLock(tmp_path).acquire()
    before = {path: path.read_text() for path in tmp_path.glob("*.*")}
    monkeypatch.setenv("SLURM_JOB_ID", "8")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n9")
    assert main(["--folder", str(tmp_path), "--slots", "4", "--", "bench.py"]) == 2
    assert "SLURM job 7" in capsys.readouterr().err
    assert {path: path.read_text() for path in tmp_path.glob("*.*")} == before


def test_job_writes_its_hostfile_and_leaves_no_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slurm: FakeSlurm
) -> None:
    _job(tmp_path, 2)
    slurm.write("partitions", "n9 idle\n")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n9")
    monkeypatch.setattr(supervisor, "launch_command", lambda *_: ["false"])
    assert main(["--folder", str(tmp_path), "--slots", "4", "--", "bench.py"]) == 1
    assert (tmp_path / "hostfile").read_text() == "n9 slots=4\n"
    assert not (tmp_path / "writer.json").exists()


LOST = AttemptOutcome("failed", "lost n2: down*", 1, ["n2"])


def test_spare_hosts_take_over(tmp_path: Path) -> None:
    job = _job(tmp_path, 4, 2)
    for hosts, lost in (("n1 n2", "n1"), ("n2 n3", "n2"), ("n3 n4", "n3")):
        assert [*job.choose_hosts()] == hosts.split()
        job.begin(job.choose_hosts())
        job.note(AttemptOutcome("failed", f"lost {lost}", 1, [lost]))
    assert job.choose_hosts() == {}, "n1 must not be used though it is allocated"
    # SLURM may allocate the same hosts again after a requeue.
    job.start = 1
    job.slots = {"n1": 4, "n2": 4}
    assert [*job.choose_hosts()] == ["n1", "n2"]


@pytest.mark.parametrize(
    ("kind", "error"),
    [(KILLED, "rank 3 on n2 exited"), (IMPORT, "rank 3 on n2: ModuleNotFoundError")],
)
def test_failure_that_follows_the_program_is_no_second_hosts(
    tmp_path: Path, kind: str, error: str
) -> None:
    job = _job(tmp_path, 4)
    told = []
    for host in ("n2", "n3", "n4"):
        job.begin(job.slots)
        told.append(job.note(AttemptOutcome("failed", error, 1, [host], kind)))
    assert [outcome.at_fault for outcome in told] == [["n2"], [], []]
    assert told[1].error == f"{error}; as before on n2: not a host's fault"
    assert json.loads((tmp_path / "attempts.json").read_text())["attempts"][1]["at_fault"] == []
    job.begin(job.slots)
    assert job.note(LOST).at_fault == ["n2"]  # not such a failure


def test_a_job_whose_files_have_former_names_goes_on(tmp_path: Path) -> None:
    job = _job(tmp_path, 2)
    job.begin(job.slots)
    (tmp_path / "cluster.json").rename(tmp_path / "site.json")
    (tmp_path / "attempts.json").rename(tmp_path / "job.json")
    job = RunningJob(tmp_path, ["bench.py"])
    assert job.profile.requeues == 1
    assert [attempt["hosts"] for attempt in job.attempts] == [["n1", "n2"]]


def test_start_that_slurm_ended_is_in_the_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slurm: FakeSlurm
) -> None:
    """Even if the host of this process went down."""
    _job(tmp_path, 3, 1).begin({"n1": 4, "n2": 4})
    slurm.write("partitions", "n1 down*\nn2 idle\n")
    for number, state in enumerate(("running", "completed")):
        (run := tmp_path / f"run{number}").mkdir()
        (run / "summary.json").write_text(json.dumps({"state": state}))
    (tmp_path / "attempts" / "0").mkdir(parents=True)
    (tmp_path / "attempts" / "0" / "run_directory").write_text(str(tmp_path / "run0"))
    ranks = f"echo {run} > {tmp_path}/attempts/1/run_directory"
    monkeypatch.setattr(supervisor, "launch_command", lambda *_: ["bash", "-c", ranks])
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert _job(tmp_path, 3, 1).run() == 0
    first, second = json.loads((tmp_path / "attempts.json").read_text())["attempts"]
    assert (first["state"], first["error"], first["at_fault"]) == (
        "failed",
        "lost n1: down*",
        ["n1"],
    )
    assert (second["state"], second["hosts"], second["start"]) == ("completed", ["n2", "n3"], 1)
    assert json.loads((tmp_path / "run0" / "summary.json").read_text())["error"] == "lost n1: down*"


@pytest.mark.parametrize(
    ("outcome", "earlier", "stopped", "asks"),
    [
        (LOST, "", None, True),
        (LOST, "requeued", None, False),  # as often as allowed
        (LOST, "requeued saved", None, False),
        (LOST, "requeued saved-now", None, True),  # a checkpoint since
        (LOST, "", signal.SIGTERM, False),  # cancelled
        (AttemptOutcome("failed", "KeyError: 'loss'", 1), "", None, False),  # the program's fault
        (
            AttemptOutcome("timeout", "saved", 0),
            "requeued",
            signal.SIGUSR1,
            True,
        ),  # unfinished training
        (AttemptOutcome("timeout", "not saved", 138), "", signal.SIGUSR1, False),
    ],
)
def test_when_slurm_is_asked_for_another_start(
    tmp_path: Path,
    outcome: AttemptOutcome,
    earlier: str,
    stopped: signal.Signals | None,
    asks: bool,
) -> None:
    job = _job(tmp_path, 2)
    first = {"requeued": "requeued" in earlier, "saved": "saved" in earlier}
    job.attempts = [first, {"requeued": False, "saved": "saved-now" in earlier}]
    job.stopped = stopped
    assert job.asks_for_another_start(outcome) == asks
