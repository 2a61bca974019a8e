"""The one door to measured numbers: what it makes of directories, logs, gaps and rubbish."""

import json
import subprocess
import sys
from pathlib import Path
from statistics import median

import pytest

from clap_ds.analysis.runs import InputError
from clap_ds.analysis.throughput import Given, read_all, read_path
from tests.analysis.logs import running_log, write

DATA = Path(__file__).parent / "data"
ROOT = Path(__file__).resolve().parents[2]


def test_rates_of_a_log_are_per_gpu_and_its_step_time_follows() -> None:
    (run,) = read_path(DATA / "deepspeed_2ranks.log", Given())
    assert run.num_gpus == 2
    assert run.rate is not None
    assert run.rate == pytest.approx(median(run.windows))
    assert run.step_time_s == pytest.approx(64 / run.rate)
    assert any("data loading" in note for note in run.notes)


def test_accumulated_micro_batches_count_as_one_step() -> None:
    (run,) = read_path(DATA / "deepspeed_1rank_accumulating.log", Given())
    assert (run.micro_batch_per_gpu, run.batch_per_gpu, run.global_batch) == (64, 128, 128)


def test_counts_not_in_the_log_are_asked_for_by_option_name(tmp_path: Path) -> None:
    log = write(tmp_path / "bare.log", running_log([1.0] * 20, batch=64))
    with pytest.raises(InputError, match=r"bare\.log.*--nodes.*--gpus"):
        read_path(log, Given())
    (run,) = read_path(log, Given(num_nodes=2, num_gpus=8))
    assert (run.num_nodes, run.num_gpus, run.rate) == (2, 8, pytest.approx(8.0))


def test_the_log_is_believed_before_the_options() -> None:
    (run,) = read_path(DATA / "deepspeed_2ranks.log", Given(num_nodes=7, num_gpus=28))
    assert (run.num_nodes, run.num_gpus) == (1, 2)


def test_fewer_gpus_than_nodes_is_refused(tmp_path: Path) -> None:
    log = write(tmp_path / "bare.log", running_log([1.0] * 20))
    with pytest.raises(InputError, match="2 GPUs on 4 nodes"):
        read_path(log, Given(num_nodes=4, num_gpus=2))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "empty"),
        (b"\x7fELF\0\0\0\1" * 40, "binary"),
        (b"hello\nworld\n", "no throughput lines"),
        (running_log([1.0] * 9, batch=0).encode(), "zero, negative or infinite"),
    ],
)
def test_a_file_without_throughput_is_named_and_the_rest_goes_on(
    tmp_path: Path, content: bytes, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = write(tmp_path / "bad.log", content)
    with pytest.raises(InputError, match=rf"bad\.log.*{said}"):
        read_all([bad])
    runs = read_all([bad, DATA / "deepspeed_2ranks.log"])
    assert len(runs) == 1
    assert "bad.log" in capsys.readouterr().err


def test_a_log_shorter_than_the_warmup_gives_its_running_average_and_says_so(tmp_path: Path) -> None:
    log = write(tmp_path / "short.log", running_log([1.0, 1.0, 2.0, 4.0], batch=12))
    (run,) = read_path(log, Given(num_nodes=1, num_gpus=1))
    assert run.rate == pytest.approx(12 / 3)
    assert (run.windows, run.rate_low) == ((), None)
    assert any("too short" in note for note in run.notes)


def test_a_failed_log_without_throughput_still_makes_a_run(tmp_path: Path) -> None:
    text = "nnodes=2, num_local_procs=4, node_rank=0\ndist_world_size=8\ntorch.OutOfMemoryError: CUDA out of memory\n"
    (run,) = read_path(write(tmp_path / "oom.log", text), Given())
    assert (run.state, run.rate, run.num_gpus) == ("out_of_memory", None, 8)


def test_a_log_with_two_shapes_makes_two_runs_and_restarts_of_one_shape_make_one(tmp_path: Path) -> None:
    launcher = "nnodes={}, num_local_procs=4, node_rank=0\ndist_world_size={}\n"
    parts = [launcher.format(1, 4), launcher.format(2, 8), launcher.format(2, 8)]
    text = "".join(part + running_log([1.0] * 20, batch=16) for part in parts)
    runs = read_path(write(tmp_path / "sweep.log", text), Given())
    assert [(run.num_nodes, run.num_gpus, len(run.windows)) for run in runs] == [(1, 4, 10), (2, 8, 20)]
    assert [run.rate for run in runs] == pytest.approx([4.0, 2.0])


def test_a_folder_of_records_is_read_whole(tmp_path: Path) -> None:
    for nodes in (1, 2):
        folder = tmp_path / f"run-{nodes}"
        folder.mkdir()
        (folder / "summary.json").write_text(
            json.dumps({"state": "failed", "num_nodes": nodes, "world_size": 4 * nodes})
        )
    assert [run.num_gpus for run in read_all([tmp_path])] == [4, 8]


def test_a_folder_without_records_is_refused(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    with pytest.raises(InputError, match="neither a run directory nor a folder of them"):
        read_path(tmp_path, Given())


@pytest.mark.parametrize("how", [["analysis/throughput.py"], ["-m", "clap_ds.analysis.throughput"]])
def test_the_command_works_as_script_and_module_without_torch(how: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", *how, str(DATA / "deepspeed_2ranks.log")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "1 nodes × 2 GPUs, completed" in done.stdout
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}
    assert "clap_ds" in imported
    assert not imported & {"torch", "deepspeed", "matplotlib", "pydantic", "numpy"}


def test_a_mistake_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "analysis/throughput.py", str(tmp_path / "nothing")], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr
