"""Rates read from logs equal the programs' own numbers, don't depend on length and print interval,
and withstand damage."""

import os
import re
from collections.abc import Callable
from pathlib import Path
from statistics import fmean

import pytest

from clap_ds.analysis.runs import read_runs
from clap_ds.analysis.table import Run
from clap_ds.analysis.training_log import read_log, read_log_lines
from clap_ds.utils.errors import UserError
from clap_ds.utils.files import LONGEST_LINE
from tests.analysis.samples import DATA, LAUNCHER, make_options, running_log, throughput_line, write

Read = Callable[..., Run]
FAILURE = "Traceback (most recent call last)\n"
# Lines as public logs have them, and lines before them.
PROGRESS = {
    "DeepSpeed 0.6": (
        "[timer.py:189:stop] 0/{step}, SamplesPerSec={average}, MemAllocated=0.26GB, MaxMemAllocated=9.02GB",
        "",
    ),
    "DeepSpeed 0.7": (
        "[timer.py:197:stop] 0/{step}, RunningAvgSamplesPerSec={average}, CurrSamplesPerSec=1.5, MemAllocated=1.75GB,"
        " MaxMemAllocated=2.6GB",
        "",
    ),
    "Megatron-LM": (
        " [2026-04-27 00:00:01] iteration {step:8d}/  250000 | consumed samples: {samples:12d} | elapsed time per iteration"
        " (ms): {mean_ms:.1f} | throughput per GPU (TFLOP/s/GPU): 40.4 | learning rate: 1.5E-06 | global batch size:"
        " {batch:5d} | lm loss: 2.504220E+00 |",
        "using world size: 8, data-parallel size: 8, tensor-model-parallel size: 1\n",
    ),
    "Megatron-DeepSpeed": (
        " iteration {step:8d}/50000 | consumed samples: {samples} | consumed tokens: 11534336 | elapsed time per iteration"
        " (ms): {mean_ms:.1f} | learning rate: 1.499E-05 | gloabl batch size: {batch:4d} | lm loss: 1.3E+01 |",
        "",
    ),
    "torchtitan": (
        "[rank0]:[titan] 2025-11-25 19:44:58,838 - root - INFO - \x1b[31mstep: {step:2}  \x1b[32mloss:  7.6259  "
        "\x1b[33mgrad_norm: 26.6250  \x1b[36mmemory: 66.91GiB(37.51%)  "
        "\x1b[34mtps: {tps:,}  \x1b[35mtflops: 314.71  \x1b[34mmfu: 13.99%\x1b[39m",
        "[titan] Trainer is initialized with local batch size 8, global batch size 64, gradient accumulation steps 1, sequence"
        " length 8192, total steps 10 (warmup 2)\n",
    ),
    "NeMo": (
        "0: Training epoch 0, iteration {step}/999 | lr: 6.897e-06 | global_batch_size: {batch} | global_step: {step} |"
        " max_memory_reserved: 127785762816 | reduced_train_loss: 11.96 | train_step_timing in s: {mean_s:.4g} |"
        " TFLOPS_per_GPU: 1.249e+03 | consumed_samples: {samples}",
        "",
    ),
    "Lightning": (
        "\rEpoch 0:  22%|██▏       | {step}/1000 [{clock}<01:02,  4.47s/it, loss=10.072, v_num=193315]",
        "",
    ),
    "NeMo 1": (
        "Epoch 0: :  47%|████▋     | {step}/? [{clock}<07:13, global_step=2e+3, train_step_timing in s=49.50]",
        "",
    ),
    "Composer": (
        "[batch={step}/5000]:\n\t Train time/batch: {step}\n\t Train time/sample: {samples}\n"
        "\t Train throughput/batches_per_sec: 0.1\n\t Train throughput/samples_per_sec: {rate:.4f}\n"
        "\t Train throughput/device/samples_per_sec: 0.1708",
        "",
    ),
}


@pytest.fixture
def read(tmp_path: Path) -> Read:
    """Return a function that reads a log with these options, by default of one GPU."""

    def read_text(text: str, **options: int | str) -> Run:
        log = write(tmp_path / "run.log", text)
        (run,) = read_runs([log], make_options(**{"nodes": 1, "gpus": 1, **options}))
        return run

    return read_text


def progress_line(program: str, step: int, mean_s: float = 1.0, **more: object) -> str:
    """Return a program's line after `step` steps of 64 samples, the last of which took `mean_s`."""
    numbers = {"step": step, "samples": 64 * step, "batch": 64, "mean_s": mean_s, **more}
    numbers |= {"mean_ms": 1000 * mean_s, "rate": 64 / mean_s}
    return PROGRESS[program][0].format(**numbers) + "\n"


def clock(seconds: int) -> str:
    return f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"


def parameters(batch: int, gpus: int = 1) -> str:
    """Return open_clip's parameters."""
    return f"x | INFO |   batch_size: {batch}\nx | INFO |   world_size: {gpus}\n"


def open_clip_log(epochs: list[list[float]], batch: int, every: int = 10, dropped: int = 0) -> str:
    """Return open_clip's lines of epochs with these times of batches, printed after batches 1, 1 +
    `every` … and the last. `dropped`: samples of an incomplete batch."""
    text = ""
    for epoch, times in enumerate(epochs):
        recent: list[float] = []
        for done, time in enumerate(times, start=1):
            recent.append(time)
            if done % every == 1 or done == len(times):
                samples = f"{done * batch:>6}/{len(times) * batch + dropped}"
                text += (
                    f"x | INFO | Train Epoch: {epoch} [{samples} ({100 * done // len(times)}%)] "
                )
                text += (
                    f"Data (t): 1.951 Batch (t): {fmean(recent):.3f}, 7.5/s, 7.5/s/gpu LR: 0.1 \n"
                )
                recent = []
    return text


def test_rate_of_a_deepspeed_log_is_that_of_its_steps():
    log = DATA / "deepspeed_2ranks.log"
    rates = re.findall(r"CurrSamplesPerSec=([\d.]+)", log.read_text())
    run = read_log(log)
    # Two GPUs; the last 30 steps follow the warm-up.
    step_s = fmean(2 / float(rate) for rate in rates[-30:])
    assert run.rate == pytest.approx(1 / step_s, rel=1e-3)
    assert (run.nodes, run.gpus, run.batch_per_gpu, run.kind) == (1, 2, 64, "log")
    assert (run.state, run.memory_peak_gib) == ("completed", 0.33)
    assert "excludes data loading" in run.notes


@pytest.mark.parametrize(
    ("lines", "field", "value"),
    [
        ("bfloat16_config .............. enabled=True", "precision", "bfloat16"),
        ("world_size ................... 16", "gpus", 16),
        ("run directory: my runs/7", "directory", "my runs/7"),
        ("CUDA out of memory. Tried\nTraceback (most recent call last):", "state", "out_of_memory"),
        (
            "*** JOB 7 ON n1 CANCELLED AT 2026-01-01T00:00:00 DUE TO TIME LIMIT ***",
            "state",
            "timeout",
        ),
        ("exits with return code = -9", "state", "failed"),
    ],
)
def test_facts_of_other_lines_are_read(tmp_path, lines, field, value):
    steps = running_log([1.0] * 20)
    text = f"{steps}{lines}" if field == "state" else f"{lines}\n{steps}"
    assert getattr(read_log(write(tmp_path / "x.log", text)), field) == value


@pytest.mark.parametrize(
    ("pattern", "replacement"),
    [
        ("$", ""),
        # LAION-CLAP
        (r"] Data (.*?), .*", r"] Loss: 5.1 (5.1) Data \1 LR: 3e-4"),
        # 2021
        (
            r"] Data \(t\): (\S+) Batch \(t\): (\S+),.*",
            r"]\tLoss: 6\tData (t) \1\tBatch (t) \2\tLR",
        ),
    ],
)
def test_rate_of_open_clip_and_laion_clap_counts_every_step(read, pattern, replacement):
    """Two epochs of 1,000 steps of 8 × 616 samples; every tenth step takes 1 s longer."""
    epoch = [2.0 if step % 10 == 9 else 1.0 for step in range(1000)]
    lines = re.sub(pattern, replacement, open_clip_log([epoch] * 2, 8 * 616, 100))
    head = parameters(616, 8) + "x | INFO |   model: CLAP-HTSAT-tiny-Roberta-base\n"
    run = read(head + lines, gpus=8, nodes=2)
    assert (run.gpus, run.batch_per_gpu) == (8, 616)
    assert run.model == "clap_htsat_tiny_roberta_base"
    assert run.rate == pytest.approx(616 / 1.1, rel=1e-3)
    without_batch = read(lines, gpus=8, nodes=2)
    assert without_batch.rate is None
    assert "--batch_per_gpu" in without_batch.notes


@pytest.mark.parametrize("dropped", [0, 500])
def test_epoch_without_its_incomplete_batch_counts_trained_samples(read, dropped):
    epochs = [[10.0, *[1.0] * 39]] * 4
    run = read(parameters(616) + open_clip_log(epochs, 616, dropped=dropped))
    assert run.rate == pytest.approx(616 * (160 - 11) / (160 - 11 + 3 * 9), rel=1e-3)


@pytest.mark.parametrize(
    "line", ["dist_world_size=8\n", "using world size: 8, data-parallel-size: 4\n"]
)
def test_data_parallel_size_of_deepspeed_is_not_the_number_of_gpus(tmp_path, line):
    dump = "train_micro_batch_size_per_gpu  4\ngradient_accumulation_steps .. 2\nworld_size ................... 4\n"
    # This program's rate depends on the batch.
    run = read_log(write(tmp_path / "x.log", line + dump + open_clip_log([[1.0] * 40], 32)))
    assert (run.gpus, run.rate) == (8, pytest.approx(4))
    assert (run.batch_per_gpu, run.micro_batch, run.accumulation) == (4, 4, 2)


def test_rounding_of_step_times_is_noted_if_it_is_coarse(read):
    run = read(parameters(16) + open_clip_log([[10.0, *[0.0304] * 99]] * 2, 16))
    assert "rounds" in run.notes
    # NeMo's times lack their last zeros.
    run = read("".join(progress_line("NeMo", step, 0.5) for step in range(40)))
    assert (run.rate, "rounds" in run.notes) == (pytest.approx(128), False)


@pytest.mark.parametrize("program", PROGRESS)
def test_rate_of_another_program_is_that_of_its_steps(read, program):
    """400 steps of 64 samples. The first ten take 9 s each, later ones 2 or 3."""
    _, text = PROGRESS[program]
    times = [9.0] * 10 + [2.0, 3.0] * 195
    for step in range(10, 401, 10):
        mean_s = fmean(times[step - 10 : step])
        total_s = round(sum(times[:step]))
        average = 64 * (step - 2) / (total_s - 18)
        tps = round(8 * 8192 / mean_s)
        text += progress_line(program, step, mean_s, average=average, tps=tps, clock=clock(total_s))
    run = read(text, gpus=8, batch_per_gpu=8)
    assert run.rate == pytest.approx(64 / 2.5 / 8, rel=1e-4)
    assert run.batch_per_gpu == 8
    assert (run.deepspeed_samples_per_s_per_gpu is not None) == program.startswith("DeepSpeed")


def test_summary_of_hugging_face_is_the_rate_of_the_last_run(read):
    text = "  Instantaneous batch size per device = 8\n  Gradient Accumulation steps = 4\n"
    for seconds, rate in ((100.0, 5.0), (1175.4751, 250.552)):
        text += (
            f"{{'train_runtime': '{seconds}', 'train_samples_per_second': '{rate}', 'epoch': 1}}\n"
        )
    run = read(text, gpus=2)
    assert (run.rate, run.batch_per_gpu, run.micro_batch) == (pytest.approx(125.276), 32, 8)
    assert "warm-up" in run.notes


def lightning_line(epoch: int, step: int, seconds: int) -> str:
    return f"Epoch {epoch}:  47%|██| {step}/9999 [{clock(seconds)}<00:00,  2.06it/s]\r"


def test_epochs_of_lightning_add_up(read):
    steps = (0, 25, 100)
    epochs = [
        "".join(lightning_line(epoch, step, 2 * step) for step in steps) for epoch in range(3)
    ]
    assert read("".join(epochs), batch_per_gpu=6).rate == pytest.approx(3)


def test_batch_that_grows_counts_the_samples_of_each_line(read):
    """Of Megatron-LM's lines, 100 steps of 64 samples and 100 of 128 take 1 s each."""
    text = ""
    for step in range(10, 201, 10):
        samples = 64 * step + 64 * max(step - 100, 0)
        batch = 128 if step > 100 else 64
        text += progress_line("Megatron-LM", step, samples=samples, batch=batch)
    assert read(text).rate == pytest.approx((90 * 64 + 100 * 128) / 190, rel=0.02)


def test_rate_of_two_programs_is_that_with_the_wait_for_data(read):
    text = ""
    for step in range(1, 101):
        text += throughput_line(step, 80.0) + progress_line("Megatron-DeepSpeed", step)
    run = read(text)
    assert (run.rate, run.deepspeed_samples_per_s_per_gpu) == (pytest.approx(64), pytest.approx(80))
    assert "timer" not in run.notes
    run = read(text, rate="deepspeed")
    assert run.rate == pytest.approx(80)
    assert "timer" in run.notes


def test_torchtitan_log_without_sequence_length_names_it(read):
    run = read("".join(progress_line("torchtitan", step, tps=9) for step in range(1, 40)))
    assert run.rate is None
    assert "sequence length" in run.notes


def test_warm_up_of_a_resumed_run_is_not_counted(read):
    """The first ten steps take 9 s each, and later ones 2 s."""
    lines = [progress_line("Megatron-LM", 5001, 9.0), progress_line("Megatron-LM", 5010, 9.0)]
    lines += [progress_line("Megatron-LM", 5000 + step, 2.0) for step in range(20, 101, 10)]
    assert read("".join(lines)).rate == pytest.approx(32, rel=1e-3)


def test_restart_at_another_print_interval_is_noticed(read):
    text = running_log([1.0] * 100, every=10) + running_log([2.0] * 300, every=75)
    assert read(text).rate == pytest.approx(32)


def test_only_the_last_start_counts(tmp_path):
    head = LAUNCHER.format(1, 1)
    # The steps of the second start don't begin again.
    text = running_log([1.0] * 12) + FAILURE + head + running_log([2.0] * 30, every=10)
    run = read_log(write(tmp_path / "run.log", head + text))
    assert (run.rate, run.gpus, run.state) == (pytest.approx(32), 1, "unknown")


def test_repeated_impossible_and_damaged_lines_are_skipped(read):
    good = running_log([1.0] * 16).splitlines(keepends=True)
    impossible = [throughput_line(17, value) for value in (0.0, float("-inf"), float("nan"), -5.0)]
    torn = good[-1].replace("CurrSamplesPerSec=64.0,", "CurrSamplesPer[Rank 1] hello Sec=64.0,")
    torn = torn.replace("=16,", "=18,")
    late = throughput_line(15, 60.0)
    # Two ranks print each line.
    doubled = [f"0: {line}1: {line}" for line in good]
    assert read("".join([*doubled, *impossible, torn, late])).rate == pytest.approx(64)


def test_file_without_a_rate_is_rejected_with_the_reason(tmp_path):
    log = write(tmp_path / "bad.log", b"\x7fELF\0\0\0\1" * 40)
    programs = r"DeepSpeed, open_clip.*Megatron.*torchtitan.*NeMo"
    with pytest.raises(UserError, match=rf"bad\.log: no .* lines.*{programs}.*csv.*nodes, gpus"):
        read_log(log)
    with pytest.raises(UserError, match="can't be read"):
        read_log(tmp_path)


def test_log_shorter_than_the_warm_up_has_its_running_average(tmp_path):
    text = LAUNCHER.format(1, 4) + running_log([1.0, 1.0, 2.0, 4.0], batch=12)
    run = read_log(write(tmp_path / "short.log", text))
    assert run.rate == pytest.approx(12 / 3 / 4)
    assert "too short" in run.notes


def test_failed_log_without_steps_has_its_state(tmp_path):
    text = LAUNCHER.format(2, 8) + "OutOfMemoryError: CUDA out of memory\n"
    run = read_log(write(tmp_path / "oom.log", text))
    assert (run.state, run.rate, run.gpus) == ("out_of_memory", None, 8)


def test_endless_line_is_cut_and_a_file_of_one_is_rejected(tmp_path):
    steps = running_log([0.1] * 30).encode()
    path = write(tmp_path / "run.log", b"\0" * 3 * LONGEST_LINE + b"\n" + steps)
    assert read_log(path, default_batch=16).rate
    assert max(map(len, read_log_lines(path))) == LONGEST_LINE
    write(path, "")
    os.truncate(path, 200 * 10**9)
    with pytest.raises(UserError, match="a line has more than"):
        read_log(path)
