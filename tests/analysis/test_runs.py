"""The one way to measured numbers: what it makes of directories, logs, tables, gaps and rubbish."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from clap_ds.analysis.runs import read_runs
from clap_ds.config.errors import UserError
from tests.analysis.samples import DATA, ROOT, TINY, given, record, running_log, write

LOG = DATA / "deepspeed_2ranks.log"
ENGINE = "world_size ................... {}\n"


def test_counts_not_in_the_log_are_those_given(tmp_path: Path) -> None:
    log = write(tmp_path / "bare.log", running_log([1.0] * 20, batch=64))
    for options in (given(nodes=2, gpus_per_node=4), given(gpus=8, gpus_per_node=4), given(gpus=8, nodes=2)):
        (run,) = read_runs([log], options)
        assert (run.nodes, run.gpus, run.rate, run.engine_samples_per_s_per_gpu) == (2, 8, 8.0, 8.0)
        assert (run.interval, set(run.windows)) == ((8.0, 8.0), {8.0})
    write(log, "gradient_accumulation_steps .. 2\n" + log.read_text())
    told = given(nodes=2, gpus=8, model="HTSAT-tiny-Roberta-base", micro_batch=4, peak_tflops=10.0)
    (run,) = read_runs([log], told)
    assert (run.model, run.batch_per_gpu, run.micro_batch) == ("htsat_tiny_roberta_base", 8, 4)
    assert (run.step_time_s, run.peak_tflops) == (pytest.approx(1.0), 10.0)
    logs = [write(tmp_path / f"{gpus}.log", ENGINE.format(gpus) + log.read_text()) for gpus in (8, 16)]
    runs = read_runs(logs, given(gpus_per_node=4))
    assert [(run.nodes, run.gpus, run.rate) for run in runs] == [(2, 8, 8.0), (4, 16, 4.0)]


def test_the_input_is_believed_before_the_options() -> None:
    (run,) = read_runs([LOG], given(nodes=7, gpus=28, micro_batch=1))
    assert (run.nodes, run.gpus, run.batch_per_gpu) == (1, 2, 64)
    assert run.step_time_s == pytest.approx(64 / (run.rate or 0))
    (run,) = read_runs([DATA / "deepspeed_1rank_accumulating.log"], given())
    assert (run.batch_per_gpu, run.micro_batch) == (128, 64)
    assert read_runs([TINY], given(model="micro"))[0].model == "htsat_tiny_roberta_base"


@pytest.mark.parametrize(
    ("files", "options", "message"),
    [
        ({"bare.log": 0}, {}, r"bare\.log.*--nodes.*--gpus"),
        ({"bare.log": 0}, {"nodes": 4, "gpus": 2}, "2 GPUs on 4 nodes"),
        ({"8.out": 8, "16.out": 16}, {"nodes": 2}, "--nodes 2: .* don't state their nodes have 8, 16 GPUs; give --gpus_per_"),
        ({"8.out": 8}, {"gpus_per_node": 3}, "8 GPUs are no multiple of --gpus_per_node 3"),
        ({}, {}, "nothing: no such file"),
        ({"empty/x.csv": 0, "y.md": 0}, {}, "empty: neither a run directory nor a log, or a folder of them"),
    ],
)  # fmt: skip
def test_what_is_missing_or_contradicts_is_said(
    tmp_path: Path, files: dict[str, int], options: dict[str, int], message: str
) -> None:
    for name, gpus in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write(tmp_path / name, ENGINE.format(gpus) * bool(gpus) + running_log([1.0] * 20))
    with pytest.raises(UserError, match=message):
        read_runs(sorted(tmp_path.iterdir()) or [tmp_path / "nothing"], given(**options))


def test_runs_are_found_in_folders_and_the_log_of_one_that_is_there_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A sweep's, `runs/*`, and what can't be read is named."""
    sweep = tmp_path / "sweeps" / "tiny"
    for number, place in enumerate((tmp_path / "run-1", *(sweep / "runs" / f"n{nodes:03}" for nodes in (2, 4)))):
        place.parent.mkdir(parents=True, exist_ok=True)
        record(place, [], state="failed", num_nodes=2**number, world_size=2**number)
        write(place / "other.log", running_log([1.0] * 20))  # of the run, so no input of its own
    (sweep / "runs" / ".inductor-1000").mkdir()
    write(sweep / "runs" / ".inductor-1000" / "autotuning.log", running_log([1.0] * 20))
    write(tmp_path / "jobs.txt", "hello\n")
    assert [run.gpus for run in read_runs([sweep], given())] == [2, 4]
    log = write(tmp_path / "slurm-1.out", f"run directory: my runs/n002\n{LOG.read_text()}")
    record(tmp_path / "killed", [], state="running")
    capsys.readouterr()
    runs = read_runs([tmp_path / "jobs.txt", tmp_path / "gone", tmp_path], given())
    assert [(run.gpus, run.state, run.notes) for run in runs] == [
        (gpus, "failed", "no complete window was measured") for gpus in (1, 2, 4)
    ]
    *warnings, note = capsys.readouterr().err.splitlines()
    reasons = ("jobs.txt: no throughput lines", "gone: no such file", "killed: doesn't state the number of nodes")
    for warning, reason in zip(warnings, reasons, strict=True):
        assert warning.startswith(f"warning: {tmp_path}/{reason}")
        assert warning.endswith("; going on without it")
    assert note == f"note: counted once, as the same run is there, too: {log}"


def test_a_run_given_twice_or_copied_counts_once_and_that_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("copy", "first", "other"):
        shutil.copytree(DATA / "record_2ranks", tmp_path / name)
    other = json.loads((tmp_path / "other" / "summary.json").read_text())
    other["samples_per_s_per_gpu"]["windows"][0] *= 1.01
    (tmp_path / "other" / "summary.json").write_text(json.dumps(other))
    options = given(nodes=1, gpus=2)
    assert len(read_runs([tmp_path, LOG, write(tmp_path / "c.log", LOG.read_bytes())], options)) == 3
    said = f"note: counted once, as the same run is there, too: {tmp_path / 'first'}, {LOG}, {tmp_path / 'c.log'}\n"
    assert capsys.readouterr().err == said
    assert len(read_runs([TINY, TINY], options)) == len(read_runs([TINY], options)) > 5
    killed = [record(tmp_path / name, [], state="running", num_nodes=1, world_size=1) for name in ("k", "l")]
    assert len(read_runs([*killed, killed[0]], options)) == 2  # nothing was measured, so that their contents can't tell


def test_the_command_works_as_a_script_without_torch(tmp_path: Path) -> None:
    words = [sys.executable, "-X", "importtime", "analysis/efficiency.py", LOG, "--model", "HTSAT-tiny-Roberta-base"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    shown = r"### htsat-tiny-roberta-base,.*\| +1 \| +2 \| +9154.0 ± 1218.3 \|.*± from: 95 % interval of 30 windows"
    assert re.search(shown, done.stdout, re.DOTALL)
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}
    assert "clap_ds" in imported
    assert not imported & {"torch", "deepspeed", "matplotlib", "pydantic"}
