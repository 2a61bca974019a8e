"""The log of steps with known times, on two ranks with simulated clocks, and messages at start and
end."""

import io
import json
import math
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from clap_ds.checkpoint.train_state import SavedCheckpoint, TrainState
from clap_ds.config.settings import load_run
from clap_ds.evaluation.metrics import Evaluation, Measure, TaskResult
from clap_ds.metrics import throughput, timers
from clap_ds.metrics.timers import StepTimer
from clap_ds.run_records import environment
from clap_ds.run_records.run_dir import RunDirectory
from clap_ds.training import log
from clap_ds.training.log import TrainLogger, log_run_start
from clap_ds.training.loop import next_commands
from clap_ds.training.plan import TrainPlan
from tests.rank_pool import RankPool

GIB = 2**30
CPU = torch.device("cpu")
DATA_WAIT_S = 0.1
EVALUATION_S = 50.0


class SimulatedEngine:
    """An engine whose step n takes n s on rank 0 and 1.5 n s on rank 1."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.clock_s = 100.0
        self.device = CPU
        self.model = SimpleNamespace(logit_scale=torch.tensor([math.log(4.0 + rank)]))
        self.deepspeed = SimpleNamespace(
            skipped_steps=1, get_lr=lambda: [0.25, 9.0], tput_timer=SimpleNamespace()
        )
        self.timer = StepTimer(CPU)
        self.stop_timers = self.timer.stop

    def step(self, number: int) -> torch.Tensor:
        data_wait_s = DATA_WAIT_S * (1 + self.rank)
        with self.timer("data_wait"):
            self.clock_s += data_wait_s
        self.clock_s += number * (1 + 0.5 * self.rank) - data_wait_s
        self.gradient_norm = torch.tensor(2.0 * number)
        self.is_skipped = torch.tensor(number == 2)
        return torch.tensor(number + 10.0 * self.rank)

    def count_skipped(self) -> None:
        pass

    def check_loss(self) -> None:
        pass

    def energy_joules(self, device: torch.device) -> float:
        """100 W on rank 0 and 150 W on rank 1."""
        return (100 + 50 * self.rank) * self.clock_s


def log_six_steps(folder: str) -> dict[str, Any]:
    """Log six steps of 20 samples on two ranks, every two steps, with evaluations and saves."""
    rank = dist.get_rank()
    engine: Any = SimulatedEngine(rank)
    ranks: Any = SimpleNamespace(is_main_process=rank == 0, world_size=2, host=f"node{rank}")
    plan = TrainPlan(120, 20, 160)
    state = TrainState(train_s=1000.0)
    record = RunDirectory(Path(folder))
    evaluation = Evaluation(
        {"zero_shot": TaskResult({}, {"top1": Measure(0.5, 0.1, 0.4, 0.6)})}, []
    )
    rates = []
    with (
        pytest.MonkeyPatch.context() as patch,
        redirect_stdout(io.StringIO()) as output,
        redirect_stderr(io.StringIO()) as errors,
    ):
        patch.setattr(timers.time, "perf_counter", lambda: engine.clock_s)
        patch.setattr(environment, "peak_memory_bytes", lambda _: (1 + rank) * GIB)
        patch.setattr(environment, "read_energy_joules", engine.energy_joules)
        patch.setattr(throughput, "read_energy_joules", engine.energy_joules)
        patch.setattr(log, "Scalars", lambda *_: SimpleNamespace(write=len))
        logger = TrainLogger(record, Path(folder), engine, plan, state, ranks)
        for step in range(1, 7):
            logger.begin_step()
            loss = engine.step(step)
            plan.advance(state)
            logger.end_step(loss)
            if step % 2 == 0:
                rates.append(logger.log())
                logger.log_evaluation(evaluation, EVALUATION_S)
                engine.clock_s += EVALUATION_S
        saved = SavedCheckpoint(6, 100.0, 107.5, Path("step-6"), 15_000_000_000, stalled_s=1.25)
        logger.log_saves([saved])
        for hour in (1, 2, 3, 4):
            begin = 100.0 + 3600 * hour
            logger.log_saves([SavedCheckpoint(6 + hour, begin, begin, problem="disk full")])
        logger.close()
    return {
        "summary": record.summary(),
        "rates": rates,
        "output": output.getvalue(),
        "errors": errors.getvalue(),
    }


@pytest.fixture(scope="module")
def logged(two_ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Rank 0's log of six steps, with the lines of its files by phase."""
    folder = tmp_path_factory.mktemp("run")
    logged = two_ranks.run(log_six_steps, str(folder))[0]
    for name in ("metrics", "history"):
        text = (folder / f"{name}.jsonl").read_text()
        logged[name] = [json.loads(line) for line in text.splitlines()]
    return logged


def lines_of(logged: dict[str, Any], phase: str) -> list[dict[str, Any]]:
    return [line for line in logged["metrics"] if line["phase"] == phase]


def test_step_lines_have_means_of_ranks_and_times_of_rank_0(logged):
    lines = lines_of(logged, "train")
    assert len(lines) == 6
    for step, line in enumerate(lines, start=1):
        assert (line["step"], line["samples"], line["epoch"]) == (step, 20 * step, step / 8)
        assert (line["time_s"], line["data_wait_s"]) == pytest.approx((step, DATA_WAIT_S))
        # The losses are step and step + 10.
        assert (line["loss"], line["gradient_norm"], line["lr"]) == (step + 5, 2 * step, 0.25)
        assert line.get("skipped", False) == (step == 2)


def test_summary_has_throughput_after_warm_up(logged):
    """The slower rank's steps take 1.5 times their number in seconds; the first two are warm-up."""
    summary = logged["summary"]
    # Two steps of 20 samples on two ranks in 1.5 (3 + 4) s and 1.5 (5 + 6) s.
    windows = summary["samples_per_s_per_gpu"]["windows"]
    assert windows == pytest.approx([20 / 10.5, 20 / 16.5])
    assert summary["samples_per_s"] == pytest.approx(80 / 27)
    assert summary["step_time_s"] == pytest.approx(
        {"median": 4.5, "p95": 5.85, "slowest_rank_median": 6.75}
    )
    assert summary["data_wait_percent"] == pytest.approx(100 * 0.8 / 27)
    assert (summary["memory_peak_bytes"], summary["skipped_steps"]) == (2 * GIB, 1)
    assert (summary["step"], summary["samples"], summary["loss"]) == (6, 120, 11)


def test_log_returns_samples_per_s_without_data_wait(logged):
    # 10 of the 20 samples are rank 0's.
    expected = [[10 / (step - DATA_WAIT_S), 10 / (step + 1 - DATA_WAIT_S)] for step in (1, 3, 5)]
    for rates, expected_rates in zip(logged["rates"], expected, strict=True):
        assert rates == pytest.approx(expected_rates)


def test_energy_includes_evaluations_before(logged):
    # Seconds from the start to each evaluation.
    rank_0_s = [3, 10 + EVALUATION_S, 21 + 2 * EVALUATION_S]
    rank_1_s = [4.5, 15 + EVALUATION_S, 31.5 + 2 * EVALUATION_S]
    joules = [100 * s + 150 * slow_s for s, slow_s in zip(rank_0_s, rank_1_s, strict=True)]
    per_sample = [line["joules_per_sample"] for line in lines_of(logged, "evaluation")]
    assert per_sample == pytest.approx([joules[0] / 40, joules[1] / 80, joules[2] / 120])
    assert logged["summary"]["energy_kwh"] == pytest.approx(joules[2] / 3.6e6)


def test_saves_are_reported_and_failures_in_a_row_state_lost_time(logged):
    saved, *_ = lines_of(logged, "checkpoint")
    assert (saved["seconds"], saved["checkpoint"]) == (7.5, [100.0, 101.25])
    message = "saved step-6: 15,000.0 MB in 7.5 s (2.00 GB/s), blocking training for 1.25 s"
    assert message in logged["output"]
    warning = "the checkpoint of step 7 could not be saved: disk full"
    assert warning in logged["summary"]["warnings"]
    third, _ = logged["errors"].splitlines()
    assert third.startswith("error: 3 checkpoints in a row")
    assert "3.0 hours" in third


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (TrainState(), "a global batch has 64 pairs, but the data only 63"),
        (TrainState(10, 640), "nothing left to train: all 640 samples are consumed"),
    ],
)
def test_start_warns_of_batch_larger_than_data_and_of_complete_run(
    capsys, tmp_path, state, message
):
    log_run_start(TrainPlan(640, 64, epoch_samples=63), state, tmp_path, {})
    assert message in capsys.readouterr().out


@pytest.mark.parametrize(
    ("preset", "expected"),
    [
        ("htsat_tiny_roberta_base", [" --format open_clip"]),
        ("clap_htsat_tiny_roberta_base", [""]),
        ("demo", []),
    ],
)
def test_next_commands_have_possible_export(write_run, preset, expected):
    run = load_run(write_run(clap={"model": {"preset": preset}}))
    evaluate, *exports = next_commands(run, run.checkpoint_folder)
    assert evaluate.startswith("clap-ds evaluate ")
    assert [command.partition(" FOLDER")[2] for command in exports] == expected
