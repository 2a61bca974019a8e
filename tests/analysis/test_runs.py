"""Runs read from directories, logs and tables, also incomplete and invalid ones."""

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clap_ds.analysis.runs import input_parser, read_runs
from clap_ds.analysis.table import Run
from clap_ds.metrics.terminal import run_title
from clap_ds.utils.errors import UserError
from tests.analysis.samples import DATA, ROOT, TINY, make_options, record, running_log, write

LOG = DATA / "deepspeed_2ranks.log"
STEPS = running_log([1.0] * 20, batch=64)
BATCH = "gradient_accumulation_steps .. 2\ntrain_micro_batch_size_per_gpu  4\n"


def read_one(path: Path, **options: Any) -> Run:
    (run,) = read_runs([path], make_options(**options))
    return run


@pytest.mark.parametrize(
    "options", [{"nodes": 2, "gpus_per_node": 4}, {"gpus": 8, "gpus_per_node": 4}]
)
def test_scale_that_a_log_lacks_is_that_of_the_options(tmp_path, options):
    run = read_one(write(tmp_path / "bare.log", STEPS), **options)
    assert (run.nodes, run.gpus) == (2, 8)
    assert run.rate == run.deepspeed_samples_per_s_per_gpu == 8.0


def test_log_of_a_known_model_has_tflops_and_mfu(tmp_path):
    log = write(tmp_path / "bare.log", BATCH + STEPS)
    model = "HTSAT-tiny-Roberta-base"
    run = read_one(log, nodes=2, gpus=8, model=model, peak_tflops=10.0)
    assert (run.model, run.batch_per_gpu, run.micro_batch) == ("htsat_tiny_roberta_base", 8, 4)
    assert (run.step_time_s, run.peak_tflops) == (pytest.approx(1.0), 10.0)
    # With 77 tokens, 25.341 GFLOPs forward and 50.368 backward.
    assert run.achieved_tflops == pytest.approx(8 * 0.075709, rel=1e-4)
    assert run.mfu_model_percent == pytest.approx(100 * 8 * 0.075709 / 10, rel=1e-4)
    assert input_parser("").parse_args(["a.log", "--peak_tflops", "H200"]).peak_tflops == 989


def test_batch_and_scale_of_the_input_have_precedence_over_options():
    run = read_one(DATA / "deepspeed_1rank_accumulating.log", nodes=7, gpus=28)
    assert (run.nodes, run.gpus) == (1, 1)
    assert (run.batch_per_gpu, run.micro_batch, run.accumulation) == (128, 64, 2)
    assert read_runs([TINY], make_options(model="micro"))[0].model == "htsat_tiny_roberta_base"


@pytest.mark.parametrize("name", ["GPUS8_NODES2.OUT", "nodes_2/slurm.out", "nodes_4/n2-gpus8.log"])
def test_scale_in_a_log_name_is_used_and_noted(tmp_path, name):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    log = write(tmp_path / name, STEPS)
    names_gpus = "gpus" in name.lower()
    run = read_one(log.parent, gpus_per_node=None if names_gpus else 4)
    assert (run.nodes, run.gpus, run.rate) == (2, 8, 8.0)
    assert "name" in run.notes


TITLED: Any = {
    "preset": "htsat_tiny_roberta_base",
    "world_size": 8,
    "device_name": "NVIDIA H200",
    "num_nodes": 2,
    "precision": "bf16",
    "micro_batch_per_gpu": 4,
    "gradient_accumulation_steps": 1,
    "context_length": 64,
}


@pytest.mark.parametrize(
    ("prefix", "changes"),
    [
        ("\x1b[32mnode1: ", {"gradient_accumulation_steps": 2, "precision": "torch_autocast_bfloat16"}),
        ("", {"preset": "micro", "device_name": "AMD EPYC 9B14, 96-Core Processor", "num_nodes": 1}),
        ("", {"preset": "open_clip:CLAP-NaFlex"}),
    ],
)  # fmt: skip
def test_title_of_this_project_states_model_batch_and_tokens(tmp_path, prefix, changes):
    """A benchmark prints its title before the first step and above its results, which begin no new
    start."""
    summary = TITLED | changes
    title = f"{prefix}{run_title(summary)}\n"
    log = write(tmp_path / "x.log", title + STEPS + title)
    run = read_one(log, model="htsat_base_roberta_base")
    batch = 4 * summary["gradient_accumulation_steps"]
    assert (run.gpus, run.nodes, run.rate) == (8, summary["num_nodes"], 8.0)
    assert (run.batch_per_gpu, run.micro_batch, run.context_length) == (batch, 4, 64)
    assert (run.device, run.precision) == (summary["device_name"], summary["precision"])
    assert run.peak_tflops == (989 if "H200" in run.device else None)
    assert run.model == summary["preset"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"run\.log.*--nodes.*--gpus"),
        ({"nodes": 4, "gpus": 2}, "2 GPUs on 4 nodes"),
    ],
)
def test_scale_that_is_missing_or_impossible_is_named(tmp_path, options, message):
    with pytest.raises(UserError, match=message):
        read_one(write(tmp_path / "run.log", STEPS), **options)


def test_input_without_runs_is_named(tmp_path):
    with pytest.raises(UserError, match=r"nothing: can't be read \(No such file"):
        read_one(tmp_path / "nothing")
    write(tmp_path / "x.md", "")
    with pytest.raises(UserError, match="found neither run directories nor logs"):
        read_one(tmp_path)


def test_runs_of_a_sweep_are_found_and_their_logs_ignored(tmp_path, capsys):
    runs = tmp_path / "sweep" / "runs"
    for nodes in (2, 4):
        folder = runs / f"n{nodes:03}"
        folder.mkdir(parents=True)
        record(folder, [], state="failed", num_nodes=nodes, world_size=nodes)
        # Belongs to the run.
        write(folder / "other.log", STEPS)
    (runs.parent / "latest").symlink_to(runs / "n002")
    write(runs.parent / "slurm-1.out", f"run directory: my runs/n002\n{LOG.read_text()}")
    outputs = write(runs.parent / "jobs.out", "hello\n")
    assert [run.gpus for run in read_runs([runs.parent], make_options())] == [2, 4]
    assert not capsys.readouterr().err
    # Inputs that are named themselves are warned of.
    inputs = [runs.parent, runs.parent, outputs, tmp_path / "gone"]
    assert len(read_runs(inputs, make_options())) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert re.search("warning: .*jobs.out", first)
    assert re.search("warning: .*gone", second)


def write_record(folder: Path, rate: float, second: int) -> Path:
    folder.parent.mkdir(parents=True, exist_ok=True)
    rates = {"mean": rate, "windows": [rate - 1, rate + 1], "window_s": [2.0, 2.0]}
    finished = f"2026-11-20T19:21:{second:02}+00:00"
    summary = {"samples_per_s_per_gpu": rates, "num_nodes": 1, "world_size": 4}
    return record(folder, [], **summary, state="completed", finished=finished)


def test_copies_of_a_record_count_once_with_a_note(tmp_path):
    for number, rate in enumerate((600.0, 601.0)):
        run_dir = write_record(tmp_path / "runs" / f"a{number}", rate, second=number)
        shutil.copytree(run_dir, tmp_path / "backup" / f"old-{number}")
    shutil.copytree(tmp_path / "runs" / "a0", tmp_path / "again" / "a0")
    runs = read_runs([tmp_path], make_options())
    assert [run.rate for run in runs] == [600.0, 601.0]
    assert [re.findall(r"(\d) of its copies", run.notes) for run in runs] == [["2"], ["1"]]


def write_unfinished(folder: Path) -> None:
    summary = write_record(folder / "run", 600.0, second=0) / "summary.json"
    write(summary, summary.read_text().replace('"finished"', '"began"'))


COPIES: dict[str, Callable[[Path], object]] = {
    "unfinished record": write_unfinished,
    # Only the second copy has such line ends.
    "log with other line ends": lambda folder: write(
        folder / "x.log", STEPS.replace("\n", "\r\n") + "\n" if folder.name == "b" else STEPS
    ),
}


@pytest.mark.parametrize("kind", COPIES)
def test_copies_of_other_inputs_count_once(tmp_path, kind):
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
        COPIES[kind](folder)
    (run,) = read_runs(folders, make_options(nodes=1, gpus=4))
    assert "1 of its copies" in run.notes


def test_command_runs_as_a_script_without_torch():
    command = [sys.executable, "-X", "importtime", "analysis/scaling.py", str(LOG)]
    command += ["--model", "HTSAT-tiny-Roberta-base"]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    table = r"### htsat-tiny-roberta-base,.*\| +1 \| +2 \| +1 \| +9154.0 \|"
    assert re.search(table, process.stdout, re.DOTALL)
    packages = set()
    for line in process.stderr.splitlines():
        packages.add(line.rpartition("|")[2].strip().partition(".")[0])
    assert "clap_ds" in packages
    assert packages.isdisjoint({"torch", "deepspeed", "matplotlib"})
