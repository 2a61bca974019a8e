"""Reading DeepSpeed logs: exact against DeepSpeed's own per-step numbers, and steady against what happens to real logs."""

import gzip
import re
import tracemalloc
from pathlib import Path
from statistics import median

import pytest

from clap_ds.analysis import log_files
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
        ("bfloat16_config .............. enabled=True", "bf16"),
        ("bfloat16_config .............. enabled=False", "fp32"),
        (
            "torch_autocast_dtype ......... torch.bfloat16\nbfloat16_config .............. enabled=False",
            "torch_autocast_bfloat16",
        ),
    ],
)
def test_precision_is_autocasts_before_the_weights(tmp_path: Path, lines: str, precision: str) -> None:
    assert scan_log(write(tmp_path / "p.log", f"{lines}\n")).attempts[0].precision == precision


@pytest.mark.parametrize("prefix", ["node1: ", "[1,0]<stdout>:", ""])
def test_prefixes_colours_carriage_returns_merged_lines_and_block_edges_change_nothing(
    tmp_path: Path, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (plain,) = scan_log(TWO_RANKS).attempts
    text = "".join(prefix + line for line in TWO_RANKS.read_text().splitlines(keepends=True))
    if not prefix:
        text = text.replace("[INFO]", "\x1b[32m[INFO]\x1b[0m").replace(", Curr", "\x1b[1m, Curr")
        text = text.replace("GB\n", "GB").replace("\n", "\r\n")
    log = write(tmp_path / "p.log", text)
    for size in (8 << 20, 257, 4099):
        monkeypatch.setattr(log_files, "BLOCK_BYTES", size)
        (found,) = scan_log(log).attempts
        assert found.rates() == pytest.approx(plain.rates())
        assert found.breakdown_ms == pytest.approx(plain.breakdown_ms)
        for name in ("shape", "precision", "state", "last_step", "last_average", "breakdown_steps", "max_memory_gib"):
            assert getattr(found, name) == getattr(plain, name)


@pytest.mark.parametrize("ranks", [1, 3])
def test_lines_read_many_at_once_give_what_they_give_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    times = [1.0 + 0.001 * (step * 7919 % 101) for step in range(2000)]
    text = running_log(times) + running_log(times[:1000]) + throughput_line(2000, -1.0)
    log = write(
        tmp_path / "long.log", "".join(f"{rank}: {line}\n" for line in text.splitlines() for rank in range(ranks))
    )
    monkeypatch.setattr(log_files, "BLOCK_BYTES", 1 << 16)
    scans = [scan_log(log)]
    monkeypatch.setattr(Attempt, "add_throughput", lambda *_: None)
    scans.append(scan_log(log))
    together, alone = ([attempt.rates() for attempt in scan.attempts] for scan in scans)
    assert [len(rates) for rates in together] == [124, 123]
    assert together == [pytest.approx(rates) for rates in alone]
    assert [scan.attempts[1].last_step for scan in scans] == [1000, 1000]
    assert scans[0].repeated == scans[1].repeated == (ranks - 1) * 2996


def test_gzip_is_told_by_content_and_a_truncated_one_keeps_what_it_has(tmp_path: Path) -> None:
    # Long enough that the cut loses lines, varied enough that it doesn't compress to nothing.
    packed = gzip.compress(running_log([1.0 + 0.001 * (step * 7919 % 101) for step in range(3000)]).encode())
    whole = scan_log(write(tmp_path / "whole.txt", packed))
    cut = scan_log(write(tmp_path / "cut.gz", packed[: len(packed) // 2]))
    assert (whole.attempts[0].last_step, whole.file.truncated_gzip, cut.file.truncated_gzip) == (3000, False, True)
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
    assert [steps for steps, _ in scan.attempts[0].windows] == [1] * 6
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
    monkeypatch.setattr(log_files, "BLOCK_BYTES", 1 << 16)
    filler = ("x" * 200 + "\n") * 1000
    parts = [filler + throughput_line(100 + part, 64.0) for part in range(40)]
    log = write(tmp_path / "large.log", "".join(parts) + "#" * (4 << 20))  # and a progress bar without a line's end
    tracemalloc.start()
    scan = scan_log(log)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert scan.file.num_bytes > 12e6
    assert peak < 2e6
    assert scan.attempts[0].last_step == 139


def test_windows_are_few_alike_and_lose_only_the_last_steps() -> None:
    attempt = Attempt()
    for time in range(1, 10_001):
        attempt.add(10, float(time))
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


OLD_FORMS = {
    "0.3": "[2021-03-22 12:00:00,123] [INFO] [timer.py:154:stop] 0/{step}, SamplesPerSec={average}\n",
    "0.6": "[2022-03-22 12:00:00,123] [INFO] [timer.py:181:stop] 0/{step}, SamplesPerSec={average}, MemAllocated=0.35GB, "
    "MaxMemAllocated=1.5GB\n",
    "0.7": "[2023-01-22 12:00:00,123] [INFO] [timer.py:197:stop] 0/{step}, RunningAvgSamplesPerSec={average}, "
    "CurrSamplesPerSec=7.0, MemAllocated=0.35GB, MaxMemAllocated=1.5GB\n",
}
OLD_BREAKDOWN = (
    "[2022-03-22 12:00:00,124] [INFO] [logging.py:69:log_dist] [Rank 0] rank=0 time (ms) | forward: 100.00 | "
    "backward: 250.00 | backward_inner: 200.00 | backward_allreduce: 50.00 | step: 10.00\n"
)


@pytest.mark.parametrize("form", OLD_FORMS)
def test_lines_of_older_deepspeeds_count_micro_steps(tmp_path: Path, form: str) -> None:
    times = [9.0, 9.0, *(1.0 + 0.1 * (step % 3) for step in range(60))]
    lines = running_log(times, batch=64, every=2)
    averages = re.findall(r"global_step=(\d+), RunningAvgSamplesPerSec=([\d.]+)", lines)
    text = "".join(OLD_FORMS[form].format(step=step, average=average) + OLD_BREAKDOWN for step, average in averages)
    shape = "world_size ................... 8\ngradient_accumulation_steps .. 2\nfp16_enabled ................. True\n"
    (run,) = read_log(write(tmp_path / "old.log", shape + text))
    expected = scan_log(write(tmp_path / "new.log", lines), warmup_steps=20).attempts[0].rates()
    assert [8 * rate for rate in run.windows] == pytest.approx(expected)
    assert (run.gpus, run.precision, run.memory_peak_gib) == (8, "fp16", None if form == "0.3" else 1.5)
    assert run.breakdown_s == {"forward": 0.1, "backward": 0.2, "exposed_communication": 0.05, "optimizer": 0.01}


def test_the_pipeline_engines_rate_is_of_the_steps_since_its_last_line(tmp_path: Path) -> None:
    rates = [10.0, 50.0, 100.0, 200.0, 25.0]
    line = "steps: {} loss: 0.1234 lm loss: 0.1 iter time (s): 0.512 samples/sec: {:.3f}\n"
    log = write(tmp_path / "pipe.log", "".join(line.format(10 * at, rate) for at, rate in enumerate(rates, start=1)))
    assert scan_log(log).attempts[0].rates() == pytest.approx(rates[1:])


@pytest.mark.parametrize(
    ("memory", "found"),
    [("MaxMemAllocated=0..5GB", None), ("MaxMemAllocated=GB", None), ("MaxMemAllocated=2.5GB", 2.5)],
)
def test_damaged_memory_costs_nothing_else(tmp_path: Path, memory: str, found: float | None) -> None:
    text = running_log([1.0] * 30).replace("MaxMemAllocated=1.5GB", memory) + "time (ms) | fwd: 1..00 | bwd: 2.00\n"
    (run,) = read_log(write(tmp_path / "m.log", text))
    assert (run.rate, run.memory_peak_gib, run.breakdown_s) == (pytest.approx(64.0), found, {})


@pytest.mark.parametrize("label", ["{}: ", "{:3d}: ", "[{}]: ", "[default{}]:", "[1,{}]<stdout>:"])
def test_of_several_ranks_that_print_one_is_read(tmp_path: Path, label: str) -> None:
    ranks = [running_log([1.0 + 0.1 * rank] * 40).splitlines(keepends=True) for rank in range(3)]
    mixed = [label.format(rank) + line for lines in zip(*ranks, strict=True) for rank, line in enumerate(lines)]
    late = [label.format(2) + line for line in ranks[2]]
    scan = scan_log(write(tmp_path / "slurm-1.out", "".join(mixed + late)))
    assert [attempt.rates() for attempt in scan.attempts] == [pytest.approx([64.0] * 30)]
    assert scan.repeated == 3 * len(ranks[0])


def test_another_ranks_lines_without_a_label_are_no_restart_where_the_engine_announces_its_starts(
    tmp_path: Path,
) -> None:
    start = "[2026-11-20 17:47:15,917] [INFO] [config.py:674:print] DeepSpeedEngine configuration:\n"
    both = start + running_log([1.0] * 40) + running_log([2.0] * 40)
    assert [len(attempt.rates()) for attempt in scan_log(write(tmp_path / "a.log", both)).attempts] == [30]
    assert [len(attempt.rates()) for attempt in scan_log(write(tmp_path / "b.log", 2 * both)).attempts] == [30, 30]
