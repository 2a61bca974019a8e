"""Reading logs: exact against DeepSpeed's own per-step numbers, one rate whatever the log's length and print interval, and
steady against what happens to real logs."""

import gzip
import random
import re
import tracemalloc
from pathlib import Path
from statistics import fmean, median
from typing import Any

import pytest

from clap_ds.analysis import log_scan
from clap_ds.analysis.dialects import DIALECTS, Dialect
from clap_ds.analysis.efficiency import scaling_table
from clap_ds.analysis.log_scan import MAX_WINDOWS, scan_log
from clap_ds.analysis.record import HOST_ALONE
from clap_ds.analysis.runs import read_runs
from clap_ds.analysis.table import Run
from clap_ds.analysis.training_log import read_log
from clap_ds.config.errors import UserError
from clap_ds.record.schema import Summary
from clap_ds.record.terminal import print_summary
from tests.analysis.samples import DATA, given, running_log, throughput_line, write

TWO_RANKS = DATA / "deepspeed_2ranks.log"
LAUNCHER = "[x] [INFO] [launch.py:158:main] nnodes={}, num_local_procs=4, node_rank=0\n[x] dist_world_size={}\n"


def law(num_steps: int, noise: random.Random | None = None) -> list[float]:
    """Every tenth step takes four times as long: 0.13 s on average."""
    factors = (1 + (noise.gauss(0, 0.05) if noise else 0) for _ in range(num_steps))
    return [(0.4 if step % 10 == 9 else 0.1) * factor for step, factor in enumerate(factors)]


@pytest.mark.parametrize("noisy", [False, True])
def test_a_rate_is_the_same_whatever_the_logs_length_and_print_interval(tmp_path: Path, noisy: bool) -> None:
    """Four lengths and four intervals on 1 to 8 nodes, of one law: 64 samples in 0.13 s on each node of four GPUs."""
    runs: list[Run] = []
    for number, num_steps in enumerate((200, 500, 2000, 8000)):
        nodes = 2**number
        times = law(num_steps, random.Random(number) if noisy else None)
        for every in (1, 5, 10, 20):
            text = LAUNCHER.format(nodes, 4 * nodes) + running_log(times, 64 * nodes, every)
            (run,) = read_log(write(tmp_path / f"{number}-{every}.log", text))
            low, high = run.interval or (0, 0)
            assert low * (1 - 1e-9) <= 16 / 0.13 <= high * (1 + 1e-9)
            assert run.rate == pytest.approx(16 / 0.13, rel=0.01 if noisy else 1e-9)
            assert run.engine_samples_per_s_per_gpu == run.rate
            assert high < 1.12 * low
            assert len(run.windows) == len(run.window_s) <= MAX_WINDOWS
            assert ("the median step amounts to" in run.notes) == (every == 1)
            runs.append(run)
        assert max(run.rate or 0 for run in runs[-4:]) < 1.003 * min(run.rate or 0 for run in runs[-4:])
    for every in range(4):
        for row in scaling_table(runs[every::4]):
            error = max(row.scaling_efficiency_2sigma_percent or 0, 1e-6)
            assert abs((row.scaling_efficiency_percent or 0) - 100) <= error


def test_the_median_step_is_beside_the_rate_and_in_seconds(tmp_path: Path) -> None:
    shape = "train_micro_batch_size_per_gpu .. 16\ngradient_accumulation_steps .. 1\n"
    (run,) = read_log(write(tmp_path / "law.log", LAUNCHER.format(1, 4) + shape + running_log(law(300))))
    assert (run.step_time_s, run.batch_per_gpu, run.memory_peak_gib) == (pytest.approx(0.1), 16, 1.5)
    assert "the median step amounts to 160 samples/s, +30.0 %: steps take unlike times" in run.notes
    assert sum(run.window_s) == pytest.approx(0.13 * 290)
    (run,) = read_log(write(tmp_path / "even.log", LAUNCHER.format(1, 4) + running_log([0.1] * 300)))
    assert (run.step_time_s, "median" in run.notes) == (None, False)  # seconds need a batch


def test_each_step_agrees_with_deepspeeds_own_rate_of_it() -> None:
    """Printed every step, a window is one step, whose rate DeepSpeed prints, too, measured apart (with 1e-6 s more)."""
    current = [float(value) for value in re.findall(r"CurrSamplesPerSec=([\d.]+)", TWO_RANKS.read_text())]
    (run,) = read_log(TWO_RANKS)
    assert [2 * rate for rate in run.windows] == pytest.approx(current[-30:], rel=1e-3)
    assert run.rate == pytest.approx(30 / sum(2 / rate for rate in current[-30:]), rel=1e-3)
    assert run.step_time_s == pytest.approx(64 / median(run.windows))
    assert (run.nodes, run.gpus, run.batch_per_gpu, run.kind) == (1, 2, 64, "log")
    assert (run.precision, run.state) == ("fp32", "completed")
    assert "data loading" in run.notes
    assert HOST_ALONE not in run.notes
    (run,) = read_log(DATA / "deepspeed_1rank_accumulating.log")
    assert (run.accumulation, run.batch_per_gpu) == (2, 128)


@pytest.mark.parametrize(("fwd", "bwd"), [("fwd", "bwd"), ("forward", "backward")])
def test_wall_clock_breakdown_is_the_mean_of_the_steps_after_the_warm_up_of_each_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fwd: str, bwd: str
) -> None:
    text = "time (ms) | {0}: {2:.2f} | {1}: 9.00 | {1}_inner: {3:.2f} | {1}_allreduce: {4:.2f} | step: {5:.2f}\n"
    lines = running_log([1.0] * 22).splitlines(keepends=True)
    slow, even, odd = (text.format(fwd, bwd, *parts) for parts in ((900,) * 4, (4, 3, 2, 1), (6, 9, 12, 15)))
    steps = [slow] * 10 + [even, odd] * 6
    start = LAUNCHER.format(1, 4) + "".join(part + line for part, line in zip(steps, ["", "", *lines], strict=True))
    expected = {"forward": 0.005, "backward": 0.006, "exposed_communication": 0.007, "optimizer": 0.008}
    for log in (write(tmp_path / "one.log", start), write(tmp_path / "restarted.log", 2 * start)):
        for size in (256, 1 << 20):
            monkeypatch.setattr(log_scan, "BLOCK_BYTES", size)
            (run,) = read_log(log)
            assert run.breakdown_s == pytest.approx(expected)
    (run,) = read_log(write(tmp_path / "none.log", start.replace("time (ms)", "")))
    assert run.breakdown_s == {}


def test_windows_of_sparse_lines_cover_the_steps_between_them(tmp_path: Path) -> None:
    times = [9.0, 9.0, 2.0, 1.0, 4.0, 1.0, 1.0, 3.0, 2.0, 2.0]
    (run,) = read_log(write(tmp_path / "run.log", running_log(times, batch=64, every=2)), 4)
    assert run.windows == pytest.approx([64 * 2 / 5, 64 * 2 / 4, 64 * 2 / 4])


ENGINE = "DeepSpeedEngine configuration:\n"


@pytest.mark.parametrize(
    ("lines", "field", "value"),
    [
        ("bfloat16_config .............. enabled=True", "precision", "bf16"),
        ("float16_config ............... enabled=True", "precision", "fp16"),
        ("bfloat16_config .............. enabled=False", "precision", "fp32"),
        ("torch_autocast_dtype ......... torch.bfloat16\nbfloat16_enabled ............. False", "precision",
         "torch_autocast_bfloat16"),
        ("world_size ................... 16", "gpus", 16),
        ("dp_world_size ................ 16", "gpus", 0),
        ("train_batch_size ............. 96", "batch_per_gpu", 96),
        ("SLURM_JOB_NUM_NODES=4", "nodes", 4),
        ("timers_config ................ enabled=True synchronized=False", "notes", HOST_ALONE),
        ("CUDA out of memory. Tried\nTraceback (most recent call last):", "state", "out_of_memory"),
        ("torch.OutOfMemoryError: x\nCANCELLED AT 2026-01-01T00:00:00 ***", "state", "out_of_memory"),
        ("*** JOB 7 ON n1 CANCELLED AT 2026-01-01T00:00:00 DUE TO TIME LIMIT ***", "state", "timeout"),
        ("*** JOB 7 ON n1 CANCELLED AT 2026-01-01T00:00:00 ***", "state", "terminated"),
        ("Main process received SIGTERM, exiting", "state", "terminated"),
        ("Traceback (most recent call last):", "state", "failed"),
        ("exits with return code = -9", "state", "failed"),
        ("Process 12 exits successfully.", "state", "completed"),
        ("", "state", "unknown"),
    ],
)  # fmt: skip
def test_what_other_lines_say(tmp_path: Path, lines: str, field: str, value: object) -> None:
    steps = running_log([1.0] * 20)
    ends = field == "state"
    (run,) = read_log(write(tmp_path / "x.log", steps + lines if ends else f"{ENGINE}{lines}\n{steps}"))
    found = getattr(run, field)
    assert str(value) in found if field == "notes" else found == value


@pytest.mark.parametrize("prefix", ["node1: ", "[1,0]<stdout>:", ""])
def test_prefixes_colours_carriage_returns_merged_lines_and_block_edges_change_nothing(
    tmp_path: Path, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (plain,) = scan_log(TWO_RANKS).starts
    text = "".join(prefix + line for line in TWO_RANKS.read_text().splitlines(keepends=True))
    if not prefix:
        text = text.replace("[INFO]", "\x1b[32m[INFO]\x1b[0m").replace(", Curr", "\x1b[1m, Curr")
        text = text.replace("GB\n", "GB").replace("\n", "\r\n")
    log = write(tmp_path / "p.log", text)
    for size in (8 << 20, 257, 4099):
        monkeypatch.setattr(log_scan, "BLOCK_BYTES", size)
        (found,) = scan_log(log).starts
        for name in ("positions", "values", "facts", "state", "max_memory_gib"):
            assert getattr(found, name) == getattr(plain, name)


def test_gzip_and_utf16_are_told_by_content_and_a_truncated_gzip_keeps_what_it_has(tmp_path: Path) -> None:
    # Long enough that the cut loses lines, varied enough that it doesn't compress to nothing.
    packed = gzip.compress(running_log([1.0 + 0.001 * (step * 7919 % 101) for step in range(3000)]).encode())
    whole = scan_log(write(tmp_path / "whole.txt", packed))
    cut = scan_log(write(tmp_path / "cut.gz", packed[: len(packed) // 2]))
    assert (whole.starts[0].positions[-1], whole.truncated_gzip, cut.truncated_gzip) == (3000, False, True)
    assert 500 < cut.starts[0].positions[-1] < 3000
    utf16 = scan_log(write(tmp_path / "powershell.log", running_log([1.0] * 30).encode("utf-16")))
    assert utf16.starts[0].positions[-1] == 30


def test_restarts_have_their_own_warm_up_and_sizes_of_their_own_are_runs_of_their_own(tmp_path: Path) -> None:
    (run,) = read_log(write(tmp_path / "r.log", running_log([1.0] * 20) + running_log([2.0] * 20)))
    assert run.windows == pytest.approx([64.0] * 10 + [32.0] * 10)
    assert "2 starts in the log" in run.notes
    parts = [LAUNCHER.format(1, 4), LAUNCHER.format(2, 8), LAUNCHER.format(2, 8)]
    runs = read_log(write(tmp_path / "sweep.log", "".join(part + running_log([1.0] * 20, batch=16) for part in parts)))
    assert [(run.nodes, run.gpus, len(run.windows)) for run in runs] == [(1, 4, 10), (2, 8, 20)]
    assert [run.rate for run in runs] == pytest.approx([4.0, 2.0])
    early = LAUNCHER.format(2, 8) + running_log([1.0] * 4) + LAUNCHER.format(1, 4) + running_log([1.0] * 4)
    assert [(run.nodes, run.gpus) for run in read_log(write(tmp_path / "early.log", early))] == [(2, 8), (1, 4)]
    # Another rank's lines without a label are no restart where the engine announces its starts.
    both = ENGINE + running_log([1.0] * 40) + running_log([2.0] * 40)
    (run,) = read_log(write(tmp_path / "b.log", 2 * both))
    assert (len(run.windows), set(run.windows)) == (60, {64.0})


def test_repeated_impossible_and_damaged_lines_are_counted_and_left_out(tmp_path: Path) -> None:
    good = running_log([1.0] * 16).splitlines(keepends=True)
    bad = [throughput_line(17, value) for value in (0.0, float("-inf"), float("nan"), -5.0)]
    torn = good[-1].replace("CurrSamplesPerSec=64.0,", "CurrSamplesPer[Rank 1] hello Sec=64.0,").replace("=16,", "=18,")
    text = "".join([*(2 * line for line in good), *bad, torn])
    packed = gzip.compress((text + running_log([1.0] * 20)).encode())
    (run,) = read_log(write(tmp_path / "odd.log", packed[:-4]))
    assert run.windows == pytest.approx([64.0] * 16)
    for note in ("2 starts", "19 throughput lines left out (repeated, damaged or impossible)", "gzip file is cut"):
        assert note in run.notes
    for average in ("6.4", "640.0"):  # a line with a wrong number costs itself alone
        lines = running_log([1.0] * 60).splitlines(keepends=True)
        lines[30] = lines[30].replace("RunningAvgSamplesPerSec=64.0", f"RunningAvgSamplesPerSec={average}")
        (run,) = read_log(write(tmp_path / "wrong.log", "".join(lines)))
        assert (run.rate, len(run.windows)) == (pytest.approx(64.0), 49)


def test_memory_stays_small_on_a_large_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_scan, "BLOCK_BYTES", 1 << 16)
    filler = ("x" * 200 + "\n") * 1000
    parts = [filler + throughput_line(100 + part, 64.0) for part in range(40)]
    log = write(tmp_path / "large.log", "".join(parts) + "#" * (4 << 20))  # and a progress bar without a line's end
    tracemalloc.start()
    scan = scan_log(log)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert scan.num_bytes > 12e6
    assert peak < 2e6
    assert scan.starts[0].positions[-1] == 139


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty"),
        (gzip.compress(b"", mtime=0)[:12], "empty file .truncated gzip"),
        (b"\x7fELF\0\0\0\1" * 40, "no throughput lines"),
        (b"hello\nworld\n", "no throughput lines"),
        ("┌──┬──┐\n│ retrieval, R@1 │ 12.5 % │\n└──┴──┘\n".encode(), "no table of the benchmark"),
        (running_log([1.0] * 9, batch=0).encode(), "zero, negative or infinite"),
        (None, "can't be read"),
    ],
)
def test_a_file_without_a_rate_is_refused_with_the_reason(tmp_path: Path, content: bytes | None, message: str) -> None:
    log = tmp_path / "bad.log" if content is None else write(tmp_path / "bad.log", content)
    with pytest.raises(UserError, match=rf"bad\.log.*{message}"):
        read_log(log)


def test_a_log_shorter_than_the_warmup_gives_its_running_average_and_a_failed_one_its_state(tmp_path: Path) -> None:
    (run,) = read_log(write(tmp_path / "short.log", running_log([1.0, 1.0, 2.0, 4.0], batch=12)))
    assert (run.rate, run.windows, run.interval) == (pytest.approx(12 / 3), (), None)
    assert "too short" in run.notes
    (run,) = read_log(write(tmp_path / "oom.log", LAUNCHER.format(2, 8) + "OutOfMemoryError: CUDA out of memory\n"))
    assert (run.state, run.rate, run.gpus) == ("out_of_memory", None, 8)


@pytest.mark.parametrize("ends", ["Process 12 exits successfully.\n", "Traceback (most recent call last)\n", ""])
def test_another_hosts_launcher_lines_after_the_measured_ones_are_no_run(tmp_path: Path, ends: str) -> None:
    """As `cat host*.log` puts them: of the second host there are no lines of rank 0."""
    first = LAUNCHER.format(2, 8) + running_log([1.0] * 20) + "Process 9 exits successfully.\n"
    second = LAUNCHER.format(2, 8).replace("node_rank=0", "node_rank=1") + ends
    (run,) = read_log(write(tmp_path / "both.log", first + second))
    assert (run.nodes, run.gpus, run.state, run.rate) == (2, 8, "completed", pytest.approx(8.0))
    larger = LAUNCHER.format(4, 16) + "Traceback (most recent call last)\n"
    failed = read_log(write(tmp_path / "larger.log", first + larger))[1]
    assert (failed.nodes, failed.gpus, failed.state, failed.rate) == (4, 16, "failed", None)


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


@pytest.mark.parametrize("label", ["{}: ", "{:3d}: ", "[{}]: ", "[default{}]:", "[1,{}]<stdout>:"])
def test_of_several_ranks_that_print_one_is_read(tmp_path: Path, label: str) -> None:
    ranks = [running_log([1.0 + 0.1 * rank] * 40).splitlines(keepends=True) for rank in range(3)]
    mixed = [label.format(rank) + line for lines in zip(*ranks, strict=True) for rank, line in enumerate(lines)]
    late = [label.format(2) + line for line in ranks[2]]
    (run,) = read_log(write(tmp_path / "slurm-1.out", "".join(mixed + late)))
    assert run.windows == pytest.approx([64.0] * 30)
    assert f"{3 * len(ranks[0])} throughput lines left out" in run.notes


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
