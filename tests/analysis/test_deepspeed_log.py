"""Reading DeepSpeed logs: exact against DeepSpeed's own per-step numbers, and steady against what happens to real logs."""

import gzip
import re
import tracemalloc
from pathlib import Path

import pytest

from clap_ds.analysis import deepspeed_log
from clap_ds.analysis.deepspeed_log import scan_log
from clap_ds.analysis.log_state import MAX_WINDOWS, WindowSeries
from clap_ds.analysis.runs import InputError
from tests.analysis.logs import running_log, throughput_line, write

DATA = Path(__file__).parent / "data"
TWO_RANKS = DATA / "deepspeed_2ranks.log"


def test_windows_of_single_steps_agree_with_deepspeeds_own_rate_of_each_step() -> None:
    # Printed every step, a window is one step, and DeepSpeed prints that step's rate too, measured separately
    # (with 1e-6 s added to each step's time).
    current = [float(value) for value in re.findall(r"CurrSamplesPerSec=([\d.]+)", TWO_RANKS.read_text())]
    scan = scan_log(TWO_RANKS, warmup_steps=10)
    rates = scan.attempts[0].windows.rates()
    assert len(rates) == 30
    assert rates == pytest.approx(current[-30:], rel=1e-3)


def test_windows_of_sparse_lines_cover_the_steps_between_them(tmp_path: Path) -> None:
    times = [9.0, 9.0, 2.0, 1.0, 4.0, 1.0, 1.0, 3.0, 2.0, 2.0]
    log = write(tmp_path / "run.log", running_log(times, batch=64, every=2))
    scan = scan_log(log, warmup_steps=4)
    assert scan.attempts[0].windows.rates() == pytest.approx([64 * 2 / 5, 64 * 2 / 4, 64 * 2 / 4])


def test_launcher_and_engine_lines_give_shape_and_state() -> None:
    attempt = scan_log(TWO_RANKS).attempts[0]
    assert (attempt.num_nodes, attempt.world_size) == (1, 2)
    assert (attempt.micro_batch, attempt.accumulation, attempt.global_batch) == (64, 1, 128)
    assert (attempt.precision, attempt.state) == ("fp32", "completed")
    assert scan_log(DATA / "deepspeed_failed.log").attempts[0].state == "failed"
    assert scan_log(DATA / "deepspeed_1rank_accumulating.log").attempts[0].accumulation == 2


def test_breakdown_is_the_mean_after_warmup() -> None:
    text = TWO_RANKS.read_text()
    printed = [
        [float(value) for value in match]
        for match in re.findall(
            r"\| fwd: (\S+) \| bwd: \S+ \| bwd_inner: (\S+) \| bwd_allreduce: (\S+) \| step: (\S+)", text
        )
    ]
    attempt = scan_log(TWO_RANKS, warmup_steps=10).attempts[0]
    expected = [sum(column) for column in zip(*printed[-attempt.breakdown_steps :], strict=True)]
    assert attempt.breakdown_steps == 31
    assert attempt.breakdown_ms == pytest.approx(expected)


@pytest.mark.parametrize("prefix", ["node1: ", "0: ", "[1,0]<stdout>:", "node-a-17:  "])
def test_prefixes_change_nothing(tmp_path: Path, prefix: str) -> None:
    prefixed = "".join(prefix + line for line in TWO_RANKS.read_text().splitlines(keepends=True))
    attempt, plain = scan_log(write(tmp_path / "p.log", prefixed)).attempts[0], scan_log(TWO_RANKS).attempts[0]
    assert attempt == plain


def test_colours_carriage_returns_and_lines_run_together_change_nothing(tmp_path: Path) -> None:
    lines = TWO_RANKS.read_text().splitlines(keepends=True)
    coloured = "".join(
        line.replace("[INFO]", "\x1b[32m[INFO]\x1b[0m").replace(", Curr", "\x1b[1m, Curr") for line in lines
    )
    merged = coloured.replace("GB\n", "GB").replace("\n", "\r\n")
    attempt, plain = scan_log(write(tmp_path / "c.log", merged)).attempts[0], scan_log(TWO_RANKS).attempts[0]
    assert attempt == plain


def test_gzip_is_told_by_content_and_a_truncated_one_keeps_what_it_has(tmp_path: Path) -> None:
    # Long enough that the cut loses lines, varied enough that it doesn't compress to nothing.
    packed = gzip.compress(running_log([1.0 + 0.001 * (step * 7919 % 101) for step in range(3000)]).encode())
    whole = scan_log(write(tmp_path / "whole.txt", packed))
    cut = scan_log(write(tmp_path / "cut.gz", packed[: len(packed) // 2]))
    assert (whole.attempts[0].last_step, whole.truncated_gzip) == (3000, False)
    assert cut.truncated_gzip
    assert 500 < cut.attempts[0].last_step < 3000


def test_blocks_cut_anywhere_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = scan_log(TWO_RANKS)
    for size in (257, 1000, 4099):
        monkeypatch.setattr(deepspeed_log, "BLOCK_BYTES", size)
        assert scan_log(TWO_RANKS).attempts == plain.attempts


def test_a_restart_is_a_new_attempt_with_its_own_warmup(tmp_path: Path) -> None:
    first, second = running_log([1.0] * 20), running_log([2.0] * 20)
    scan = scan_log(write(tmp_path / "r.log", first + second), warmup_steps=10)
    assert [len(attempt.windows.rates()) for attempt in scan.attempts] == [10, 10]
    assert [attempt.windows.rates()[0] for attempt in scan.attempts] == pytest.approx([64.0, 32.0])


def test_a_restart_soon_after_the_start_is_seen_by_the_launchers_lines(tmp_path: Path) -> None:
    launcher = "[x] [INFO] [launch.py:158:main] nnodes={}, num_local_procs=4, node_rank=0\n[x] dist_world_size={}\n"
    text = launcher.format(2, 8) + running_log([1.0] * 4) + launcher.format(1, 4) + running_log([1.0] * 4)
    scan = scan_log(write(tmp_path / "r.log", text))
    assert [(attempt.num_nodes, attempt.world_size) for attempt in scan.attempts] == [(2, 8), (1, 4)]


def test_the_same_steps_from_another_rank_are_counted_once(tmp_path: Path) -> None:
    twice = "".join(line * 2 for line in running_log([1.0] * 20).splitlines(keepends=True))
    scan = scan_log(write(tmp_path / "t.log", twice), warmup_steps=10)
    assert (len(scan.attempts), scan.repeated) == (1, 18)
    assert scan.attempts[0].windows.steps == [1] * 10


def test_impossible_rates_and_damaged_lines_are_counted_and_left_out(tmp_path: Path) -> None:
    good = running_log([1.0] * 16).splitlines(keepends=True)
    bad = [throughput_line(17, value) for value in (0.0, float("-inf"), float("nan"), -5.0)]
    torn = good[-1].replace("CurrSamplesPerSec=64.0,", "CurrSamplesPer[Rank 1] hello Sec=64.0,").replace("=16,", "=18,")
    scan = scan_log(write(tmp_path / "b.log", "".join([*good, *bad, torn])), warmup_steps=10)
    assert (scan.unusable, scan.damaged) == (4, 1)
    assert scan.attempts[0].windows.rates() == pytest.approx([64.0] * 6)


def test_a_number_cut_by_the_files_end_is_not_read(tmp_path: Path) -> None:
    text = running_log([1.0] * 16)
    scan = scan_log(write(tmp_path / "cut.log", text[: text.rindex("CurrSamplesPerSec=") + len("CurrSamplesPerSec=6")]))
    assert scan.attempts[0].last_step in (15, 16)
    assert scan.attempts[0].windows.rates() == pytest.approx([64.0] * len(scan.attempts[0].windows.rates()))


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
    scan = scan_log(write(tmp_path / "s.log", running_log([1.0] * 16) + text))
    assert scan.attempts[-1].state == state


def test_memory_stays_small_on_a_large_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deepspeed_log, "BLOCK_BYTES", 1 << 16)
    log = tmp_path / "large.log"
    filler = "x" * 200 + "\n"
    with log.open("w") as output:
        for part in range(40):
            output.write(filler * 1000 + throughput_line(100 + part, 64.0))
        output.write("#" * (4 << 20))  # and a progress bar that never ends its line
    tracemalloc.start()
    scan = scan_log(log)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert scan.num_bytes > 12e6
    assert peak < 2e6
    assert scan.attempts[0].last_step == 139


def test_window_series_is_bounded_and_loses_no_time() -> None:
    series = WindowSeries()
    for index in range(10_000):
        series.add(10, 0.5 + index / 10_000)
    assert len(series.steps) < MAX_WINDOWS
    assert len(set(series.steps)) == 1
    assert sum(series.steps) + series.open_steps == 100_000
    assert sum(series.times) + series.open_time == pytest.approx(sum(0.5 + index / 10_000 for index in range(10_000)))


def test_an_unreadable_path_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="gone"):
        scan_log(tmp_path / "gone.log")
