"""The benchmark's own printing: its figures are taken, not DeepSpeed's of steps that it doesn't time."""

import re
from pathlib import Path
from typing import Any

import pytest

from clap_ds.analysis.deepspeed_log import read_log
from clap_ds.config.errors import UserError
from clap_ds.record.schema import Summary
from clap_ds.record.terminal import print_summary
from tests.analysis.samples import throughput_line, write

SUMMARY: dict[str, Any] = {
    "preset": "htsat_tiny_roberta_base", "num_nodes": 2, "world_size": 8, "micro_batch_per_gpu": 308, "text_tokens": 514,
    "precision": "torch_autocast_bfloat16", "device_name": "NVIDIA GH200 120GB", "device_type": "cuda",
    "samples_per_s_per_gpu": {"median": 1234.56, "low": 1230.0, "high": 1240.25, "coverage": 0.75,
                              "windows": [1234.56, 1230.0, 1240.25]}, "samples_per_s": 9876.48,
    "deepspeed_samples_per_s": None, "audio_hours_per_s": 27.4, "data_wait_percent": 0.12, "memory_peak_bytes": 3 * 2**30,
    "step_time_s": {"median": 0.499, "p95": 0.51, "slowest_rank_median": 0.505}, "achieved_tflops": 412.0,
    "breakdown_s": {"data_wait": 0.001, "forward": 0.2, "loss": 0.01, "backward": 0.25, "exposed_communication": 0.03,
                    "optimizer": 0.008},
    "flops": {"published_gflops": 111.2, "model_gflops": 100.0, "recomputed_gflops": 0.0, "deepspeed_gflops": None},
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
    assert (run.rate, run.interval) == (1234.56, (1230.0, 1240.25))
    assert run.windows == pytest.approx((9876.5 / 8, 1230.0, 1240.25))
    assert (run.accumulation, run.batch_per_gpu) == (2, 616)  # which the table doesn't print
    assert (run.step_time_s, run.slowest_rank_step_time_s, run.data_wait_percent) == (0.499, 0.505, 0.12)
    assert (run.memory_peak_gib, run.mfu_model_percent, run.peak_tflops) == (3.0, 37.4, 989.0)
    assert run.breakdown_s == pytest.approx(SUMMARY["breakdown_s"])
    assert run.notes == ""


def test_deepspeeds_lines_of_warm_up_and_instrumented_steps_are_not_taken_for_the_timed_windows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slow = "".join(throughput_line(step, 84.65) for step in range(3, 40))
    timed = slow + windows(9876.5, 9840.0, 9922.0) + "".join(throughput_line(step, 80.0) for step in range(90, 99))
    (run,) = read_log(write(tmp_path / "rank0.log", printed(capsys, timed)))
    assert run.rate == 1234.56
    assert "DeepSpeed" not in run.notes
    (killed,) = read_log(write(tmp_path / "killed.log", timed), gpus=8)
    assert (killed.rate, killed.state) == (pytest.approx(9876.5 / 8), "unknown")
    assert "as the benchmark printed them" in killed.notes


def test_each_run_of_the_benchmark_in_a_file_is_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = printed(capsys, windows(9876.5, 9876.5))
    second = printed(capsys, "", world_size=4, num_nodes=1)  # of a terminal, where progress is a bar
    third = windows(1600.0) + "slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-01-01T00:00:00 ***\n"
    runs = read_log(write(tmp_path / "slurm-8.out", first + second + third))
    assert [(run.gpus, run.state, run.rate) for run in runs] == [
        (8, "completed", 1234.56), (4, "completed", 1234.56), (0, "terminated", 1600.0),
    ]  # fmt: skip


def test_windows_printed_too_coarsely_are_left_to_the_tables_interval(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rates = {"median": 0.76, "low": 0.75, "high": 0.78, "coverage": 0.5, "windows": [0.75, 0.78]}
    (run,) = read_log(write(tmp_path / "cpu.log", printed(capsys, windows(1.5, 1.5), samples_per_s_per_gpu=rates)))
    assert (run.rate, run.windows, run.interval) == (0.76, (), (0.75, 0.78))


@pytest.mark.parametrize(
    "rows",
    ["│ samples/s/GPU │ 1,234.56  [1,230.00, 1,240.25] │", "│ samples/s/rank │ 1,234.56 │\n"
     "│   75 % interval of 3 windows │ 1,230.00 – 1,240.25 │"],
)  # fmt: skip
def test_an_interval_is_read_beside_its_rate_and_on_a_line_of_its_own(tmp_path: Path, rows: str) -> None:
    (run,) = read_log(write(tmp_path / "bench.log", f"run directory: runs/x\n┌──┬──┐\n{rows}\n└──┴──┘\n"))
    assert (run.rate, run.interval) == (1234.56, (1230.0, 1240.25))


def test_a_table_of_something_else_is_no_run_of_the_benchmark(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no table and no window of the benchmark"):
        read_log(write(tmp_path / "evaluation.log", "┌──┬──┐\n│ retrieval, R@1 │ 12.5 % │\n└──┴──┘\n"))
