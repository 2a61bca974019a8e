"""Reading runs from directories, logs, tables, incomplete and invalid inputs."""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from clap_ds.analysis.published import training_gflops
from clap_ds.analysis.runs import input_parser, read_runs
from clap_ds.config.model_names import preset_names
from clap_ds.metrics.terminal import run_title
from clap_ds.utils.errors import UserError
from tests.analysis.samples import DATA, ROOT, TINY, given, record, running_log, write

LOG = DATA / "deepspeed_2ranks.log"
ENGINE = "world_size ................... {}\n"


def test_counts_not_in_the_log_are_those_given(tmp_path: Path) -> None:
    log = write(tmp_path / "bare.log", running_log([1.0] * 20, batch=64))
    for options in (
        given(nodes=2, gpus_per_node=4),
        given(gpus=8, gpus_per_node=4),
        given(gpus=8, nodes=2),
    ):
        (run,) = read_runs([log], options)
        assert (run.nodes, run.gpus, run.rate, run.deepspeed_samples_per_s_per_gpu) == (
            2,
            8,
            8.0,
            8.0,
        )
    write(
        log,
        "gradient_accumulation_steps .. 2\ntrain_micro_batch_size_per_gpu  4\n" + log.read_text(),
    )
    told = given(nodes=2, gpus=8, model="HTSAT-tiny-Roberta-base", peak_tflops=10.0)
    (run,) = read_runs([log], told)
    assert (run.model, run.batch_per_gpu, run.micro_batch) == ("htsat_tiny_roberta_base", 8, 4)
    assert (run.step_time_s, run.peak_tflops) == (pytest.approx(1.0), 10.0)
    gflops = 3 * 25.23  # HTSAT-tiny with 77 tokens: about three forward passes
    assert run.achieved_tflops == pytest.approx(8 * gflops / 1000, rel=0.01)
    assert run.mfu_model_percent == pytest.approx(100 * 8 * gflops / 1000 / 10, rel=0.01)
    assert run.context_length == 77
    assert input_parser("").parse_args(["a.log", "--peak_tflops", "H200"]).peak_tflops == 989
    (run,) = read_runs(
        [write(tmp_path / "l.log", ENGINE.format(16) + log.read_text())], given(gpus_per_node=4)
    )
    assert (run.nodes, run.gpus, run.rate) == (4, 16, 4.0)
    (run,) = read_runs(
        [write(tmp_path / "gpu2.log", ENGINE.format(16) + log.read_text())], given(gpus_per_node=4)
    )
    assert (run.gpus, "log's name" in run.notes) == (16, False)


@pytest.mark.parametrize(
    ("name", "nodes", "gpus"),
    [
        ("job-n2-gpus8.log", 2, 8),
        ("GPUS8_NODES2.OUT", 2, 8),
        ("n2.log", 2, 8),
        ("nodes_2/slurm.out", 2, 8),
        ("nodes_4/n2-gpus8.log", 2, 8),
    ],
)
def test_a_log_without_a_launchers_lines_may_have_its_scale_in_its_name(
    tmp_path: Path, name: str, nodes: int, gpus: int
) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    log = write(tmp_path / name, running_log([1.0] * 20))
    (run,) = read_runs([log.parent], given(gpus_per_node=None if "gpus" in name.lower() else 4))
    assert (run.nodes, run.gpus, run.rate) == (nodes, gpus, 8.0)
    assert "name" in run.notes
    if "gpus" in name.lower():
        (run,) = read_runs([write(log, ENGINE.format(8) + log.read_text())], given())
        assert (run.nodes, run.gpus) == (nodes, gpus)


@pytest.mark.parametrize("prefix", ["", "node1: "])
def test_this_projects_log_states_its_scale(tmp_path: Path, prefix: str) -> None:
    copy = write(
        tmp_path / "moved.log", f"{prefix}ranks: 16, nodes: 4\n" + running_log([1.0] * 20, batch=64)
    )
    (run,) = read_runs([copy], given())
    assert (run.nodes, run.gpus, run.rate) == (4, 16, 4.0)


TITLED: Any = {
    "preset": "htsat_tiny_roberta_base", "world_size": 8, "device_name": "NVIDIA H200", "num_nodes": 2, "precision": "bf16",
    "micro_batch_per_gpu": 4, "gradient_accumulation_steps": 1, "context_length": 64,
}  # fmt: skip


@pytest.mark.parametrize(
    "before",
    ["", "node1: ", "step 2/40  loss 1.5", "[2026-11-28] MaxMemAllocated=0.3GB", "\x1b[32m"],
)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"gradient_accumulation_steps": 2, "precision": "torch_autocast_bfloat16"},
        {"preset": "micro", "device_name": "AMD EPYC 9B14, 96-Core Processor", "num_nodes": 1},
        {"preset": "open_clip:CLAP-NaFlex"},
    ],
)
def test_this_projects_titles_state_model_batch_and_tokens(
    tmp_path: Path, before: str, changes: dict[str, Any]
) -> None:
    """A benchmark prints its title before the first step and above its results, which begin no new
    start."""
    summary = TITLED | changes
    title = before + run_title(summary) + "\n"
    steps = running_log([1.0] * 20, batch=64)
    (run,) = read_runs(
        [write(tmp_path / "x.log", title + steps + title)], given(model="htsat_base_roberta_base")
    )
    batch = 4 * summary["gradient_accumulation_steps"]
    assert (run.gpus, run.nodes, run.rate) == (8, summary["num_nodes"], 8.0)
    assert (run.batch_per_gpu, run.micro_batch, run.context_length) == (batch, 4, 64)
    assert (run.device, run.precision) == (summary["device_name"], summary["precision"])
    gflops = training_gflops(summary["preset"], 64)
    assert run.peak_tflops == (989 if "H200" in run.device else None)
    assert run.achieved_tflops == (gflops and pytest.approx(8 * gflops / 1000))
    known = gflops is not None and run.peak_tflops is not None
    assert (run.mfu_model_percent is not None) == known
    if summary["preset"] in preset_names() or not before:
        assert run.model == summary["preset"]


def test_a_title_with_packed_captions_gives_no_tflops(tmp_path: Path) -> None:
    title = run_title({**TITLED, "text_packing": True})
    log = write(tmp_path / "x.log", f"ranks: 8, nodes: 2\n{title}\n" + running_log([1.0] * 20))
    (run,) = read_runs([log], given())
    assert (run.rate, run.achieved_tflops) == (8.0, None)


def test_the_input_is_believed_before_the_options() -> None:
    (run,) = read_runs([LOG], given(nodes=7, gpus=28))
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
        ({"bare.log": 0}, {"gpus": 6, "gpus_per_node": 4}, "6 GPUs on 1.5 nodes"),
        ({}, {}, r"nothing: can't be read \(No such file"),
        ({"empty/x.md": 0}, {}, "empty: found neither run directories nor logs"),
    ],
)
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
    """Runs of a sweep are found, and unreadable ones are named."""
    sweep = tmp_path / "sweeps" / "tiny"
    for nodes in (2, 4):
        place = sweep / "runs" / f"n{nodes:03}"
        place.mkdir(parents=True)
        record(place, [], state="failed", num_nodes=nodes, world_size=nodes)
        write(
            place / "other.log", running_log([1.0] * 20)
        )  # belongs to the run, so it is no separate input
    (sweep / "runs" / ".inductor-1000").mkdir()
    write(sweep / "runs" / ".inductor-1000" / "autotuning.log", running_log([1.0] * 20))
    (sweep / "latest").symlink_to(sweep / "runs" / "n002")
    write(sweep / "slurm-1.out", f"run directory: my runs/n002\n{LOG.read_text()}")
    write(sweep / "jobs.out", "hello\n")
    assert len(read_runs([sweep], given())) == 2
    assert not capsys.readouterr().err, "a job's output beside its run directory is no input"
    runs = read_runs([sweep, sweep, sweep / "jobs.out", tmp_path / "gone"], given())
    assert [(run.gpus, run.state, run.notes) for run in runs] == [
        (gpus, "failed", "no complete window was measured") for gpus in (2, 4)
    ]
    for warning, reason in zip(
        capsys.readouterr().err.splitlines(), ("jobs.out", "gone"), strict=True
    ):
        assert warning.startswith("warning: ")
        assert reason in warning


def write_record(folder: Path, rate: float, second: int) -> Path:
    folder.parent.mkdir(parents=True, exist_ok=True)
    rates = {"mean": rate, "windows": [rate - 1, rate + 1], "window_s": [2.0, 2.0]}
    summary = {
        "samples_per_s_per_gpu": rates,
        "num_nodes": 1,
        "world_size": 4,
        "state": "completed",
    }
    return record(folder, [], **summary, finished=f"2026-11-20T19:21:{second:02}+00:00")


def test_copies_of_a_run_count_once_with_a_note(tmp_path: Path) -> None:
    for number, rate in enumerate((600.0, 601.0, 602.0)):
        run_dir = write_record(tmp_path / "runs" / f"a{number}", rate, second=number)
        shutil.copytree(run_dir, tmp_path / "runs" / "backup" / f"old-{number}")
    shutil.copytree(tmp_path / "runs" / "a0", tmp_path / "again" / "a0")
    runs = read_runs([tmp_path], given())
    assert [run.rate for run in runs] == [600.0, 601.0, 602.0]
    assert [re.findall(r"(\d) of its copies", run.notes) for run in runs] == [["2"], ["1"], ["1"]]


def test_runs_of_equal_speed_that_are_no_copies_count_each(tmp_path: Path) -> None:
    for number in range(3):
        write_record(tmp_path / f"a{number}", 600.0, second=number)
    assert [run.notes for run in read_runs([tmp_path], given())] == ["", "", ""]


def test_copies_of_a_log_count_once_and_its_repeats_each(tmp_path: Path) -> None:
    head = "ranks: 4, nodes: 1\n"
    write(tmp_path / "first.log", head + running_log([1.0] * 20))
    write(tmp_path / "repeat.log", head + running_log([1.0] * 21))
    (tmp_path / "backup").mkdir()
    shutil.copy(tmp_path / "first.log", tmp_path / "backup" / "moved.log")
    runs = read_runs([tmp_path], given())
    assert sorted("copies" in run.notes for run in runs) == [False, True]


@pytest.mark.parametrize("kind", ["unfinished record", "log with other line ends", "table"])
def test_copies_without_an_end_of_logs_with_other_line_ends_and_of_tables_count_once(
    tmp_path: Path, kind: str
) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    for path, line_end in zip(paths, ("\n", "\r\n"), strict=True):
        path.mkdir()
        if kind == "table":
            write(path / "t.csv", "nodes,gpus,samples_per_s_per_gpu\n1,4,600\n1,4,600\n")
        elif kind.startswith("log"):
            write(path / "x.log", running_log([1.0] * 20).replace("\n", line_end) + line_end)
        else:
            summary = write_record(path / "run", 600.0, second=0) / "summary.json"
            write(summary, summary.read_text().replace('"finished"', '"began"'))
    inputs = [path / "t.csv" for path in paths] if kind == "table" else paths
    notes = [run.notes for run in read_runs(inputs, given(nodes=1, gpus=4))]
    assert ["1 of its copies" in note for note in notes] == [True] * (2 if kind == "table" else 1)


def test_copies_of_failed_runs_and_of_table_rows_stay(tmp_path: Path) -> None:
    for name in ("a", "b"):
        record(tmp_path / name, [], state="failed", num_nodes=1, world_size=4)
    assert len(read_runs([tmp_path], given())) == 2
    table = write(tmp_path / "t.csv", "nodes,gpus,samples_per_s_per_gpu\n1,4,600.1\n1,4,600.1\n")
    assert len(read_runs([table], given())) == 2


def test_the_command_works_as_a_script_without_torch(tmp_path: Path) -> None:
    words = [
        sys.executable,
        "-X",
        "importtime",
        "analysis/scaling.py",
        LOG,
        "--model",
        "HTSAT-tiny-Roberta-base",
    ]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    shown = r"### htsat-tiny-roberta-base,.*\| +1 \| +2 \| +1 \| +9154.0 \|"
    assert re.search(shown, done.stdout, re.DOTALL)
    imported = {
        line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()
    }
    assert "clap_ds" in imported
    assert not imported & {"torch", "deepspeed", "matplotlib"}
