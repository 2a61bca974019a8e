"""Rates read from logs equal DeepSpeed's per-step numbers, don't depend on length and print
interval, and withstand damage."""

import os
import re
from itertools import pairwise
from pathlib import Path
from statistics import fmean

import pytest

from clap_ds.analysis.log_formats import DIALECTS, Dialect
from clap_ds.analysis.runs import read_runs
from clap_ds.analysis.training_log import read_log, read_log_lines
from clap_ds.utils.errors import UserError
from clap_ds.utils.files import LONGEST_LINE
from tests.analysis.samples import DATA, LAUNCHER, given, running_log, throughput_line, write

TWO_RANKS = DATA / "deepspeed_2ranks.log"


def test_a_rate_is_the_same_whatever_the_logs_length_and_print_interval(tmp_path: Path) -> None:
    """Every tenth step takes four times as long; the mean is 0.13 s. 64 samples per node of four
    GPUs."""
    for nodes, num_steps in ((1, 200), (2, 500), (4, 3000)):
        times = [0.4 if n % 10 == 9 else 0.1 for n in range(num_steps)]
        for every in (1, 5, 20):
            text = LAUNCHER.format(nodes, 4 * nodes) + running_log(times, 64 * nodes, every)
            run = read_log(write(tmp_path / f"{nodes}-{every}.log", text))
            assert run.deepspeed_samples_per_s_per_gpu == run.rate == pytest.approx(16 / 0.13)


def test_a_rate_agrees_with_deepspeeds_own_rates_of_steps() -> None:
    current = [
        float(value) for value in re.findall(r"CurrSamplesPerSec=([\d.]+)", TWO_RANKS.read_text())
    ]
    run = read_log(TWO_RANKS)
    assert run.rate == pytest.approx(30 / sum(2 / rate for rate in current[-30:]), rel=1e-3)
    assert (run.nodes, run.gpus, run.batch_per_gpu, run.kind) == (1, 2, 64, "log")
    assert (run.state, run.memory_peak_gib) == ("completed", 0.33)
    assert "excludes data loading" in run.notes, "another program's"
    run = read_log(DATA / "deepspeed_1rank_accumulating.log")
    assert (run.accumulation, run.batch_per_gpu) == (2, 128)


@pytest.mark.parametrize(
    ("lines", "field", "value"),
    [
        ("bfloat16_config .............. enabled=True", "precision", "bfloat16"),
        ("world_size ................... 16", "gpus", 16),
        ("run directory: my runs/7", "directory", "my runs/7"),
        ("CUDA out of memory. Tried\nTraceback (most recent call last):", "state", "out_of_memory"),
        ("*** JOB 7 ON n1 CANCELLED AT 2026-01-01T00:00:00 DUE TO TIME LIMIT ***", "state", "timeout"),
        ("exits with return code = -9", "state", "failed"),
    ],
)  # fmt: skip
def test_what_other_lines_say(tmp_path: Path, lines: str, field: str, value: object) -> None:
    steps = running_log([1.0] * 20)
    run = read_log(
        write(tmp_path / "x.log", steps + lines if field == "state" else f"{lines}\n{steps}")
    )
    assert getattr(run, field) == value


@pytest.mark.parametrize("form", ["open_clip", "LAION-CLAP"])
def test_open_clips_and_laion_claps_training_logs_are_read(tmp_path: Path, form: str) -> None:
    """Two epochs of 1,000 steps of 8 × 616 samples, with lines after steps 1, 101, 201 …; every
    tenth step takes 1 s longer."""
    parameters = "".join(
        f"2026-11-20,12:00:00 | INFO |   {line}\n"
        for line in (
            "batch_size: 616",
            "world_size: 8",
            "accum_freq: 1",
            "model: CLAP-HTSAT-tiny-Roberta-base",
        )
    )
    batch = 8 * 616
    since = []
    text = parameters
    for step in range(2000):
        since.append(2.0 if step % 10 == 9 else 1.0)
        done = step % 1000 + 1
        if step % 1000 % 100 == 0 or done == 1000:
            loss, rate = (
                ("Loss: 5.1 (5.1) ", "")
                if form == "LAION-CLAP"
                else ("", f", {batch:#g}/s, {616:#g}/s/gpu")
            )
            text += f"x | INFO | Train Epoch: {step // 1000} [{done * batch:>6}/{1000 * batch} ({done / 10:.0f}%)] {loss}"
            text += (
                f"Data (t): 0.01 Batch (t): {fmean(since):.3f}{rate} LR: 3e-4 Logit Scale: 14.286\n"
            )
            since = []
    (run,) = read_runs([write(tmp_path / "train.log", text)], given(gpus=8, nodes=2))
    assert (run.nodes, run.gpus, run.batch_per_gpu) == (2, 8, 616)
    assert run.model == "clap_htsat_tiny_roberta_base"
    assert (run.rate, run.deepspeed_samples_per_s_per_gpu) == (
        pytest.approx(616 / 1.1, rel=1e-3),
        None,
    )
    (run,) = read_runs(
        [write(tmp_path / "cut.log", text[len(parameters) :])], given(gpus=8, nodes=2)
    )
    assert run.rate is None
    assert "--batch_per_gpu" in run.notes
    (run,) = read_runs([tmp_path / "cut.log"], given(gpus=8, nodes=2, batch_per_gpu=616))
    assert run.rate == pytest.approx(616 / 1.1, rel=1e-3)


def test_another_programs_lines_are_one_entry_in_the_table_of_dialects(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = r"iteration +(?P<step>\d+)/.* time \(ms\): (?P<step_ms>[\d.]+) .* batch size: +(?P<global_batch>\d+)"
    monkeypatch.setitem(DIALECTS, "another", Dialect("iteration ", re.compile(numbers)))
    text = " iteration {:8d}/ 1000 | time (ms): {:.1f} | global batch size: {:5d} |\n"
    lines = (text.format(step, 900 if step == 10 else 250, 64) for step in range(10, 110, 10))
    (run,) = read_runs([write(tmp_path / "m.log", "".join(lines))], given(nodes=1, gpus=4))
    assert (run.rate, run.batch_per_gpu) == (pytest.approx(64), 16)
    numbers = r"\[fast\] it (?P<step>\d+) \| gpus (?P<gpus>\d+) \| (?P<rate>[\d.]+) samples/s"
    monkeypatch.setitem(DIALECTS, "another", Dialect("[fast] it ", re.compile(numbers)))
    # 10 steps at 100 samples/s and 30 at 300 take equal times, whatever the batch is.
    lines = (
        "[fast] it {} | gpus 8 | {} samples/s\n".format(*each)
        for each in ((20, 50), (30, 100), (60, 300))
    )
    (run,) = read_runs([write(tmp_path / "f.log", "".join(lines))], given(nodes=1))
    assert (run.rate, run.gpus) == (pytest.approx(200 / 8), 8)


def open_clip_log(
    epochs: list[list[float]], batch: int, clips: int, every: int, head: str = ""
) -> str:
    """Return open_clip's lines of epochs with these times of batches, printed after batches 1, 1 +
    `every` … and the last."""
    text = head
    for epoch, times in enumerate(epochs):
        since: list[float] = []
        for done, time in enumerate(times, start=1):
            since.append(time)
            if done % every == 1 or done == len(times):
                place = f"[{done * batch:>6}/{clips} ({100 * done // len(times)}%)]"
                text += (
                    f"2025-09-24,08:03:57 | INFO | Train Epoch: {epoch} {place} Data (t): 1.951 "
                )
                text += f"Batch (t): {fmean(since):.3f}, {batch / time:#g}/s, {batch / time:#g}/s/gpu LR: 0.000003 \n"
                since = []
    return text


ONE_GPU = "x | INFO |   batch_size: {}\nx | INFO |   world_size: 1\n"


@pytest.mark.parametrize("dropped", [0, 1, 500])
def test_epochs_that_drop_an_incomplete_batch_count_what_they_trained(
    tmp_path: Path, dropped: int
) -> None:
    epochs = [[10.0, *[1.0] * 39]] * 4
    text = open_clip_log(epochs, 616, 40 * 616 + dropped, 10, ONE_GPU.format(616))
    run = read_log(write(tmp_path / "x.log", text))
    assert run.rate == pytest.approx(616 * (160 - 11) / (160 - 11 + 3 * 9), rel=1e-3)


def test_lines_of_da_clip_give_the_rate_that_they_state(tmp_path: Path) -> None:
    """Lines as a public issue of DA-CLIP has them: 23 batches of 784 per epoch of 18,783 images."""
    line = "x | INFO | Train Epoch: {} [{:>5}/18783 ({}%)] Data (t): 31.0 Batch (t): {}, 24.5/s, 24.5/s/gpu LR: 0\n"
    text = ONE_GPU.format(784)
    for epoch, first_s, mean_s in ((22, "29.990", "2.978"), (23, "30.197", "2.994")):
        text += line.format(epoch, 784, 4, first_s) + line.format(epoch, 18032, 100, mean_s)
    run = read_log(write(tmp_path / "x.log", text))
    assert run.rate == pytest.approx(784 * 45 / (22 * 2.978 + 30.197 + 22 * 2.994))


@pytest.mark.parametrize("program", ["open_clip", "torchtitan", "Megatron-LM"])
def test_warm_up_of_a_resumed_run_is_not_counted(tmp_path: Path, program: str) -> None:
    """Steps of 64 samples and 2 s, of which the first ten take 9 s each."""
    times = [9.0] * 10 + [2.0] * 90
    text = open_clip_log([times], 64, 64 * 100, 10, ONE_GPU.format(64)).replace(
        "Epoch: 0", "Epoch: 3"
    )
    if program != "open_clip":
        line, text = PROGRESS[program]
        for since, done in pairwise([0, 1, *range(10, 101, 10)]):
            mean_s = fmean(times[since:done])
            step = 5000 + done
            numbers = {
                "samples": 64 * step,
                "batch": 64,
                "mean_ms": 1000 * mean_s,
                "tps": round(64 * 8192 / mean_s),
            }
            text += line.format(step=step, **numbers) + "\n"
    (run,) = read_runs([write(tmp_path / "x.log", text)], given(nodes=1, gpus=1))
    assert (run.rate or 0.0) * run.gpus == pytest.approx(32, rel=1e-3)


@pytest.mark.parametrize(
    "whole", ["dist_world_size=8\n", "using world size: 8, data-parallel-size: 4\n"]
)
def test_data_parallel_size_in_deepspeeds_dump_is_not_the_number_of_gpus(
    tmp_path: Path, whole: str
) -> None:
    dump = "train_micro_batch_size_per_gpu  4\ngradient_accumulation_steps .. 2\nworld_size ................... 4\n"
    text = whole + "".join(f"[config.py:1003:print]   {line}\n" for line in dump.splitlines())
    run = read_log(write(tmp_path / "x.log", text + running_log([1.0] * 20, batch=32)))
    assert (run.gpus, run.rate) == (8, pytest.approx(4))
    assert (run.batch_per_gpu, run.micro_batch, run.accumulation) == (4, 4, 2)
    text += open_clip_log([[1.0] * 40], 32, 32 * 40, 10)  # a rate that depends on the batch
    assert read_log(write(tmp_path / "x.log", text)).rate == pytest.approx(4)


def test_configuration_that_composer_prints_is_a_new_start_with_its_scale(tmp_path: Path) -> None:
    text = ""
    for rate in (100.0, 800.0):
        text += (
            "Config:\nnum_gpus_per_node: 8\nnum_nodes: 2\n"
            + f"\t Train throughput/samples_per_sec: {rate}\n" * 40
        )
    run = read_log(write(tmp_path / "x.log", text))
    assert (run.nodes, run.gpus, run.rate) == (2, 16, pytest.approx(50))


def test_open_clips_lines_of_2021_are_read(tmp_path: Path) -> None:
    text = open_clip_log([[0.5] * 40], 64, 64 * 40, 10, ONE_GPU.format(64))
    text = re.sub(
        r"] Data \(t\): (\S+) Batch \(t\): (\S+),.*",
        r"]\tLoss: 6.1\tData (t) \1\tBatch (t) \2\tLR: 0.1",
        text,
    )
    assert read_log(write(tmp_path / "x.log", text)).rate == pytest.approx(128)


def test_steps_that_the_log_cannot_resolve_are_noted(tmp_path: Path) -> None:
    for step_s, is_coarse in ((0.0304, True), (0.304, False)):
        text = open_clip_log([[10.0, *[step_s] * 99]] * 2, 16, 1600, 10, ONE_GPU.format(16))
        run = read_log(write(tmp_path / "x.log", text))
        assert ("rounds" in run.notes) == is_coarse


def test_nemos_times_without_their_last_zeros_are_not_coarse(tmp_path: Path) -> None:
    line, _ = PROGRESS["NeMo"]
    lines = (line.format(step=step, batch=64, mean_s=0.5, samples=64 * step) for step in range(40))
    run = read_log(write(tmp_path / "x.log", "\n".join(lines)), given_gpus=1)
    assert (run.rate, "rounds" in run.notes) == (pytest.approx(128), False)


PROGRESS = {
    "DeepSpeed 0.6": ("[timer.py:189:stop] 0/{step}, SamplesPerSec={average}, MemAllocated=0.26GB, MaxMemAllocated=9.02GB", ""),
    "DeepSpeed 0.7": (
        "[timer.py:197:stop] 0/{step}, RunningAvgSamplesPerSec={average}, CurrSamplesPerSec=1.5, MemAllocated=1.75GB,"
        " MaxMemAllocated=2.6GB", "",
    ),
    "Megatron-LM": (
        " [2026-04-27 00:00:01] iteration {step:8d}/  250000 | consumed samples: {samples:12d} | elapsed time per iteration"
        " (ms): {mean_ms:.1f} | throughput per GPU (TFLOP/s/GPU): 40.4 | learning rate: 1.5E-06 | global batch size:"
        " {batch:5d} | lm loss: 2.504220E+00 |", "using world size: 8, data-parallel size: 8, tensor-model-parallel size: 1\n",
    ),
    "Megatron-DeepSpeed": (
        " iteration {step:8d}/50000 | consumed samples: {samples} | consumed tokens: 11534336 | elapsed time per iteration"
        " (ms): {mean_ms:.1f} | learning rate: 1.499E-05 | gloabl batch size: {batch:4d} | lm loss: 1.3E+01 |", "",
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
        " TFLOPS_per_GPU: 1.249e+03 | consumed_samples: {samples}", "",
    ),
    "Lightning": ("\rEpoch 0:  22%|██▏       | {step}/1000 [{clock}<01:02,  4.47s/it, loss=10.072, v_num=193315]", ""),
    "NeMo 1": ("Epoch 0: :  47%|████▋     | {step}/? [{clock}<07:13, global_step=2e+3, train_step_timing in s=49.50]", ""),
    "Composer": (
        "[batch={step}/5000]:\n\t Train time/batch: {step}\n\t Train time/sample: {samples}\n"
        "\t Train throughput/batches_per_sec: 0.1\n\t Train throughput/samples_per_sec: {rate:.4f}\n"
        "\t Train throughput/device/samples_per_sec: 0.1708", "",
    ),
}  # fmt: skip


@pytest.mark.parametrize("program", PROGRESS)
def test_lines_of_other_programs_give_the_rate_of_their_steps(tmp_path: Path, program: str) -> None:
    """Lines as public logs have them, of 400 steps of 64 samples. The first ten take 9 s each,
    later ones 2 or 3."""
    line = PROGRESS[program][0] + "\n"
    text = PROGRESS[program][1]
    times = [9.0] * 10 + [2.0, 3.0] * 195
    for step in range(10, 401, 10):
        mean_s = fmean(times[step - 10 : step])
        total_s = round(sum(times[:step]))
        numbers = {
            "step": step,
            "samples": 64 * step,
            "batch": 64,
            "mean_s": mean_s,
            "mean_ms": 1000 * mean_s,
            "rate": 64 / mean_s,
        }
        numbers |= {
            "average": 64 * (step - 2) / (total_s - 18),
            "tps": round(64 * 8192 / 8 / mean_s),
        }
        clock = f"{total_s // 3600}:{total_s // 60 % 60:02}:{total_s % 60:02}"
        text += line.format(**numbers, clock=clock)
    (run,) = read_runs([write(tmp_path / "x.log", text)], given(nodes=1, gpus=8, batch_per_gpu=8))
    assert run.rate == pytest.approx(64 / 2.5 / 8, rel=1e-4)
    assert run.batch_per_gpu == 8
    assert (run.deepspeed_samples_per_s_per_gpu is not None) == program.startswith("DeepSpeed")


@pytest.mark.parametrize("quote", ["", "'"])
def test_a_hugging_face_summary_is_the_rate_of_the_last_whole_run(
    tmp_path: Path, quote: str
) -> None:
    text = (
        "  Instantaneous batch size per device = 8\n  Gradient Accumulation steps = 4\n"
        + "{{'loss': 1.7, 'epoch': 0.03}}\n"
    )
    for seconds, rate in ((100.0, 5.0), (1175.4751, 250.552)):
        text += f"{{'train_runtime': {quote}{seconds}{quote}, 'train_samples_per_second': {quote}{rate}{quote}, 'epoch': 1}}\n"
    (run,) = read_runs([write(tmp_path / "x.log", text)], given(nodes=1, gpus=2))
    assert (run.rate, run.batch_per_gpu, run.micro_batch) == (pytest.approx(125.276), 32, 8)
    assert "warm-up" in run.notes


def test_lightnings_epochs_add_up(tmp_path: Path) -> None:
    bar = "Epoch {}: 100%|██| {}/100 [{:02}:{:02}<00:00,  2.06it/s]\r"
    lines = [
        bar.format(epoch, step, 2 * step // 60, 2 * step % 60)
        for epoch in range(3)
        for step in (0, 25, 100)
    ]
    (run,) = read_runs(
        [write(tmp_path / "x.log", "".join(lines))], given(nodes=1, gpus=1, batch_per_gpu=6)
    )
    assert run.rate == pytest.approx(3)


def test_a_progress_bar_that_starts_again_within_its_epoch_is_a_new_start(tmp_path: Path) -> None:
    bar = "Epoch 0:  47%|██| {}/9999 [{}<00:00,  2.06it/s]\r"
    lines = [
        bar.format(step, f"{4 * step // 60:02}:{4 * step % 60:02}") for step in range(100, 501, 100)
    ]
    lines += [
        bar.format(500 + step, f"{2 * step // 60:02}:{2 * step % 60:02}")
        for step in range(0, 401, 10)
    ]
    (run,) = read_runs(
        [write(tmp_path / "x.log", "".join(lines))], given(nodes=1, gpus=1, batch_per_gpu=6)
    )
    assert run.rate == pytest.approx(3)


def test_a_batch_that_grows_counts_the_samples_of_each_line(tmp_path: Path) -> None:
    """Of Megatron-LM's lines, 100 steps of 64 samples and 100 of 128 take 1 s each."""
    line = PROGRESS["Megatron-LM"][0] + "\n"
    numbers = [
        (step, 64 * step + 64 * max(step - 100, 0), 128 if step > 100 else 64)
        for step in range(10, 201, 10)
    ]
    text = "".join(
        line.format(step=step, samples=samples, batch=batch, mean_ms=1000)
        for step, samples, batch in numbers
    )
    (run,) = read_runs([write(tmp_path / "x.log", text)], given(nodes=1, gpus=1))
    assert run.rate == pytest.approx((90 * 64 + 100 * 128) / 190, rel=0.02)


def test_a_log_with_the_lines_of_two_programs_gives_the_rate_with_the_wait_for_data(
    tmp_path: Path,
) -> None:
    line = PROGRESS["Megatron-DeepSpeed"][0] + "\n"
    text = ""
    for step in range(1, 101):
        text += throughput_line(step, 80.0) + line.format(
            step=step, samples=64 * step, batch=64, mean_ms=1000
        )
    (run,) = read_runs([write(tmp_path / "x.log", text)], given(nodes=1, gpus=1))
    assert (run.rate, run.deepspeed_samples_per_s_per_gpu) == (pytest.approx(64), pytest.approx(80))
    assert "timer" not in run.notes
    (run,) = read_runs([tmp_path / "x.log"], given(nodes=1, gpus=1, rate="deepspeed"))
    assert run.rate == pytest.approx(80)
    assert "timer" in run.notes


def test_what_a_torchtitan_log_lacks_is_named(tmp_path: Path) -> None:
    text = "".join(
        PROGRESS["torchtitan"][0].format(step=step, tps=10_050) + "\n" for step in range(1, 40)
    )
    (run,) = read_runs([write(tmp_path / "x.log", text)], given(nodes=1, gpus=1))
    assert run.rate is None
    assert "sequence length" in run.notes


def test_a_log_that_powershell_wrote_is_read(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    log.write_text(running_log([1.0] * 20), "utf-16")
    assert read_log(log).rate == 64


@pytest.mark.parametrize("every", [1, 20, 60, 75])
def test_a_restart_that_prints_at_another_interval_is_seen(tmp_path: Path, every: int) -> None:
    text = running_log([1.0] * 100, every=10) + running_log([2.0] * 300, every=every)
    assert read_log(write(tmp_path / "x.log", text)).rate == pytest.approx(32)


def test_after_a_restart_only_the_last_start_counts(tmp_path: Path) -> None:
    failed = "Traceback (most recent call last)\n"
    header = LAUNCHER.format(1, 1)
    text = header + failed + running_log([1.0] * 20) + failed + running_log([2.0] * 20)
    run = read_log(write(tmp_path / "r.log", text))
    assert run.rate == pytest.approx(32)
    assert (run.gpus, run.state) == (1, "unknown")
    # also where steps don't begin anew
    run = read_log(
        write(
            tmp_path / "r.log", running_log([1.0] * 12) + header + running_log([2.0] * 30, every=10)
        )
    )
    assert run.rate == pytest.approx(32)


def test_repeated_impossible_and_damaged_lines_are_left_out(tmp_path: Path) -> None:
    good = running_log([1.0] * 16).splitlines(keepends=True)
    bad = [throughput_line(17, value) for value in (0.0, float("-inf"), float("nan"), -5.0)]
    torn = (
        good[-1]
        .replace("CurrSamplesPerSec=64.0,", "CurrSamplesPer[Rank 1] hello Sec=64.0,")
        .replace("=16,", "=18,")
    )
    late = throughput_line(15, 60.0)
    text = "".join(
        [*(f"0: {line}1: {line}" for line in good), *bad, torn, late]
    )  # printed by two ranks
    run = read_log(write(tmp_path / "odd.log", text))
    assert run.rate == pytest.approx(64)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            b"\x7fELF\0\0\0\1" * 40,
            "no usable throughput lines.*DeepSpeed, open_clip.*Megatron.*torchtitan.*NeMo.*csv.*nodes, gpus",
        ),
        (None, "can't be read"),
    ],
)
def test_a_file_without_a_rate_is_refused_with_the_reason(
    tmp_path: Path, content: bytes | None, message: str
) -> None:
    log = tmp_path if content is None else write(tmp_path / "bad.log", content)
    with pytest.raises(UserError, match=rf"{log.name}: .*{message}"):
        read_log(log)


def test_a_log_shorter_than_the_warmup_gives_its_running_average_and_a_failed_one_its_state(
    tmp_path: Path,
) -> None:
    short = LAUNCHER.format(1, 4) + running_log([1.0, 1.0, 2.0, 4.0], batch=12)
    run = read_log(write(tmp_path / "short.log", short))
    assert run.rate == pytest.approx(12 / 3 / 4)
    assert "too short" in run.notes
    run = read_log(
        write(
            tmp_path / "oom.log", LAUNCHER.format(2, 8) + "OutOfMemoryError: CUDA out of memory\n"
        )
    )
    assert (run.state, run.rate, run.gpus) == ("out_of_memory", None, 8)


def test_a_line_without_end_is_cut_and_a_file_of_one_is_refused(tmp_path: Path) -> None:
    path = write(
        tmp_path / "run.log", b"\0" * 3 * LONGEST_LINE + b"\n" + running_log([0.1] * 30).encode()
    )
    assert read_log(path, given_batch=16).rate
    assert max(map(len, read_log_lines(path))) == LONGEST_LINE
    write(path, "")
    os.truncate(path, 200 * 10**9)
    with pytest.raises(UserError, match="a line has more than"):
        read_log(path)


@pytest.mark.parametrize(
    "line",
    [
        "gradient_accumulation_steps 0",
        "world_size ... 0",
        "ranks: 0, nodes: 0",
        "num_gpus_per_node: 0",
    ],
)
def test_a_count_of_zero_is_not_stated(tmp_path: Path, line: str) -> None:
    log = LAUNCHER.format(1, 4) + f"{line}\n" + running_log([0.1] * 30)
    assert read_log(write(tmp_path / "run.log", log), given_batch=16).accumulation == 1
