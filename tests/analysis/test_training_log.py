"""Reading logs: exact against DeepSpeed's own per-step numbers, one rate whatever the log's length and print interval, and
steady against what happens to real logs."""

import gzip
import random
import re
import tracemalloc
from pathlib import Path

import pytest

from clap_ds.analysis import training_log
from clap_ds.analysis.efficiency import scaling_table
from clap_ds.analysis.record import HOST_ALONE
from clap_ds.analysis.table import Run
from clap_ds.analysis.training_log import MAX_WINDOWS, read_log, scan_log
from clap_ds.config.errors import UserError
from tests.analysis.samples import DATA, LAUNCHER, running_log, throughput_line, write

TWO_RANKS = DATA / "deepspeed_2ranks.log"


def law(num_steps: int, noise: random.Random | None = None) -> list[float]:
    """Every tenth step takes four times as long: 0.13 s on average."""
    factors = (1 + (noise.gauss(0, 0.05) if noise else 0) for _ in range(num_steps))
    return [(0.4 if step % 10 == 9 else 0.1) * factor for step, factor in enumerate(factors)]


@pytest.mark.parametrize("noisy", [False, True])
def test_a_rate_is_the_same_whatever_the_logs_length_and_print_interval(tmp_path: Path, noisy: bool) -> None:
    """Three lengths and three intervals on 1 to 4 nodes, of one law: 64 samples in 0.13 s on each node of four GPUs."""
    runs: list[Run] = []
    for number, num_steps in enumerate((200, 500, 3000)):
        nodes = 2**number
        times = law(num_steps, random.Random(number) if noisy else None)
        for every in (1, 5, 20):
            text = LAUNCHER.format(nodes, 4 * nodes) + running_log(times, 64 * nodes, every)
            (run,) = read_log(write(tmp_path / f"{number}-{every}.log", text))
            low, high = run.interval or (0, 0)
            assert low * (1 - 1e-9) <= 16 / 0.13 <= high * (1 + 1e-9)
            assert high < 1.12 * low
            assert run.rate == pytest.approx(16 / 0.13, rel=0.01 if noisy else 1e-9)
            assert run.engine_samples_per_s_per_gpu == run.rate
            assert len(run.windows) <= MAX_WINDOWS
            runs.append(run)
    for every in range(3):
        for row in scaling_table(runs[every::3]):
            error = max(row.scaling_efficiency_2sigma_percent or 0, 1e-6)
            assert abs((row.scaling_efficiency_percent or 0) - 100) <= error


def test_each_step_agrees_with_deepspeeds_own_rate_of_it() -> None:
    """Printed every step, a window is one step, whose rate DeepSpeed prints, too, measured apart (with 1e-6 s more)."""
    current = [float(value) for value in re.findall(r"CurrSamplesPerSec=([\d.]+)", TWO_RANKS.read_text())]
    (run,) = read_log(TWO_RANKS)
    assert [2 * rate for rate in run.windows] == pytest.approx(current[-30:], rel=1e-3)
    assert run.rate == pytest.approx(30 / sum(2 / rate for rate in current[-30:]), rel=1e-3)
    assert (run.nodes, run.gpus, run.batch_per_gpu, run.kind) == (1, 2, 64, "log")
    assert (run.precision, run.state, run.notes) == ("fp32", "completed", "DeepSpeed's timer: leaves out data loading")
    (run,) = read_log(DATA / "deepspeed_1rank_accumulating.log")
    assert (run.accumulation, run.batch_per_gpu) == (2, 128)


def test_windows_of_sparse_lines_cover_the_steps_between_them(tmp_path: Path) -> None:
    times = [9.0, 9.0, 2.0, 1.0, 4.0, 1.0, 1.0, 3.0, 2.0, 2.0]
    (run,) = read_log(write(tmp_path / "run.log", running_log(times, batch=64, every=2)), 4)
    assert run.windows == pytest.approx([64 * 2 / 5, 64 * 2 / 4, 64 * 2 / 4])


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
        ("run directory: my runs/7", "directory", "my runs/7"),
        ("timers_config ................ enabled=True synchronized=False", "notes",
         f"DeepSpeed's timer: leaves out data loading; {HOST_ALONE}"),
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
    (run,) = read_log(write(tmp_path / "x.log", steps + lines if field == "state" else f"{lines}\n{steps}"))
    assert getattr(run, field) == value


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
        monkeypatch.setattr(training_log, "BLOCK_BYTES", size)
        assert scan_log(log).starts == [plain]


def test_gzip_and_utf16_are_told_by_content_and_a_truncated_gzip_keeps_what_it_has(tmp_path: Path) -> None:
    # Long enough that the cut loses lines, varied enough that it doesn't compress to nothing.
    packed = gzip.compress(running_log([1.0 + 0.001 * (step * 7919 % 101) for step in range(3000)]).encode())
    whole = scan_log(write(tmp_path / "whole.txt", packed))
    cut = scan_log(write(tmp_path / "cut.gz", packed[: len(packed) // 2]))
    assert (whole.starts[0].positions[-1], whole.is_damaged, cut.is_damaged) == (3000, False, True)
    assert 500 < cut.starts[0].positions[-1] < 3000
    utf16 = scan_log(write(tmp_path / "powershell.log", running_log([1.0] * 30).encode("utf-16")))
    assert utf16.starts[0].positions[-1] == 30


def test_restarts_have_their_own_warm_up_and_sizes_of_their_own_are_runs_of_their_own(tmp_path: Path) -> None:
    (run,) = read_log(write(tmp_path / "r.log", running_log([1.0] * 20) + running_log([2.0] * 20)))
    assert run.windows == pytest.approx([64.0] * 10 + [32.0] * 10)
    assert "2 starts in the log" in run.notes
    parts = [LAUNCHER.format(1, 4), LAUNCHER.format(2, 8), LAUNCHER.format(2, 8)]
    text = "".join(part + running_log([1.0] * 20, batch=16) + "Process 9 exits successfully.\n" for part in parts)
    # As `cat host*.log` puts them, another host's lines are no run: it has none of rank 0.
    other = LAUNCHER.format(2, 8).replace("node_rank=0", "node_rank=1") + "Traceback (most recent call last)\n"
    runs = read_log(write(tmp_path / "sweep.log", text + other))
    assert [(run.nodes, run.gpus, run.state) for run in runs] == [(1, 4, "completed"), (2, 8, "completed")]
    assert [(run.rate, len(run.windows)) for run in runs] == [(pytest.approx(4.0), 10), (pytest.approx(2.0), 20)]


def test_repeated_impossible_and_damaged_lines_are_counted_and_left_out(tmp_path: Path) -> None:
    good = running_log([1.0] * 16).splitlines(keepends=True)
    bad = [throughput_line(17, value) for value in (0.0, float("-inf"), float("nan"), -5.0)]
    torn = good[-1].replace("CurrSamplesPerSec=64.0,", "CurrSamplesPer[Rank 1] hello Sec=64.0,").replace("=16,", "=18,")
    late = throughput_line(15, 60.0)
    text = "".join([*(f"0: {line}1: {line}" for line in good), *bad, torn, late])  # as two ranks print
    packed = gzip.compress((text + running_log([1.0] * 20)).encode())
    (run,) = read_log(write(tmp_path / "odd.log", packed[:-4]))
    assert run.windows == pytest.approx([64.0] * 16)
    for note in ("2 starts", "20 throughput lines left out (repeated, damaged or impossible)", "gzip file is cut"):
        assert note in run.notes


def test_memory_stays_small_on_a_large_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_log, "BLOCK_BYTES", 1 << 16)
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
        (gzip.compress(b"", mtime=0)[:12], "empty file"),
        (b"\x7fELF\0\0\0\1" * 40, "no throughput lines"),
        (running_log([1.0] * 9, batch=0).encode(), "7 damaged or of an impossible rate"),
        (None, "can't be read"),
    ],
)
def test_a_file_without_a_rate_is_refused_with_the_reason(tmp_path: Path, content: bytes | None, message: str) -> None:
    log = tmp_path if content is None else write(tmp_path / "bad.log", content)
    with pytest.raises(UserError, match=rf"{log.name}: .*{message}"):
        read_log(log)


def test_a_log_shorter_than_the_warmup_gives_its_running_average_and_a_failed_one_its_state(tmp_path: Path) -> None:
    short = LAUNCHER.format(1, 4) + running_log([1.0, 1.0, 2.0, 4.0], batch=12)
    (run,) = read_log(write(tmp_path / "short.log", short))
    assert (run.rate, run.windows, run.interval) == (pytest.approx(12 / 3 / 4), (), None)
    assert "too short" in run.notes
    (run,) = read_log(write(tmp_path / "oom.log", LAUNCHER.format(2, 8) + "OutOfMemoryError: CUDA out of memory\n"))
    assert (run.state, run.rate, run.gpus) == ("out_of_memory", None, 8)
