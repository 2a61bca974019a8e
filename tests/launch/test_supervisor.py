"""Complete jobs with a fake launcher, and decisions of a job without hosts."""

import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from clap_ds.distributed.error_file import IMPORT
from clap_ds.launch import supervisor
from clap_ds.launch.attempt import AttemptOutcome, LauncherErrors
from clap_ds.launch.supervisor import RunningJob, copy_output, main
from clap_ds.run_records.lock import FolderLock

# A rank that fails, with the exit code of one that srun ended.
RANK = """
import json, sys
from pathlib import Path
from clap_ds.distributed import error_file
folder = Path(sys.argv[sys.argv.index("--job_folder") + 1])
(run := folder.parents[1] / "run").mkdir()
(folder / "run_directory").write_text(f"{run}\\n")
(run / "summary.json").write_text(json.dumps({"state": "running"}))
error_file.set_error_dir(folder, 0, "n9")
error_file.write_error_file("error", "KeyError: no such key", 1)
sys.exit(143)
"""


@pytest.fixture(autouse=True)
def job_id(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")


def _start_job(
    folder: Path, hosts: int, spare_nodes: int = 0, fewer_nodes: Sequence[int] = ()
) -> RunningJob:
    """Return a job on n1, n2, … before its first attempt."""
    slots = [f"n{number} slots=4\n" for number in range(1, hosts + 1)]
    (folder / "hostfile").write_text("".join(slots))
    (folder / "cluster.json").write_text('{"requeues": 1}')
    return RunningJob(folder, ["bench.py"], spare_nodes, fewer_nodes, auto_requeue=True)


def _read_record(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "attempts.json").read_text()))


def test_error_of_a_rank_reaches_the_records(tmp_path, monkeypatch, capfd, slurm):
    """The program's own error ends the job after one attempt, and not with srun's code for ranks
    that it killed."""
    monkeypatch.setattr(
        supervisor, "launch_command", lambda *arguments: [sys.executable, "-c", RANK, *arguments[4]]
    )
    slurm.write("partitions", "n9 idle\n")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n9")
    _start_job(tmp_path, 1)
    assert main(["--folder", str(tmp_path), "--slots", "4", "--", "bench.py"]) == 1
    assert (tmp_path / "hostfile").read_text() == "n9 slots=4\n"
    assert not (tmp_path / "writer.json").exists(), "the lock"
    record = _read_record(tmp_path)
    assert (record["state"], record["exit_code"]) == ("failed", 1)
    assert "KeyError: no such key" in record["error"]
    assert record["error"] in capfd.readouterr().err
    assert [attempt["error"] for attempt in record["attempts"]] == [record["error"]]
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["error"] == record["error"]


def test_second_job_in_a_folder_changes_nothing(tmp_path, monkeypatch, capsys, slurm):
    job = _start_job(tmp_path, 2)
    job.begin_attempt(job.slots)
    FolderLock(tmp_path).acquire()
    contents = {path: path.read_text() for path in tmp_path.glob("*.*")}
    monkeypatch.setenv("SLURM_JOB_ID", "8")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n9")
    assert main(["--folder", str(tmp_path), "--slots", "4", "--", "bench.py"]) == 2
    assert "SLURM job 7" in capsys.readouterr().err
    assert {path: path.read_text() for path in tmp_path.glob("*.*")} == contents


LOST = AttemptOutcome("failed", "lost n2: down*", 1, ["n2"])


def test_spare_host_replaces_a_lost_one(tmp_path):
    job = _start_job(tmp_path, 4, 2)
    for hosts, lost_host in (("n1 n2", "n1"), ("n2 n3", "n2"), ("n3 n4", "n3")):
        assert [*job.choose_hosts()] == hosts.split()
        job.begin_attempt(job.choose_hosts())
        job.record_outcome(AttemptOutcome("failed", f"lost {lost_host}", 1, [lost_host]))
    assert job.choose_hosts() == {}, "n1 must not be used though it is allocated"
    # SLURM may allocate the same hosts again after a requeue.
    job.start = 1
    job.slots = {"n1": 4, "n2": 4}
    assert [*job.choose_hosts()] == ["n1", "n2"]


def test_job_without_spares_continues_on_fewer_hosts(tmp_path):
    """Four hosts, then two: three don't divide the global batch."""
    job = _start_job(tmp_path, 5, 1, fewer_nodes=[1, 2])
    for hosts, lost_host in (("n1 n2 n3 n4", "n2"), ("n1 n3 n4 n5", "n1"), ("n3 n4", "n4")):
        assert [*job.choose_hosts()] == hosts.split()
        job.begin_attempt(job.choose_hosts())
        job.record_outcome(AttemptOutcome("failed", f"lost {lost_host}", 1, [lost_host]))
    assert [*job.choose_hosts()] == ["n3", "n5"]


def test_failure_that_recurs_on_another_host_is_the_programs(tmp_path):
    job = _start_job(tmp_path, 4)
    outcomes = []
    for host in ("n2", "n3"):
        job.begin_attempt(job.slots)
        outcome = AttemptOutcome("failed", f"rank 3 on {host} exited", 1, [host], IMPORT)
        outcomes.append(job.record_outcome(outcome))
    assert [outcome.at_fault for outcome in outcomes] == [["n2"], []]
    assert "as before on n2" in outcomes[1].error
    assert _read_record(tmp_path)["attempts"][1]["at_fault"] == []


def test_start_that_slurm_ended_is_in_the_record(tmp_path, monkeypatch, slurm):
    """Even if the host of this process went down."""
    _start_job(tmp_path, 3, 1).begin_attempt({"n1": 4, "n2": 4})
    slurm.write("partitions", "n1 down*\nn2 idle\n")
    (tmp_path / "summary.json").write_text('{"state": "running"}')
    (tmp_path / "attempts" / "0").mkdir(parents=True)
    (tmp_path / "attempts" / "0" / "run_directory").write_text(str(tmp_path))
    monkeypatch.setattr(supervisor, "launch_command", lambda *_: ["true"])
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    _start_job(tmp_path, 3, 1).run()
    first, second = _read_record(tmp_path)["attempts"]
    assert (first["state"], first["at_fault"], first["error"]) == (
        "failed",
        ["n1"],
        "lost n1: down*",
    )
    assert (second["hosts"], second["start"]) == (["n2", "n3"], 1)
    assert json.loads((tmp_path / "summary.json").read_text())["error"] == "lost n1: down*"


@pytest.mark.parametrize(
    ("outcome", "earlier", "stop_signal", "requeues"),
    [
        (LOST, "", None, True),
        (LOST, "requeued", None, False),  # as often as allowed
        (LOST, "requeued saved-now", None, True),  # a checkpoint since
        (LOST, "", signal.SIGTERM, False),  # cancelled
        (AttemptOutcome("failed", "KeyError: 'loss'", 1), "", None, False),  # the program's fault
        # Unfinished training.
        (AttemptOutcome("timeout", "saved", 0), "requeued", signal.SIGUSR1, True),
        (AttemptOutcome("timeout", "not saved", 138), "", signal.SIGUSR1, False),
    ],
)
def test_job_is_requeued_if_another_start_may_succeed(
    tmp_path, outcome, earlier, stop_signal, requeues
):
    job = _start_job(tmp_path, 2)
    first = {"requeued": "requeued" in earlier, "saved": "saved" in earlier}
    job.attempts = [first, {"requeued": False, "saved": "saved-now" in earlier}]
    job.stop_signal = stop_signal
    assert job.should_requeue(outcome) == requeues


def test_log_goes_on_after_the_disk_was_full(tmp_path):
    (tmp_path / "output").write_bytes(b"lost" * 2**14 + b"written")
    log = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT)
    full_disk = os.open("/dev/full", os.O_WRONLY)
    with (tmp_path / "output").open("rb") as output:
        copy_output(output, full_disk, LauncherErrors([]))
        assert output.read() == b""  # nothing blocks the ranks
        output.seek(2**16)
        copy_output(output, log, LauncherErrors([]))
    assert (tmp_path / "log").read_bytes() == b"written"
