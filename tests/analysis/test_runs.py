"""The one way to measured numbers: what it makes of directories, logs, tables, gaps and rubbish."""

import gzip
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import Mock

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
    (run,) = read_runs([log], given(nodes=2, gpus=8, model="micro", micro_batch=8, peak_tflops=10.0))
    assert (run.nodes, run.gpus, run.rate, run.step_time_s) == (2, 8, pytest.approx(8.0), pytest.approx(1.0))
    assert (run.model, run.batch_per_gpu, run.peak_tflops) == ("micro", 8, 10.0)
    write(log, "gradient_accumulation_steps .. 2\n" + log.read_text())
    (run,) = read_runs([log], given(nodes=2, gpus=8, micro_batch=4))
    assert (run.batch_per_gpu, run.micro_batch) == (8, 4)


def test_the_input_is_believed_before_the_options() -> None:
    (run,) = read_runs([LOG], given(nodes=7, gpus=28, micro_batch=1))
    assert (run.nodes, run.gpus, run.batch_per_gpu) == (1, 2, 64)
    assert run.step_time_s == pytest.approx(64 / median(run.windows))
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
        ({"n2.log": 0, "n4.log": 0}, {"gpus": 8}, "--gpus 8: .* their GPUs have 2, 4 nodes; give --gpus_per_node instead"),
        ({"n2.log": 0, "n4.log": 0}, {"nodes": 2}, "--nodes 2: .* their nodes have 2, 4 nodes; give --gpus_per_node instead"),
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


@pytest.mark.parametrize(
    ("name", "nodes"),
    [("n4.log", 4), ("4nodes.log", 4), ("tiny_nodes-4.out", 4), ("nodes=04/slurm-9.out", 4), ("n2_run/x.log", 2),
     ("n2/n4.log", 4), ("node4.log", 0), ("n2-n4.log", 0), ("slurm-4.out", 0), ("n3.log", 3)],
)  # fmt: skip
def test_nodes_are_by_the_name_only_where_it_says_one_count(tmp_path: Path, name: str, nodes: int) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    log = write(tmp_path / name, ENGINE.format(8) + running_log([1.0] * 20))
    if nodes:
        (run,) = read_runs([log], given())
        assert (run.nodes, run.gpus, run.notes.count(f"{nodes} nodes by its name")) == (nodes, 8, 1)
    else:
        with pytest.raises(UserError, match="doesn't state the number of nodes"):
            read_runs([log], given())
    (run,) = read_runs([log], given(nodes=1))
    assert (run.nodes, "by its name" in run.notes) == (1, False)
    stated = write(tmp_path / "slurm-5.out", "SLURM_JOB_NUM_NODES=2\n" + log.read_text())
    assert read_runs([stated], given())[0].nodes == 2


def test_names_and_gpus_per_node_give_what_a_folder_of_logs_lacks(tmp_path: Path) -> None:
    for nodes in (2, 4, 8):
        write(tmp_path / f"n{nodes}.log", running_log([1.0] * 20, batch=8 * nodes))
    runs = read_runs([tmp_path], given(gpus_per_node=4))
    assert [(run.nodes, run.gpus, run.rate) for run in runs] == [(2, 8, 2.0), (4, 16, 2.0), (8, 32, 2.0)]
    assert "2 nodes by its name" in runs[0].notes
    log = write(tmp_path / "2nodes_8gpus.log", running_log([1.0] * 20, batch=64))
    (run,) = read_runs([log], given())
    assert (run.nodes, run.gpus, run.rate, run.interval) == (2, 8, 8.0, (8.0, 8.0))
    assert "8 GPUs by its name; 2 nodes by its name" in run.notes


def test_files_of_a_run_directory_stand_for_it_and_its_log_counts_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "runs" / "tiny-20261120T000000Z"
    shutil.copytree(DATA / "record_2ranks", folder)
    write(folder / "rank0.log", "hello\n")
    for names in (["metrics.jsonl"], ["rank0.log"], ["summary.json", "metrics.jsonl"]):
        (run,) = read_runs([folder / name for name in names], given())
        assert (run.source, run.gpus) == (str(folder), 2)
    title = "micro on 2 × Xeon, 1 node, bf16, micro-batch 4, 77 text tokens"
    table = f"run directory: my runs/{folder.name}\n{title}\n┌──┬──┐\n│ samples/s/rank │ {{:.2f}} │\n└──┴──┘\n"
    log = write(tmp_path / "slurm-1.out", table.format(run.rate))
    capsys.readouterr()
    for inputs in ([log, folder], [tmp_path]):
        assert [run.source for run in read_runs(inputs, given())] == [str(folder)]
        assert capsys.readouterr().err == f"note: the same run, counted once: {folder}, {log}\n"
    other = write(tmp_path / "other.out", table.format(3.0))  # of another machine's folder of this name
    assert len(read_runs([other, folder], given(nodes=1))) == 2


@pytest.mark.parametrize(
    ("name", "preset", "near"),
    [("HTSAT-tiny-Roberta-base", "htsat_tiny_roberta_base", ""), ("htsat_TINY_roberta_base", "htsat_tiny_roberta_base", ""),
     ("CLAP-HTSAT-tiny-Roberta-base", "htsat_tiny_roberta_base", ""), ("HTSAT-huge", "HTSAT-huge", ""),
     ("HTSAT-tiny-Roberta-bse", "HTSAT-tiny-Roberta-bse", "htsat_tiny_roberta_base")],
)  # fmt: skip
def test_a_models_published_name_is_its_preset_and_nearly_one_is_doubted(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    preset: str,
    near: str,
) -> None:
    log = write(tmp_path / "x.log", running_log([1.0] * 20))
    table = write(tmp_path / "t.csv", f"model,nodes,gpus,samples/s/GPU\n{name},1,1,64\n")
    assert {run.model for run in read_runs([log, table], given(nodes=1, gpus=1, model=name))} == {preset}
    found: list[Any] = []
    command(monkeypatch, lambda: found.append(parse_options("", "--model")), "--model", name)
    assert found[0].model == preset
    said = f"warning: --model {name}: not a preset; did you mean '{near}'?\n" if near else ""
    assert capsys.readouterr().err == said


def test_an_input_without_a_run_is_named_and_the_rest_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for nodes in (1, 2):
        record(tmp_path / f"run-{nodes}", [], state="failed", num_nodes=nodes, world_size=4 * nodes)
    record(tmp_path / "killed", [], state="running")
    closed, listed = tmp_path / "closed", os.scandir
    closed.mkdir()
    refused = Mock(side_effect=PermissionError(13, "Permission denied", str(closed)))
    monkeypatch.setattr(os, "scandir", lambda path: refused() if str(path) == str(closed) else listed(path))
    inputs = [write(tmp_path / "bad.log", "hello"), tmp_path / "gone", tmp_path]
    found = read_runs(inputs, given())
    assert [(run.gpus, run.state, run.notes) for run in found] == [
        (4, "failed", "no complete window was measured"), (8, "failed", "no complete window was measured"),
    ]  # fmt: skip
    reasons = ("bad.log: no throughput lines", "gone: no such file", "closed: can't be read (Permission denied)",
               "killed: doesn't state the number of nodes")  # fmt: skip
    warnings = capsys.readouterr().err.splitlines()
    for warning, reason in zip(warnings, reasons, strict=True):
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
    assert capsys.readouterr().err == f"note: the same run, counted once: {copies}\n"
    assert len(read_runs([write(tmp_path / "c.log.gz", gzip.compress(LOG.read_bytes())), LOG], options)) == 1
    assert len(read_runs([*failed, failed[0]], options)) == 2
    assert len(read_runs([TINY, TINY], options)) == len(read_runs([TINY], options)) > 5
    assert f"counted once: {TINY}, {TINY}\n" in capsys.readouterr().err
    killed = [record(tmp_path / name, [], state="running", num_nodes=1, world_size=1) for name in ("k", "l")]
    assert len(read_runs(killed, options)) == 2  # nothing was measured, so that their contents can't tell


@pytest.mark.parametrize("how", [["analysis/efficiency.py"], ["-m", "analysis.efficiency"]])
def test_the_command_works_as_script_and_module_without_torch(how: list[str], tmp_path: Path) -> None:
    words = [sys.executable, "-X", "importtime", *how, LOG]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    assert re.search(r"\| +1 \| +2 \| +9154.0 ± 1218.3 \|.*± from: 95 % interval of 30 windows", done.stdout, re.DOTALL)
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}
    assert "clap_ds" in imported
    assert not imported & {"torch", "deepspeed", "matplotlib", "pydantic"}
    done = subprocess.run([sys.executable, *how, tmp_path / "nothing"], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (2, f"error: {tmp_path / 'nothing'}: no such file or directory\n")
