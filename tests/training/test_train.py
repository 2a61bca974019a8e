"""The training command: its records, reproducibility, and exact results after interruptions."""

import gzip
import json
import signal
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from clap_ds.analysis.read_run import read_record
from clap_ds.config.settings import load_run
from tests.training import training_commands as commands
from tests.training.training_commands import RunningRanks, write_training

pytestmark = pytest.mark.end_to_end
STEPS = 24
BATCH = 4
"""Pairs per rank."""
SAMPLES = STEPS * BATCH * 2
RANDOM = {"preset": "micro", "drop_path": 0.2, "text_dropout": 0.2, "spec_augment": True}


@pytest.fixture(scope="module")
def sounds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sounds") / "data"
    return commands.make_sounds(folder, "--clips", "60", "--shards", "4", "--seconds", "1-2")


def on_shards(sounds: Path, **train: Any) -> dict[str, Any]:
    """Return `clap` of a run with dropout on two ranks, which takes `STEPS` steps."""
    train = {"max_samples": SAMPLES, **train}
    return {"model": RANDOM, "data": commands.shard_data(sounds), "train": train}


def test_training_leaves_records_for_analysis_and_users(tmp_path):
    train = {"max_samples": 10 * 2 * 2 * BATCH, "accumulation": "gradcache"}
    profile = {"start_step": 3, "steps": 2}
    clap = {"train": train, "checkpoint": {"every_steps": 4}, "profile": profile}
    config = write_training(tmp_path, gradient_accumulation_steps=2, clap=clap)
    output = commands.train(config)
    for part in (
        "micro-batch 4, accumulation 2, 16 text tokens",
        "s left",
        "total_num_steps is 24, but the run ends after 10 steps",
        "profile of steps 3 to 4 on rank 0",
    ):
        assert part in output
    (summary,) = commands.summaries(config)
    (record,) = commands.run_directories(config)
    assert (summary["state"], summary["step"], summary["samples"]) == ("completed", 10, 160)
    saves = [(save["step"], save["saved"]) for save in summary["checkpoints"]]
    assert saves == [(4, True), (8, True), (10, True)]
    assert (record / "run.png").read_bytes().startswith(b"\x89PNG")
    assert (read_record(record).rate or 0) > 0
    marked = [line["step"] for line in commands.lines(config) if line.get("profiled")]
    assert marked == [2, 3, 4]
    # Of 10 steps with a window each, the first is warm-up, too.
    assert len(summary["samples_per_s_per_gpu"]["windows"]) == 6
    trace = gzip.decompress((record / "profile/rank0_trace.json.gz").read_bytes())
    # GradCache's first pass over all micro-batches is one phase.
    assert (trace.count(b"ProfilerStep#"), trace.count(b'"forward"')) == (2, 2 * 3)
    assert not any((record / "stacks").iterdir()), "no rank hung"


def test_interrupted_run_equals_uninterrupted(tmp_path, sounds):
    """Rank 1 receives SIGTERM; in the second start, rank 0 receives SIGUSR1; the third start
    finishes. The last steps have twice the batch."""
    ramp = [[0, 2 * BATCH], [8 * 2 * BATCH, 4 * BATCH]]
    changes: dict[str, Any] = {
        "clap": on_shards(sounds, batch_ramp=ramp),
        "bf16": {"enabled": True},
        "gradient_accumulation_steps": 2,
    }
    uninterrupted = write_training(tmp_path, "uninterrupted", **changes)
    interrupted = write_training(tmp_path, "interrupted", **changes)
    commands.train(uninterrupted)
    for rank, number, state in ((1, signal.SIGTERM, "terminated"), (0, signal.SIGUSR1, "timeout")):
        step = max(commands.losses(interrupted), default=0)
        ranks = RunningRanks(interrupted, 2)
        ranks.wait_for_step(step + 4)
        ranks.signal(rank, number)
        assert ranks.wait() == [128 + number] * 2, ranks.outputs
        summary = commands.summaries(interrupted)[-1]
        last_step = max(commands.losses(interrupted))
        assert summary["state"] == state
        assert summary["step"] == last_step < STEPS
        assert summary["checkpoints"][-1]["step"] == last_step
        assert "the same command without --restart resumes" in ranks.outputs[0]
    assert "warning: settings" not in commands.train(interrupted)

    def results(lines: list[dict[str, Any]]) -> list[tuple[int, int, float, float]]:
        return [(line["step"], line["samples"], line["loss"], line["lr"]) for line in lines]

    expected = results(commands.lines(uninterrupted))
    assert results(commands.lines(interrupted)) == expected
    assert [samples for _, samples, _, _ in expected] == [*range(8, 72, 8), *range(80, 193, 16)]
    # The complete history and TensorBoard's events are next to the checkpoints.
    folder = load_run(interrupted).checkpoint_folder
    history = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    assert results([line for line in history if line["phase"] == "train"]) == expected
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    rates = [(event.step, event.value) for event in events.Scalars("train/lr")]
    assert rates == [(samples, pytest.approx(lr)) for _, samples, _, lr in expected]
    assert {"train/loss", "train/samples_per_s", "train/logit_scale"} <= {*events.Tags()["scalars"]}


def test_killed_rank_costs_unsaved_steps_and_one_rank_finishes(tmp_path, sounds):
    """3.2 epochs of 60 clips are the same number of samples as in the other runs."""
    clap = {**on_shards(sounds), "train": {"epochs": 3.2}, "checkpoint": {"every_minutes": 1e-3}}
    config = write_training(tmp_path, clap=clap)
    ranks = RunningRanks(config, 2)
    ranks.wait_for_step(7)
    ranks.signal(1, signal.SIGKILL)
    assert ranks.wait()[0] not in (0, 2)
    assert "another rank is gone" in ranks.outputs[0]
    assert "Traceback" not in ranks.outputs[0]
    saved_steps = [line["step"] for line in commands.lines(config, "checkpoint") if line["saved"]]
    # Its last steps are trained again.
    commands.run_directories(config)[0].rename(tmp_path / "killed")

    output = commands.train(config, world_size=1)
    assert "on 1 rank instead of 2" in output
    assert "samples that the unfinished epoch has left" in output
    summary = commands.summaries(config)[-1]
    assert (summary["epoch"], summary["epoch_samples"], summary["samples"]) == (3.2, 60, SAMPLES)
    resumed_step = summary["resumed_at_step"]
    assert resumed_step >= saved_steps[-1]
    samples_left = SAMPLES - resumed_step * 2 * BATCH
    assert summary["step"] == resumed_step + samples_left // BATCH


def test_nan_loss_stops_and_saves_nothing(tmp_path):
    adam = {"type": "AdamW", "params": {"lr": 1e30, "torch_adam": True}}
    clap = {"train": {"max_samples": 400, "log_every_steps": 3}, "checkpoint": {"every_steps": 2}}
    config = write_training(tmp_path, optimizer=adam, scheduler={}, clap=clap)
    ranks = RunningRanks(config, 2)
    assert ranks.wait() == [1, 1]
    assert "NaN or infinite at step 2" in ranks.outputs[0]
    assert "--skip_steps 1-2" in ranks.outputs[0]
    (summary,) = commands.summaries(config)
    assert summary["state"] == "failed"
    assert not commands.lines(config, "checkpoint")


def test_restart_moves_checkpoints_and_skips_steps(tmp_path):
    config = write_training(tmp_path, clap={"train": {"max_samples": 3 * BATCH}})
    commands.train(config, world_size=1)
    folder = load_run(config).checkpoint_folder
    output = commands.train(config, 1, "--restart", "--skip_steps", "2-3")
    (archive,) = folder.parent.glob("*-aside-*")
    assert f"moved the contents of {folder} to {archive}" in output
    assert "skipped the batches of steps 2 to 3" in output
    assert [line["step"] for line in commands.lines(config)] == [1, 2, 3] * 2


def test_evaluation_reaching_target_ends_run(tmp_path, sounds):
    train = {"max_samples": 8 * 16, "target_metrics": {"zero_shot_top1": 0.0}}
    clap = {
        "data": commands.shard_data(sounds),
        "train": train,
        "evaluation": {"every_steps": 3, "zero_shot": {"shards": str(sounds / "*.tar")}},
    }
    config = write_training(tmp_path, train_micro_batch_size_per_gpu=16, clap=clap)
    output = commands.train(config, world_size=1)
    (summary,) = commands.summaries(config)
    assert (summary["state"], summary["step"]) == ("completed", 3)
    assert 0 < summary["time_to_target_s"] <= summary["train_s"]
    folder = load_run(config).checkpoint_folder
    assert f"  clap-ds evaluate {folder} --config {config}\n" in output
    assert "target reached at step 3" in summary["stop_reason"]
