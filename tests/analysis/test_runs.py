"""The one way to measured numbers: what it makes of directories, logs, tables, gaps and rubbish."""

import gzip
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from clap_ds.analysis import runs
from clap_ds.analysis.runs import read_runs
from clap_ds.config.errors import UserError
from tests.analysis.samples import DATA, ROOT, TINY, command, given, record, running_log, write

LOG = DATA / "deepspeed_2ranks.log"


def test_counts_not_in_the_log_are_asked_for_by_option_name(tmp_path: Path) -> None:
    log = write(tmp_path / "bare.log", running_log([1.0] * 20, batch=64))
    with pytest.raises(UserError, match=r"bare\.log.*--nodes.*--gpus"):
        read_runs([log], given())
    with pytest.raises(UserError, match="2 GPUs on 4 nodes"):
        read_runs([log], given(nodes=4, gpus=2))
    (run,) = read_runs([log], given(nodes=2, gpus=8, model="micro", micro_batch=8, peak_tflops=10.0))
    assert (run.nodes, run.gpus, run.rate, run.step_time_s) == (2, 8, pytest.approx(8.0), pytest.approx(1.0))
    assert (run.model, run.batch_per_gpu, run.peak_tflops) == ("micro", 8, 10.0)


def test_the_input_is_believed_before_the_options() -> None:
    (run,) = read_runs([LOG], given(nodes=7, gpus=28, micro_batch=1))
    assert (run.nodes, run.gpus, run.batch_per_gpu) == (1, 2, 64)
    assert run.step_time_s == pytest.approx(64 / (run.rate or 0))
    assert read_runs([TINY], given(model="micro"))[0].model == "htsat_tiny_roberta_base"


def test_an_input_without_a_run_is_named_and_the_rest_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for nodes in (1, 2):
        record(tmp_path / f"run-{nodes}", [], state="failed", num_nodes=nodes, world_size=4 * nodes)
    (tmp_path / "elsewhere" / "empty").mkdir(parents=True)
    assert [run.gpus for run in read_runs([tmp_path], given())] == [4, 8]
    inputs = [write(tmp_path / "bad.log", "hello"), tmp_path / "gone", tmp_path / "elsewhere" / "empty"]
    reasons = (
        "bad.log: no throughput lines",
        "gone: no such file",
        "elsewhere/empty: neither a run directory nor a folder of them",
    )
    with pytest.raises(UserError, match=".*; .*".join(reasons)):
        read_runs(inputs, given())
    command(monkeypatch, runs.main, *inputs, tmp_path / "run-1")
    printed = capsys.readouterr()
    assert printed.err.count("warning") == 3
    assert all(f"{tmp_path}/{reason}" in printed.err for reason in reasons)
    assert printed.out.endswith("run-1: model not stated, 1 node × 4 GPUs, failed\n  no complete window was measured\n")


def test_a_folder_that_cannot_be_read_is_named_and_its_neighbours_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    record(tmp_path / "run", [], state="failed", num_nodes=1, world_size=4)
    closed, listed = tmp_path / "closed", Path.iterdir
    closed.mkdir()

    def iterdir(self: Path) -> Iterator[Path]:
        if self == closed:
            raise PermissionError(13, "Permission denied", str(self))
        return listed(self)

    monkeypatch.setattr(Path, "iterdir", iterdir)
    assert [run.gpus for run in read_runs([tmp_path], given())] == [4]
    assert capsys.readouterr().err == f"warning: {closed}: can't be read (Permission denied); going on without it\n"
    with pytest.raises(UserError, match="Permission denied"):
        read_runs([closed], given())


def test_runs_of_sweeps_are_found_and_other_folders_passed_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As `runs/*` names them, and folders given as a whole."""
    sweep = tmp_path / "sweeps" / "tiny"
    places = [tmp_path / "run-1", *(sweep / "runs" / f"n{nodes:03}" for nodes in (2, 4))]
    for number, place in enumerate(places):
        place.mkdir(parents=True)
        record(place, [], state="failed", num_nodes=2**number, world_size=2**number)
    for folder in (sweep / "n002", tmp_path / "jobs" / "tiny-1"):
        folder.mkdir(parents=True)
        (folder / "run.json").write_text("{}")
        (folder / "job.json").write_text("{}")
    every = sorted(tmp_path.iterdir())
    assert [path.name for path in every] == ["jobs", "run-1", "sweeps"]
    for inputs, gpus in (([sweep], [2, 4]), (every, [1, 2, 4]), ([tmp_path], [1, 2, 4])):
        assert [run.gpus for run in read_runs(inputs, given())] == gpus
    assert capsys.readouterr().err == ""
    record(tmp_path / "killed", [], state="running")
    assert len(read_runs([tmp_path], given())) == 3
    assert capsys.readouterr().err.startswith(f"warning: {tmp_path / 'killed'}: doesn't state the number of nodes")
    with pytest.raises(UserError, match="jobs: neither a run directory nor a folder of them"):
        read_runs([tmp_path / "jobs"], given())


def test_a_run_given_twice_or_copied_counts_once_and_that_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "runs"
    shutil.copytree(DATA / "record_2ranks", folder / "first")
    shutil.copytree(DATA / "record_2ranks", folder / "copy")
    other = json.loads((folder / "first" / "summary.json").read_text())
    other["samples_per_s_per_gpu"]["windows"][0] *= 1.01
    shutil.copytree(folder / "first", folder / "other")
    (folder / "other" / "summary.json").write_text(json.dumps(other))
    failed = [write(tmp_path / f"{name}.log", "Traceback (most recent call last)\n") for name in ("f", "g")]
    options = given(nodes=1, gpus=2)
    assert len(read_runs([folder, LOG, write(tmp_path / "c.log", LOG.read_bytes())], options)) == 3
    copies = f"{folder / 'copy'}, {folder / 'first'}; {LOG}, {tmp_path / 'c.log'}"
    assert capsys.readouterr().err == f"note: 4 of 5 inputs are 2 runs: {copies}; each counts once\n"
    assert len(read_runs([write(tmp_path / "c.log.gz", gzip.compress(LOG.read_bytes())), LOG], options)) == 1
    assert len(read_runs([*failed, write(tmp_path / "h.log", "\nTraceback (most recent call last)\n")], options)) == 2
    assert len(read_runs([TINY, TINY], options)) == len(read_runs([TINY], options)) > 5
    assert "2 of 2 inputs are the same run: " in capsys.readouterr().err


def test_a_folder_and_what_is_in_it_are_the_same_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`runs runs/*`; also where nothing was measured, so that their contents can't tell."""
    for name in ("a", "b"):
        record(tmp_path / name, [], state="failed", num_nodes=1, world_size=1, finished=name)
    assert len(read_runs([tmp_path, *sorted(tmp_path.iterdir())], given())) == 2
    assert f"note: 4 of 4 inputs are 2 runs: {tmp_path / 'a'} (2 times); " in capsys.readouterr().err
    for name in ("c", "d"):
        record(tmp_path / name, [], state="running", num_nodes=1, world_size=1)
    assert len(read_runs([tmp_path / "c", tmp_path / "d"], given())) == 2
    (tmp_path / "jobs").mkdir()
    read_runs([tmp_path, *sorted(tmp_path.iterdir())], given())
    assert "jobs" not in capsys.readouterr().err


@pytest.mark.parametrize("how", [["analysis/runs.py"], ["-m", "analysis.runs"]])
def test_the_command_works_as_script_and_module_without_torch(how: list[str], tmp_path: Path) -> None:
    words = [sys.executable, "-X", "importtime", *how, LOG]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    expected = "1 node × 2 GPUs, completed\n  9753.8 samples/s/GPU (8315.8–10691, 95.7 % interval of 30 windows"
    assert expected in done.stdout
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}
    assert "clap_ds" in imported
    assert not imported & {"torch", "deepspeed", "matplotlib", "pydantic", "numpy"}
    done = subprocess.run([sys.executable, *how, tmp_path / "nothing"], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (2, f"error: {tmp_path / 'nothing'}: no such file or directory\n")
