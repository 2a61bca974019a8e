"""Rates read from logs equal DeepSpeed's per-step numbers, don't depend on length and print interval, and withstand damage."""

import re
from pathlib import Path
from statistics import fmean

import pytest

from clap_ds.analysis.log_formats import DIALECTS, Dialect
from clap_ds.analysis.runs import read_runs
from clap_ds.analysis.training_log import read_log
from clap_ds.config.errors import UserError
from tests.analysis.samples import DATA, LAUNCHER, given, running_log, throughput_line, write

TWO_RANKS = DATA / "deepspeed_2ranks.log"


def test_a_rate_is_the_same_whatever_the_logs_length_and_print_interval(tmp_path: Path) -> None:
    """Every tenth step takes four times as long; the mean is 0.13 s. 64 samples per node of four GPUs."""
    for nodes, num_steps in ((1, 200), (2, 500), (4, 3000)):
        times = [0.4 if n % 10 == 9 else 0.1 for n in range(num_steps)]
        for every in (1, 5, 20):
            text = LAUNCHER.format(nodes, 4 * nodes) + running_log(times, 64 * nodes, every)
            run = read_log(write(tmp_path / f"{nodes}-{every}.log", text))
            assert run.deepspeed_samples_per_s_per_gpu == run.rate == pytest.approx(16 / 0.13)


def test_a_rate_agrees_with_deepspeeds_own_rates_of_steps() -> None:
    current = [float(value) for value in re.findall(r"CurrSamplesPerSec=([\d.]+)", TWO_RANKS.read_text())]
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
    run = read_log(write(tmp_path / "x.log", steps + lines if field == "state" else f"{lines}\n{steps}"))
    assert getattr(run, field) == value


@pytest.mark.parametrize("form", ["open_clip", "LAION-CLAP"])
def test_open_clips_and_laion_claps_training_logs_are_read(tmp_path: Path, form: str) -> None:
    """Two epochs of 1,000 steps of 8 × 616 samples, with lines after steps 1, 101, 201 …; every tenth step takes 1 s longer."""
    parameters = "".join(
        f"2026-11-20,12:00:00 | INFO |   {line}\n"
        for line in ("batch_size: 616", "world_size: 8", "accum_freq: 1", "model: CLAP-HTSAT-tiny-Roberta-base")
    )
    batch, since, text = 8 * 616, [], parameters
    for step in range(2000):
        since.append(2.0 if step % 10 == 9 else 1.0)
        done = step % 1000 + 1
        if step % 1000 % 100 == 0 or done == 1000:
            loss, rate = ("Loss: 5.1 (5.1) ", "") if form == "LAION-CLAP" else ("", f", {batch:#g}/s, {616:#g}/s/gpu")
            text += (
                f"x | INFO | Train Epoch: {step // 1000} [{done * batch:>6}/{1000 * batch} ({done / 10:.0f}%)] {loss}"
            )
            text += f"Data (t): 0.01 Batch (t): {fmean(since):.3f}{rate} LR: 3e-4 Logit Scale: 14.286\n"
            since = []
    (run,) = read_runs([write(tmp_path / "train.log", text)], given(gpus=8, nodes=2))
    assert (run.nodes, run.gpus, run.batch_per_gpu) == (2, 8, 616)
    assert run.model == "clap_htsat_tiny_roberta_base"
    assert (run.rate, run.deepspeed_samples_per_s_per_gpu) == (pytest.approx(616 / 1.1, rel=1e-3), None)
    (run,) = read_runs([write(tmp_path / "cut.log", text[len(parameters) :])], given(gpus=8, nodes=2))
    assert (run.rate, run.notes) == (None, "no rate, because the log doesn't state its batch")


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
    lines = ("[fast] it {} | gpus 8 | {} samples/s\n".format(*each) for each in ((20, 50), (30, 100), (60, 300)))
    (run,) = read_runs([write(tmp_path / "f.log", "".join(lines))], given(nodes=1))
    assert (run.rate, run.gpus) == (pytest.approx(200 / 8), 8)


def test_after_a_restart_only_the_last_start_counts(tmp_path: Path) -> None:
    failed, header = "Traceback (most recent call last)\n", LAUNCHER.format(1, 1)
    text = header + failed + running_log([1.0] * 20) + failed + running_log([2.0] * 20)
    run = read_log(write(tmp_path / "r.log", text))
    assert run.rate == pytest.approx(32)
    assert (run.gpus, run.state) == (1, "unknown")
    # also where steps don't begin anew
    run = read_log(write(tmp_path / "r.log", running_log([1.0] * 12) + header + running_log([2.0] * 30, every=10)))
    assert run.rate == pytest.approx(32)


def test_repeated_impossible_and_damaged_lines_are_left_out(tmp_path: Path) -> None:
    good = running_log([1.0] * 16).splitlines(keepends=True)
    bad = [throughput_line(17, value) for value in (0.0, float("-inf"), float("nan"), -5.0)]
    torn = good[-1].replace("CurrSamplesPerSec=64.0,", "CurrSamplesPer[Rank 1] hello Sec=64.0,").replace("=16,", "=18,")
    late = throughput_line(15, 60.0)
    text = "".join([*(f"0: {line}1: {line}" for line in good), *bad, torn, late])  # printed by two ranks
    run = read_log(write(tmp_path / "odd.log", text))
    assert run.rate == pytest.approx(64)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\x7fELF\0\0\0\1" * 40, "no usable throughput lines.*DeepSpeed, open_clip.*csv"),
        (None, "can't be read"),
    ],
)
def test_a_file_without_a_rate_is_refused_with_the_reason(tmp_path: Path, content: bytes | None, message: str) -> None:
    log = tmp_path if content is None else write(tmp_path / "bad.log", content)
    with pytest.raises(UserError, match=rf"{log.name}: .*{message}"):
        read_log(log)


def test_a_log_shorter_than_the_warmup_gives_its_running_average_and_a_failed_one_its_state(tmp_path: Path) -> None:
    short = LAUNCHER.format(1, 4) + running_log([1.0, 1.0, 2.0, 4.0], batch=12)
    run = read_log(write(tmp_path / "short.log", short))
    assert run.rate == pytest.approx(12 / 3 / 4)
    assert "too short" in run.notes
    run = read_log(write(tmp_path / "oom.log", LAUNCHER.format(2, 8) + "OutOfMemoryError: CUDA out of memory\n"))
    assert (run.state, run.rate, run.gpus) == ("out_of_memory", None, 8)
