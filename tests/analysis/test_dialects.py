"""What programs other than DeepSpeed print: open_clip, LAION-CLAP, this project's benchmark, any that the table is given."""

import re
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from clap_ds.analysis.dialects import DIALECTS, Dialect
from clap_ds.analysis.record import HOST_ALONE
from clap_ds.analysis.runs import read_runs
from clap_ds.analysis.training_log import read_log
from clap_ds.record.schema import Summary
from clap_ds.record.terminal import print_summary
from tests.analysis.samples import LAUNCHER, given, running_log, write

OPEN_CLIP = (
    "2026-11-20,12:03:13 | INFO | Train Epoch: {} [{:>6}/{} ({:.0f}%)] {}Data (t): 0.01 Batch (t): {:.3f}{} LR: 3e-4 "
)
PARAMETERS = "".join(
    f"2026-11-20,12:00:00 | INFO |   {line}\n"
    for line in ("batch_size: 616", "world_size: 8", "accum_freq: 1", "model: CLAP-HTSAT-tiny-Roberta-base")
)


@pytest.mark.parametrize("form", ["open_clip", "open_clip before it told a GPU's rate", "LAION-CLAP"])
@pytest.mark.parametrize("first", [1, 401])
def test_open_clips_and_laion_claps_training_logs_are_read(tmp_path: Path, form: str, first: int) -> None:
    """Two epochs of 1,000 steps of 8 × 616 samples, a line after step 1, 101, 201 …; every tenth step is slower by a second.
    Rates are of the last step alone, which is one of the quick. The second log lacks its head."""
    batch, since, text = 8 * 616, [], PARAMETERS if first == 1 else ""
    for step in range(2000):
        since.append(2.0 if step % 10 == 9 else 1.0)
        done = step % 1000 + 1
        if step % 1000 % 100 == 0 or done == 1000:
            told = [f", {batch / since[-1]:#g}/s", f", {batch / since[-1]:#g}/s, {616 / since[-1]:#g}/s/gpu"]
            rate, loss = ("", "Loss: 5.1 (5.1) ") if form == "LAION-CLAP" else (told[form == "open_clip"], "")
            values = (step // 1000, done * batch, 1000 * batch, done / 10, loss, fmean(since), rate)
            text += OPEN_CLIP.format(*values) + "Logit Scale: 14.286\n" if step + 1 >= first else ""
            since = []
    log = write(tmp_path / "n2.log", text)
    (run,) = read_runs([log], given(gpus=None if first == 1 or form == "open_clip" else 8))
    assert (run.nodes, run.gpus, run.batch_per_gpu) == (2, 8, 616)
    assert run.model == ("htsat_tiny_roberta_base" if first == 1 else "")
    # From step 101 (501) to 1,000, step 1,001, and to 2,000: its rate is that of the mean step, 1.1 s.
    assert run.rate == pytest.approx(616 / 1.1, rel=1e-3)
    assert (run.engine_samples_per_s_per_gpu, "DeepSpeed" in run.notes) == (None, False)
    assert "2 nodes by its name" in run.notes
    assert "starts in the log" not in run.notes


def test_open_clips_batch_is_exact_though_its_times_are_rounded_and_its_warm_up_is_dropped(tmp_path: Path) -> None:
    """A line every 10 steps of 616 samples, the first 10 of which took 4 times as long: 0.1 s that were really 0.0985 s."""
    lines = [OPEN_CLIP.format(0, 6160 * number, 100000, 6, "", 0.4 if number == 1 else 0.1, ", 6253.81/s, 6253.81/s/gpu")
             for number in range(1, 9)]  # fmt: skip
    (run,) = read_runs([write(tmp_path / "oc.log", "\n".join(lines))], given())
    assert (run.nodes, run.gpus, run.batch_per_gpu) == (1, 1, 616)
    assert (run.rate, len(run.windows)) == (pytest.approx(6160), 7)
    assert len(read_runs([tmp_path / "oc.log"], given(warmup_steps=30))[0].windows) == 5


def test_another_programs_lines_are_one_entry_in_the_table_of_dialects(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = rb"iteration +(?P<step>\d+)/.* time \(ms\): (?P<step_ms>[\d.]+) .* batch size: +(?P<global_batch>\d+)"
    monkeypatch.setitem(DIALECTS, "another", Dialect(b"iteration ", re.compile(numbers)))
    text = " iteration {:8d}/ 1000 | time (ms): {:.1f} | global batch size: {:5d} |\n"
    lines = (text.format(step, 900 if step == 10 else 250, 64) for step in range(10, 110, 10))
    (run,) = read_runs([write(tmp_path / "m.log", "".join(lines))], given(nodes=1, gpus=4))
    assert (run.rate, run.batch_per_gpu, len(run.windows)) == (pytest.approx(64), 16, 9)


SUMMARY: dict[str, Any] = {
    "preset": "htsat_tiny_roberta_base", "num_nodes": 2, "world_size": 8, "micro_batch_per_gpu": 308, "text_tokens": 514,
    "precision": "torch_autocast_bfloat16", "device_name": "NVIDIA GH200 120GB", "device_type": "cuda",
    "samples_per_s_per_gpu": {"mean": 1234.9, "low": 1230.0, "high": 1240.25, "windows": [1234.56, 1230.0, 1240.25]},
    "samples_per_s": 9879.2, "deepspeed_samples_per_s": 10000.0, "deepspeed_times_host_alone": True,
    "data_wait_percent": 0.12, "memory_peak_bytes": 3 * 2**30,
    "step_time_s": {"median": 0.499, "p95": 0.51, "slowest_rank_median": 0.505}, "breakdown_s": None,
}  # fmt: skip


def printed(capsys: pytest.CaptureFixture[str], steps: str, **changes: Any) -> str:
    """What a run of the benchmark prints, `steps` and the table."""
    summary: Summary = {**SUMMARY, **changes}  # type: ignore[typeddict-item]
    print_summary(summary)
    return f"run directory: runs/x-20261122T031609Z\n{steps}{capsys.readouterr().out}"


@pytest.mark.parametrize("label", ["", "0: ", "[default0]:"])
def test_of_the_benchmarks_output_its_own_figures_are_taken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], label: str
) -> None:
    """And none of DeepSpeed's lines, of steps that it doesn't time."""
    text = printed(capsys, running_log([4.0] * 40))
    (run,) = read_log(write(tmp_path / "slurm-7.out", re.sub("^", label, text, flags=re.MULTILINE)))
    assert (run.model, run.device) == (SUMMARY["preset"], SUMMARY["device_name"])
    assert (run.precision, run.directory) == (SUMMARY["precision"], "runs/x-20261122T031609Z")
    assert (run.kind, run.state, run.nodes, run.gpus, run.text_tokens) == ("log", "completed", 2, 8, 514)
    assert (run.rate, run.interval) == (1234.9, (1230.0, 1240.25))
    assert run.uncertainty_from == "range of 3 windows of 1 run"
    assert (run.engine_samples_per_s_per_gpu, run.notes) == (1250.0, HOST_ALONE)
    assert (run.accumulation, run.batch_per_gpu) == (2, 616)  # which the table doesn't print


def test_each_run_of_the_benchmark_in_a_file_is_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The second's interval can't be, the last lines are of another host."""
    rates = SUMMARY["samples_per_s_per_gpu"]
    first = printed(capsys, "", samples_per_s_per_gpu=rates | {"coverage": 0.95})
    second = printed(capsys, "", world_size=4, num_nodes=1, samples_per_s_per_gpu=rates | {"high": 1234.0})
    launcher = LAUNCHER.format(1, 4) + "Process 12 exits successfully.\n"
    runs = read_log(write(tmp_path / "slurm-8.out", first + second + launcher))
    assert [(run.gpus, run.state, run.rate) for run in runs] == [(8, "completed", 1234.9), (4, "completed", 1234.9)]
    assert [run.uncertainty_from for run in runs] == ["95 % interval of 3 windows of 1 run", ""]
