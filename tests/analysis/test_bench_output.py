"""The benchmark's own printing: its figures are taken, not DeepSpeed's of steps that it doesn't time."""

import re
from pathlib import Path
from typing import Any

import pytest

from clap_ds.analysis.record import HOST_ALONE
from clap_ds.analysis.training_log import read_log
from clap_ds.config.errors import UserError
from clap_ds.record.schema import Summary
from clap_ds.record.terminal import print_summary
from tests.analysis.samples import running_log, write

SUMMARY: dict[str, Any] = {
    "preset": "htsat_tiny_roberta_base", "num_nodes": 2, "world_size": 8, "micro_batch_per_gpu": 308, "text_tokens": 514,
    "precision": "torch_autocast_bfloat16", "device_name": "NVIDIA GH200 120GB", "device_type": "cuda",
    "samples_per_s_per_gpu": {"mean": 1234.9, "low": 1230.0, "high": 1240.25,
                              "windows": [1234.56, 1230.0, 1240.25]}, "samples_per_s": 9879.2,
    "deepspeed_samples_per_s": 10000.0, "deepspeed_times_host_alone": True,
    "data_wait_percent": 0.12, "memory_peak_bytes": 3 * 2**30,
    "step_time_s": {"median": 0.499, "p95": 0.51, "slowest_rank_median": 0.505}, "achieved_tflops": 412.0,
    "breakdown_s": {"data_wait": 0.001, "forward": 0.2, "loss": 0.01, "backward": 0.25, "exposed_communication": 0.03,
                    "optimizer": 0.008},
    "flops": {"published_gflops": 111.2, "model_gflops": 100.0, "training_gflops": 300.0, "recomputed_gflops": 0.0,
              "deepspeed_gflops": None},
    "mfu_published_percent": 41.6, "mfu_model_percent": 37.4, "peak_tflops": 989.0, "warnings": ["a long warning " * 9],
}  # fmt: skip


def printed(capsys: pytest.CaptureFixture[str], steps: str, **changes: Any) -> str:
    """What a run of the benchmark prints, `steps` and the table."""
    summary: Summary = {**SUMMARY, **changes}  # type: ignore[typeddict-item]
    print_summary(summary)
    return f"run directory: runs/x-20261122T031609Z\n{steps}{capsys.readouterr().out}"


def windows(*totals: float) -> str:
    lines = (f"step {10 + number}/90  window {number}/{len(totals)}: {total:,.1f} samples/s  9 s left\n"
             for number, total in enumerate(totals, start=1))  # fmt: skip
    return "step 10/90  warm-up 10/10  3 s left\n" + "".join(lines)


@pytest.mark.parametrize("label", ["", "0: ", "[default0]:"])
def test_every_figure_of_the_table_arrives(tmp_path: Path, capsys: pytest.CaptureFixture[str], label: str) -> None:
    text = printed(capsys, windows(9876.5, 9840.0, 9922.0))
    (run,) = read_log(write(tmp_path / "slurm-7.out", re.sub("^", label, text, flags=re.MULTILINE)))
    assert (run.model, run.device, run.precision) == tuple(
        SUMMARY[name] for name in ("preset", "device_name", "precision")
    )
    assert (run.kind, run.state, run.nodes, run.gpus, run.text_tokens) == ("log", "completed", 2, 8, 514)
    assert (run.rate, run.interval) == (1234.9, (1230.0, 1240.25))
    assert run.uncertainty_from == "range of 3 windows of 1 run"
    assert (run.engine_samples_per_s_per_gpu, run.achieved_tflops) == (1250.0, 412.0)
    assert run.windows == pytest.approx((9876.5 / 8, 1230.0, 1240.25))
    assert (run.accumulation, run.batch_per_gpu) == (2, 616)  # which the table doesn't print
    assert (run.step_time_s, run.slowest_rank_step_time_s, run.data_wait_percent) == (0.499, 0.505, 0.12)
    assert (run.memory_peak_gib, run.mfu_model_percent, run.peak_tflops) == (3.0, 37.4, 989.0)
    assert run.breakdown_s == pytest.approx(SUMMARY["breakdown_s"])
    assert run.notes == HOST_ALONE


def test_the_engines_rate_is_the_tables_own_or_of_deepspeeds_lines_of_the_timed_windows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The lines without those of the warm-up, 4 times as slow, and of the instrumented steps after the last window."""
    lines = running_log([4.0] * 10 + [1.0] * 40 + [9.0] * 10, batch=10160).splitlines(keepends=True)
    timed = "".join(lines[:48]) + windows(9876.5, 9840.0, 9922.0) + "".join(lines[48:])
    (run,) = read_log(write(tmp_path / "rank0.log", printed(capsys, timed)))
    assert (run.rate, run.engine_samples_per_s_per_gpu) == (1234.9, 10000 / 8)
    (killed,) = read_log(write(tmp_path / "killed.log", "dist_world_size=8\n" + timed))
    mean = 3 / (1 / 9876.5 + 1 / 9840.0 + 1 / 9922.0)
    assert (killed.rate, killed.state) == (pytest.approx(mean / 8), "unknown")
    assert killed.engine_samples_per_s_per_gpu == pytest.approx(10160 / 8)
    assert "as the benchmark printed them" in killed.notes


def test_each_run_of_the_benchmark_in_a_file_is_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = printed(capsys, windows(9876.5, 9876.5))
    second = printed(capsys, "", world_size=4, num_nodes=1)  # of a terminal, where progress is a bar
    third = windows(1600.0) + "slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-01-01T00:00:00 ***\n"
    runs = read_log(write(tmp_path / "slurm-8.out", first + second + third))
    assert [(run.gpus, run.state, run.rate) for run in runs] == [
        (8, "completed", 1234.9), (4, "completed", 1234.9), (0, "terminated", 1600.0),
    ]  # fmt: skip


def test_another_hosts_launcher_lines_after_the_table_are_no_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    launcher = "[x] [INFO] nnodes=2, num_local_procs=4, node_rank={}\n[x] dist_world_size=8\n"
    ends = "Process 12 exits successfully.\n"
    text = launcher.format(0) + printed(capsys, "") + ends + launcher.format(1) + ends
    assert [run.rate for run in read_log(write(tmp_path / "all.log", text))] == [1234.9]


def test_windows_printed_too_coarsely_are_left_to_the_tables_interval(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rates = {"mean": 0.76, "low": 0.75, "high": 0.78, "windows": [0.75, 0.78]}
    (run,) = read_log(write(tmp_path / "cpu.log", printed(capsys, windows(1.5, 1.5), samples_per_s_per_gpu=rates)))
    assert (run.rate, run.windows, run.interval) == (0.76, (), (0.75, 0.78))


def test_an_older_versions_table_keeps_its_median_and_loses_what_it_measured_wrongly(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its interval has another coverage than 95 %; with the windows in the log, the rate over time follows."""
    rates = SUMMARY["samples_per_s_per_gpu"] | {"coverage": 0.75}
    steps = windows(9000.0, 9000.0, 4500.0)
    for text, rate in (("", 1234.9), (steps, 9000 / 8 * 3 / 4)):
        (run,) = read_log(write(tmp_path / "old.log", printed(capsys, text, samples_per_s_per_gpu=rates)))
        assert run.rate == pytest.approx(rate)
        assert [*run.breakdown_s] == ["data_wait", "forward", "loss", "optimizer"]
        assert "backward and exposed communication left out" in run.notes


def test_a_table_of_something_else_is_no_run_of_the_benchmark(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no table and no window of the benchmark"):
        read_log(write(tmp_path / "evaluation.log", "┌──┬──┐\n│ retrieval, R@1 │ 12.5 % │\n└──┴──┘\n"))
