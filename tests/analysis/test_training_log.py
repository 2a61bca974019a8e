"""Reading logs: exact against DeepSpeed's own per-step numbers, one rate whatever the log's length and print interval, and
steady against what happens to real logs."""

import gzip
import random
import re
import tracemalloc
from pathlib import Path
from statistics import median

import pytest

from clap_ds.analysis import log_scan
from clap_ds.analysis.efficiency import scaling_table
from clap_ds.analysis.log_scan import MAX_WINDOWS, scan_log
from clap_ds.analysis.record import HOST_ALONE
from clap_ds.analysis.table import Run
from clap_ds.analysis.training_log import read_log
from clap_ds.config.errors import UserError
from tests.analysis.samples import DATA, LAUNCHER, running_log, throughput_line, write

TWO_RANKS = DATA / "deepspeed_2ranks.log"


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
    (run,) = read_log(
        write(tmp_path / "short.log", LAUNCHER.format(1, 4) + running_log([1.0, 1.0, 2.0, 4.0], batch=12))
    )
    assert (run.rate, run.windows, run.interval) == (pytest.approx(12 / 3 / 4), (), None)
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


@pytest.mark.parametrize("label", ["{}: ", "{:3d}: ", "[{}]: ", "[default{}]:", "[1,{}]<stdout>:"])
def test_of_several_ranks_that_print_one_is_read(tmp_path: Path, label: str) -> None:
    ranks = [running_log([1.0 + 0.1 * rank] * 40).splitlines(keepends=True) for rank in range(3)]
    mixed = [label.format(rank) + line for lines in zip(*ranks, strict=True) for rank, line in enumerate(lines)]
    late = [label.format(2) + line for line in ranks[2]]
    (run,) = read_log(write(tmp_path / "slurm-1.out", "".join(mixed + late)))
    assert run.windows == pytest.approx([64.0] * 30)
    assert f"{3 * len(ranks[0])} throughput lines left out" in run.notes
