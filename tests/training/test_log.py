"""Training's log of steps with known times, on two ranks with simulated clocks.

Messages at the start and at the end of training.
"""

import io
import json
import math
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from clap_ds.checkpoint.train_state import SavedCheckpoint, TrainState
from clap_ds.config.settings import load_run
from clap_ds.data.batch import LoaderThroughput
from clap_ds.data.dataloader import BatchSource
from clap_ds.metrics.throughput import MOST_WINDOWS, Throughput, Window
from clap_ds.metrics.timers import StepTimer
from clap_ds.run_records import environment
from clap_ds.run_records.run_dir import RunDirectory
from clap_ds.train import next_commands
from clap_ds.training.log import TrainLogger, log_run_start
from clap_ds.training.plan import TrainPlan
from tests.rank_pool import RankPool

GIB = 2**30


def test_the_windows_of_a_long_run_are_merged() -> None:
    pace = Throughput(2)
    step_s = np.full((7, 1), 4.0)
    assert pace.summary() == {}
    for _ in range(2050):
        pace.add(Window(step_s.sum(axis=0), step_s, step_s, step_s / 16, step_s, {}), 16)
    rate = pace.summary()["samples_per_s_per_gpu"]
    assert (rate["mean"], sum(rate["window_s"])) == (2, 2050 * 28)
    assert MOST_WINDOWS // 2 < len(rate["windows"]) <= MOST_WINDOWS


def _logged(folder: str) -> dict[str, Any]:
    """Log six steps of 20 samples on two ranks, every two steps; the first two are warm-up."""
    rank = dist.get_rank()
    now = [100.0]
    deepspeed: Any = SimpleNamespace(skipped_steps=1, get_lr=lambda: [0.25, 9.0])
    scale = torch.tensor([math.log(4.0 + rank)])
    cpu = torch.device("cpu")
    engine: Any = SimpleNamespace(
        deepspeed=deepspeed, model=SimpleNamespace(logit_scale=scale), device=cpu
    )
    engine.count_skipped = engine.check_loss = lambda: None
    engine.timer = StepTimer(cpu)
    plan = TrainPlan(120, 20, 160)
    engine.stop_timers = engine.timer.stop
    ranks: Any = SimpleNamespace(
        is_main_process=rank == 0, world_size=2, local_world_size=2, host=f"node{rank}"
    )
    scalars: list[Any] = []
    record = RunDirectory(Path(folder))
    pieces: Any = SimpleNamespace(
        throughput=lambda: LoaderThroughput(1000.0, 4, "encoded"), state=dict
    )
    loader = BatchSource(pieces, cpu, copy_ahead=False)
    writer = SimpleNamespace(write=scalars.extend)
    state = TrainState(train_s=1000.0)
    with (
        redirect_stdout(io.StringIO()) as shown,
        redirect_stderr(io.StringIO()) as errors,
        mock.patch("clap_ds.metrics.timers.time.perf_counter", side_effect=lambda: now[0]),
        mock.patch.object(environment, "peak_memory_bytes", return_value=(1 + rank) * GIB),
        mock.patch.object(
            environment, "energy_joules", side_effect=lambda _: (100 + 50 * rank) * now[0]
        ),
        mock.patch(
            "clap_ds.metrics.throughput.energy_joules",
            side_effect=lambda _: (100 + 50 * rank) * now[0],
        ),
    ):
        log = TrainLogger(record, engine, loader, writer, plan, state, ranks, Path(folder))  # type: ignore[arg-type]
        for step in range(1, 7):
            log.begin_step()
            with engine.timer("data_wait"):
                now[0] += 0.1 * (1 + rank)
            now[0] += step * (1 + 0.5 * rank) - 0.1 * (1 + rank)
            engine.gradient_norm = torch.tensor(2.0 * step)
            engine.is_skipped = torch.tensor(step == 2)
            plan.advance(state)
            log.end_step(torch.tensor(step + 10.0 * rank))
            if step % 2 == 0:
                log.write()
                log.evaluated({"top1": 0.5}, {}, 50.0)
                now[0] += 50  # an evaluation
        log.saved(SavedCheckpoint(6, 100.0, 107.5, Path("step-6"), 15_000_000_000, stalled_s=1.25))
        for step in (7, 8, 9, 10):
            log.saved(SavedCheckpoint(step, 100.0 + 3600 * (step - 6), 109.0, problem="disk full"))
        log.close()
    return {
        "summary": record.summary(),
        "scalars": scalars,
        "shown": shown.getvalue(),
        "errors": errors.getvalue(),
    }


def test_every_figure_of_a_run_on_two_ranks(two_ranks: RankPool, tmp_path: Path) -> None:
    found = two_ranks.run(_logged, str(tmp_path))[0]
    summary = found["summary"]
    assert summary["samples_per_s_per_gpu"]["windows"] == pytest.approx([20 / 10.5, 20 / 16.5])
    assert summary["samples_per_s"] == pytest.approx(80 / 27)
    assert summary["step_time_s"] == pytest.approx(
        {"median": 4.5, "p95": 5.85, "slowest_rank_median": 6.75}
    )
    assert summary["data_wait_percent"] == pytest.approx(100 * 0.8 / 27)
    assert (summary["memory_peak_bytes"], summary["skipped_steps"]) == (2 * GIB, 1)
    joules = [
        100 * (3 + 7 * n + 50 * n + 4 * (n == 2)) + 150 * (4.5 + 10.5 * n + 50 * n + 6 * (n == 2))
        for n in range(3)
    ]
    assert summary["energy_kwh"] == pytest.approx(joules[2] / 3.6e6)
    assert summary["joules_per_sample"] == pytest.approx(joules[2] / 120)
    assert (summary["step"], summary["samples"], summary["epoch"], summary["loss"]) == (
        6,
        120,
        0.75,
        11,
    )
    assert (
        "saved step-6: 15,000.0 MB in 7.5 s (2.00 GB/s), blocking training for 1.25 s"
        in found["shown"]
    )
    assert "their rank's step needs 11: enough" in found["shown"]  # 10 in 0.9 s
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    history = [json.loads(line) for line in (tmp_path / "history.jsonl").read_text().splitlines()]
    assert [line.pop("train_s") > 1000 for line in history] == [True] * len(lines)
    assert sum("train_s" in line and line.pop("train_s") > 1000 for line in lines) == 3
    assert history == lines
    evaluations = [line for line in lines if line["phase"] == "evaluation"]
    assert [line["joules_per_sample"] for line in evaluations] == pytest.approx(
        [joules[n] / (40 * n + 40) for n in range(3)]
    )
    lines = [line for line in lines if line["phase"] != "evaluation"]
    assert "the checkpoint of step 7 could not be saved: disk full" in summary["warnings"]
    assert [lines.pop()["saved"] for _ in range(4)] == [False] * 4
    for failed, unsaved in (("3 checkpoints", "3.0 hours"), ("4 checkpoints", "4.0 hours")):
        (line,) = [
            line
            for line in found["errors"].splitlines()
            if line.startswith(f"error: {failed} in a row")
        ]
        assert unsaved in line
    saved = lines.pop()
    assert (saved["seconds"], saved["stalled_s"], saved["checkpoint"]) == (
        7.5,
        1.25,
        [100.0, 101.25],
    )
    for step, line in enumerate(lines, start=1):
        assert (line["time_s"], line["data_wait_s"]) == (pytest.approx(step), pytest.approx(0.1))
        assert (line["loss"], line["gradient_norm"], line.get("skipped", False)) == (
            step + 5,
            2 * step,
            step == 2,
        )
        assert (line["step"], line["samples"], line["epoch"], line["lr"]) == (
            step,
            20 * step,
            step / 8,
            0.25,
        )
    scalars: dict[str, list[Any]] = {}
    for tag, value, samples in found["scalars"]:
        scalars.setdefault(tag, []).append((samples, value))
    assert scalars["train/loss"] == [(20 * step, step + 5) for step in range(1, 7)]
    assert scalars["train/data_wait_percent"][0] == (40, pytest.approx(100 * 0.4 / 4.5))
    assert scalars["train/samples_per_s"][0] == (40, pytest.approx(40 / 4.5))
    assert {"train/lr", "train/gradient_norm", "train/logit_scale"} <= set(scalars)


@pytest.mark.parametrize(("items", "warns"), [(63, True), (64, False), (None, False)])
def test_a_batch_larger_than_the_data_is_a_warning(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, items: int | None, warns: bool
) -> None:
    log_run_start(TrainPlan(640, 64, items), TrainState(), tmp_path, {})
    output = capsys.readouterr().out
    assert "10 steps" in output
    assert ("a global batch has 64 pairs, but the data only 63" in output) == warns


@pytest.mark.parametrize(
    ("preset", "export"),
    [
        ("htsat_tiny_roberta_base", "--format open_clip"),
        ("clap_htsat_tiny_roberta_base", "FOLDER"),
        ("demo", None),
    ],
)
def test_the_end_names_an_export_that_the_model_has(
    write_run: Callable[..., Path], preset: str, export: str | None
) -> None:
    first, *rest = next_commands(load_run(write_run(clap={"model": {"preset": preset}})))
    assert first.startswith("clap-ds evaluate ")
    assert [line.endswith(export or "") for line in rest] == [True] * (export is not None)
