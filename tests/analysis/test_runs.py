"""The one way to measured numbers: what it makes of directories, logs, tables, gaps and rubbish."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from clap_ds.analysis.runs import parse_options, read_runs
from clap_ds.config.errors import UserError
from tests.analysis.samples import DATA, ROOT, TINY, command, given, record, running_log, write

LOG = DATA / "deepspeed_2ranks.log"
ENGINE = "world_size ................... {}\n"


def test_counts_not_in_the_log_are_those_given(tmp_path: Path) -> None:
    log = write(tmp_path / "bare.log", running_log([1.0] * 20, batch=64))
    for options in (given(nodes=2, gpus_per_node=4), given(gpus=8, gpus_per_node=4), given(gpus=8, nodes=2)):
        (run,) = read_runs([log], options)
        assert (run.nodes, run.gpus, run.rate, run.engine_samples_per_s_per_gpu) == (2, 8, 8.0, 8.0)
        assert (run.interval, set(run.windows)) == ((8.0, 8.0), {8.0})
    write(log, "gradient_accumulation_steps .. 2\n" + log.read_text())
    (run,) = read_runs(
        [log], given(nodes=2, gpus=8, model="CLAP-HTSAT-tiny-Roberta-base", micro_batch=4, peak_tflops=10.0)
    )
    assert (run.model, run.batch_per_gpu, run.micro_batch) == ("htsat_tiny_roberta_base", 8, 4)
    assert (run.step_time_s, run.peak_tflops) == (pytest.approx(1.0), 10.0)
    write(tmp_path / "8.log", ENGINE.format(8) + log.read_text())
    write(tmp_path / "16.log", ENGINE.format(16) + log.read_text())
    runs = read_runs([tmp_path / "8.log", tmp_path / "16.log"], given(gpus_per_node=4))
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


def test_metrics_find_the_rest_of_their_run_and_the_log_of_a_run_directory_counts_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "runs" / "tiny-20261120T000000Z"
    shutil.copytree(DATA / "record_2ranks", folder)
    (run,) = read_runs([folder / "metrics.jsonl", folder], given())
    assert run.gpus == 2
    log = write(tmp_path / "slurm-1.out", f"run directory: my runs/{folder.name}\n{LOG.read_text()}")
    capsys.readouterr()
    for inputs in ([log, folder], [tmp_path]):
        assert [run.source for run in read_runs(inputs, given())] == [str(folder)]
        assert capsys.readouterr().err == f"note: counted once, as the same run is there, too: {log}\n"


def test_an_input_without_a_run_is_named_and_the_rest_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for nodes in (1, 2):
        record(tmp_path / f"run-{nodes}", [], state="failed", num_nodes=nodes, world_size=4 * nodes)
    record(tmp_path / "killed", [], state="running")
    inputs = [write(tmp_path / "bad.log", "hello"), tmp_path / "gone", tmp_path]
    found = read_runs(inputs, given())
    assert [(run.gpus, run.state, run.notes) for run in found] == [
        (4, "failed", "no complete window was measured"), (8, "failed", "no complete window was measured"),
    ]  # fmt: skip
    reasons = ("bad.log: no throughput lines", "gone: no such file", "killed: doesn't state the number of nodes")
    for warning, reason in zip(capsys.readouterr().err.splitlines(), reasons, strict=True):
        assert warning.startswith(f"warning: {tmp_path}/{reason}")
        assert warning.endswith("; going on without it")


def test_runs_of_sweeps_are_found_in_folders(tmp_path: Path) -> None:
    """As `runs/*` names them, and folders given as a whole."""
    sweep = tmp_path / "sweeps" / "tiny"
    places = [tmp_path / "run-1", *(sweep / "runs" / f"n{nodes:03}" for nodes in (2, 4))]
    for number, place in enumerate(places):
        place.mkdir(parents=True)
        record(place, [], state="failed", num_nodes=2**number, world_size=2**number)
        write(place / "other.log", running_log([1.0] * 20))  # of the run, so no input of its own
    write(tmp_path / "jobs.txt", "hello\n")
    for inputs, gpus in (([sweep], [2, 4]), (sorted(tmp_path.iterdir())[1:], [1, 2, 4]), ([tmp_path], [1, 2, 4])):
        assert [run.gpus for run in read_runs(inputs, given())] == gpus


def test_a_run_given_twice_or_copied_counts_once_and_that_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "runs"
    for name in ("copy", "first"):
        shutil.copytree(DATA / "record_2ranks", folder / name)
    other = json.loads((folder / "first" / "summary.json").read_text())
    other["samples_per_s_per_gpu"]["windows"][0] *= 1.01
    shutil.copytree(folder / "first", folder / "other")
    (folder / "other" / "summary.json").write_text(json.dumps(other))
    options = given(nodes=1, gpus=2)
    assert len(read_runs([folder, LOG, write(tmp_path / "c.log", LOG.read_bytes())], options)) == 3
    said = f"note: counted once, as the same run is there, too: {folder / 'first'}, {tmp_path / 'c.log'}\n"
    assert capsys.readouterr().err == said
    assert len(read_runs([TINY, TINY], options)) == len(read_runs([TINY], options)) > 5
    killed = [record(tmp_path / name, [], state="running", num_nodes=1, world_size=1) for name in ("k", "l")]
    assert len(read_runs([*killed, killed[0]], options)) == 2  # nothing was measured, so that their contents can't tell


def test_a_models_published_name_is_its_preset(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Any] = []
    for name in ("HTSAT-tiny-Roberta-base", "HTSAT-huge"):
        command(monkeypatch, lambda: found.append(parse_options("", "--model").model), "--model", name)
    assert found == ["htsat_tiny_roberta_base", "HTSAT-huge"]


def test_the_command_works_as_a_script_without_torch(tmp_path: Path) -> None:
    words = [sys.executable, "-X", "importtime", "analysis/efficiency.py", LOG, tmp_path / "nothing"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    assert re.search(r"\| +1 \| +2 \| +9154.0 ± 1218.3 \|.*± from: 95 % interval of 30 windows", done.stdout, re.DOTALL)
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}
    assert "clap_ds" in imported
    assert not imported & {"torch", "deepspeed", "matplotlib", "pydantic"}
    assert f"warning: {tmp_path / 'nothing'}: no such file or directory; going on without it\n" in done.stderr
