"""Reading DeepSpeed logs: exact against DeepSpeed's own per-step numbers, and steady against what happens to real logs."""

import gzip
import re
import tracemalloc
from array import array
from pathlib import Path
from statistics import median

import pytest

from clap_ds.analysis import deepspeed_log
from clap_ds.analysis.deepspeed_log import MAX_WINDOWS, Attempt, read_log, scan_log
from clap_ds.config.errors import UserError
from tests.analysis.samples import DATA, running_log, throughput_line, write

TWO_RANKS = DATA / "deepspeed_2ranks.log"
LAUNCHER = "[x] [INFO] [launch.py:158:main] nnodes={}, num_local_procs=4, node_rank=0\n[x] dist_world_size={}\n"


def test_windows_of_single_steps_agree_with_deepspeeds_own_rate_of_each_step() -> None:
    # Printed every step, a window is one step, and DeepSpeed prints that step's rate too, measured separately
    # (with 1e-6 s added to each step's time).
    text = TWO_RANKS.read_text()
    current = [float(value) for value in re.findall(r"CurrSamplesPerSec=([\d.]+)", text)]
    (run,) = read_log(TWO_RANKS)
    assert [2 * rate for rate in run.windows] == pytest.approx(current[-30:], rel=1e-3)
    assert run.rate == median(run.windows)
    assert (run.nodes, run.gpus, run.batch_per_gpu, run.kind) == (1, 2, 64, "log")
    assert "data loading" in run.notes
    backward = re.findall(r"bwd_inner: (\S+)", text)[-31:]
    assert run.breakdown_s["backward"] == pytest.approx(sum(map(float, backward)) / 31_000)
    assert list(run.breakdown_s) == ["forward", "backward", "exposed_communication", "optimizer"]


def test_windows_of_sparse_lines_cover_the_steps_between_them(tmp_path: Path) -> None:
    times = [9.0, 9.0, 2.0, 1.0, 4.0, 1.0, 1.0, 3.0, 2.0, 2.0]
    log = write(tmp_path / "run.log", running_log(times, batch=64, every=2))
    assert scan_log(log, warmup_steps=4).attempts[0].rates() == pytest.approx([64 * 2 / 5, 64 * 2 / 4, 64 * 2 / 4])


def test_launcher_and_engine_lines_give_shape_and_state() -> None:
    attempt = scan_log(TWO_RANKS).attempts[0]
    shape = {"nodes": 1, "gpus": 2, "micro_batch": 64, "accumulation": 1, "global_batch": 128}
    assert (attempt.shape, attempt.precision, attempt.state) == (shape, "fp32", "completed")
    assert scan_log(DATA / "deepspeed_failed.log").attempts[0].state == "failed"
    (run,) = read_log(DATA / "deepspeed_1rank_accumulating.log")
    assert (run.accumulation, run.batch_per_gpu) == (2, 128)


@pytest.mark.parametrize(
    ("lines", "precision"),
    [
        ("bfloat16_config .... enabled=True", "bf16"),
        ("bfloat16_config .... enabled=False", "fp32"),
        ("torch_autocast_dtype ... torch.bfloat16\nbfloat16_config .... enabled=False", "torch_autocast_bfloat16"),
    ],
)
def test_precision_is_autocasts_before_the_weights(tmp_path: Path, lines: str, precision: str) -> None:
    assert scan_log(write(tmp_path / "p.log", f"{lines}\n")).attempts[0].precision == precision


@pytest.mark.parametrize("prefix", ["node1: ", "[1,0]<stdout>:", ""])
def test_prefixes_colours_carriage_returns_merged_lines_and_block_edges_change_nothing(
    tmp_path: Path, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = scan_log(TWO_RANKS).attempts
    text = "".join(prefix + line for line in TWO_RANKS.read_text().splitlines(keepends=True))
    if not prefix:
        text = text.replace("[INFO]", "\x1b[32m[INFO]\x1b[0m").replace(", Curr", "\x1b[1m, Curr")
        text = text.replace("GB\n", "GB").replace("\n", "\r\n")
    log = write(tmp_path / "p.log", text)
    for size in (8 << 20, 257, 4099):
        monkeypatch.setattr(deepspeed_log, "BLOCK_BYTES", size)
        assert scan_log(log).attempts == plain


def test_gzip_is_told_by_content_and_a_truncated_one_keeps_what_it_has(tmp_path: Path) -> None:
    # Long enough that the cut loses lines, varied enough that it doesn't compress to nothing.
    packed = gzip.compress(running_log([1.0 + 0.001 * (step * 7919 % 101) for step in range(3000)]).encode())
    whole = scan_log(write(tmp_path / "whole.txt", packed))
    cut = scan_log(write(tmp_path / "cut.gz", packed[: len(packed) // 2]))
    assert (whole.attempts[0].last_step, whole.truncated_gzip, cut.truncated_gzip) == (3000, False, True)
    assert 500 < cut.attempts[0].last_step < 3000


def test_a_restart_is_a_new_attempt_with_its_own_warmup(tmp_path: Path) -> None:
    scan = scan_log(write(tmp_path / "r.log", running_log([1.0] * 20) + running_log([2.0] * 20)))
    assert [len(attempt.rates()) for attempt in scan.attempts] == [10, 10]
    assert [attempt.rates()[0] for attempt in scan.attempts] == pytest.approx([64.0, 32.0])
    early = LAUNCHER.format(2, 8) + running_log([1.0] * 4) + LAUNCHER.format(1, 4) + running_log([1.0] * 4)
    attempts = scan_log(write(tmp_path / "r.log", early)).attempts
    assert [attempt.shape for attempt in attempts] == [{"nodes": 2, "gpus": 8}, {"nodes": 1, "gpus": 4}]


def test_repeated_impossible_and_damaged_lines_are_counted_and_left_out(tmp_path: Path) -> None:
    good = running_log([1.0] * 16).splitlines(keepends=True)
    bad = [throughput_line(17, value) for value in (0.0, float("-inf"), float("nan"), -5.0)]
    torn = good[-1].replace("CurrSamplesPerSec=64.0,", "CurrSamplesPer[Rank 1] hello Sec=64.0,").replace("=16,", "=18,")
    text = "".join([*(2 * line for line in good), *bad, torn])
    scan = scan_log(write(tmp_path / "b.log", text))
    assert (scan.unusable, scan.damaged, scan.repeated, len(scan.attempts)) == (4, 1, 14, 1)
    assert list(scan.attempts[0].steps) == [1] * 6
    assert scan.attempts[0].rates() == pytest.approx([64.0] * 6)
    packed = gzip.compress((text + running_log([1.0] * 20)).encode())
    (run,) = read_log(write(tmp_path / "odd.log", packed[:-4]))
    for note in ("2 starts", "4 throughput lines with an impossible", "1 damaged", "14 repeated", "gzip file is cut"):
        assert note in run.notes


@pytest.mark.parametrize(
    ("text", "state"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried\nTraceback (most recent call last):\n", "out_of_memory"),
        ("slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-01-01T00:00:00 DUE TO TIME LIMIT ***\n", "timeout"),
        ("slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-01-01T00:00:00 ***\n", "terminated"),
        ("Traceback (most recent call last):\n", "failed"),
        ("exits with return code = -9\n", "failed"),
        ("Process 12 exits successfully.\n", "completed"),
        ("", "unknown"),
    ],
)
def test_how_the_run_ended(tmp_path: Path, text: str, state: str) -> None:
    assert scan_log(write(tmp_path / "s.log", running_log([1.0] * 16) + text)).attempts[-1].state == state


def test_memory_stays_small_on_a_large_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deepspeed_log, "BLOCK_BYTES", 1 << 16)
    filler = ("x" * 200 + "\n") * 1000
    parts = [filler + throughput_line(100 + part, 64.0) for part in range(40)]
    log = write(tmp_path / "large.log", "".join(parts) + "#" * (4 << 20))  # and a progress bar without a line's end
    tracemalloc.start()
    scan = scan_log(log)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert scan.num_bytes > 12e6
    assert peak < 2e6
    assert scan.attempts[0].last_step == 139


def test_windows_are_few_alike_and_lose_only_the_last_steps() -> None:
    attempt = Attempt(steps=array("d", [10.0] * 10_000), times=array("d", range(1, 10_001)))
    rates = attempt.rates()
    assert (len(rates), rates[0]) == (10_000 // 128, 10 * 128 / sum(range(1, 129)))
    assert len(rates) < MAX_WINDOWS


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty"),
        (gzip.compress(b"", mtime=0)[:12], "empty file .truncated gzip"),
        (b"\x7fELF\0\0\0\1" * 40, "binary"),
        (b"hello\nworld\n", "no throughput lines"),
        (running_log([1.0] * 9, batch=0).encode(), "zero, negative or infinite"),
        (None, "can't be read"),
    ],
)
def test_a_file_without_throughput_is_refused_with_the_reason(
    tmp_path: Path, content: bytes | None, message: str
) -> None:
    log = tmp_path / "bad.log" if content is None else write(tmp_path / "bad.log", content)
    with pytest.raises(UserError, match=rf"bad\.log.*{message}"):
        read_log(log)


def test_a_log_shorter_than_the_warmup_gives_its_running_average_and_a_failed_one_its_state(tmp_path: Path) -> None:
    (run,) = read_log(write(tmp_path / "short.log", running_log([1.0, 1.0, 2.0, 4.0], batch=12)), gpus=2)
    assert (run.rate, run.windows, run.interval) == (pytest.approx(12 / 3 / 2), (), None)
    assert "too short" in run.notes
    (run,) = read_log(write(tmp_path / "oom.log", LAUNCHER.format(2, 8) + "OutOfMemoryError: CUDA out of memory\n"))
    assert (run.state, run.rate, run.gpus) == ("out_of_memory", None, 8)


def test_a_log_with_two_shapes_makes_two_runs_and_restarts_of_one_shape_make_one(tmp_path: Path) -> None:
    parts = [LAUNCHER.format(1, 4), LAUNCHER.format(2, 8), LAUNCHER.format(2, 8)]
    runs = read_log(write(tmp_path / "sweep.log", "".join(part + running_log([1.0] * 20, batch=16) for part in parts)))
    assert [(run.nodes, run.gpus, len(run.windows)) for run in runs] == [(1, 4, 10), (2, 8, 20)]
    assert [run.rate for run in runs] == pytest.approx([4.0, 2.0])
