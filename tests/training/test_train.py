"""The training command: its records, reproducibility, and exact results after interruptions."""

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
RANDOM = {"preset": "micro", "drop_path": 0.2, "text_dropout": 0.2, "spec_augment": True}


@pytest.fixture(scope="module")
def sounds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    options = ("--clips", "60", "--shards", "4", "--seconds", "1-2")
    return commands.make_sounds(tmp_path_factory.mktemp("sounds") / "data", *options)


def _on_shards(sounds: Path, **train: Any) -> dict[str, Any]:
    return {
        "model": RANDOM,
        "data": commands.shard_data(sounds),
        "train": {"max_samples": STEPS * BATCH * 2, **train},
    }


def test_leaves_behind_what_analysis_and_users_need(tmp_path: Path) -> None:
    train = {"max_samples": 10 * 2 * 2 * BATCH, "accumulation": "gradcache"}
    clap = {"train": train, "checkpoint": {"every_steps": 4}}
    config = write_training(tmp_path, gradient_accumulation_steps=2, clap=clap)
    output = commands.train(config)
    title = "micro on 2 × ", "micro-batch 4, accumulation 2, 16 text tokens"
    said = (
        *title,
        "checkpoints: ",
        "logit scale",
        "s left",
        "total_num_steps is 24, but the run ends after 10 steps",
    )
    assert all(part in output for part in said)
    (summary,), (directory,) = commands.summaries(config), commands.run_directories(config)
    assert (summary["state"], summary["step"], summary["samples"]) == ("completed", 10, 160)
    assert summary["global_batch"] == 16
    assert [(each["step"], each["saved"]) for each in summary["checkpoints"]] == [
        (4, True),
        (8, True),
        (10, True),
    ]
    rows = commands.lines(config)
    assert [(row["step"], row["samples"]) for row in rows] == [
        (step, 16 * step) for step in range(1, 11)
    ]
    assert {row["epoch"] for row in (*rows, summary)} == {None}
    assert all(row["gradient_norm"] > 0 and row["time_s"] > 0 for row in rows)
    # DeepSpeed's schedule: 0 before its first step, then linear over 4 steps.
    assert [row["lr"] for row in rows[:5]] == pytest.approx([0, 0, 2.5e-4, 5e-4, 7.5e-4])
    assert all(
        begin < end
        for begin, end in (line["checkpoint"] for line in commands.lines(config, "checkpoint"))
    )
    assert (directory / "run.png").read_bytes().startswith(b"\x89PNG")
    assert (read_record(directory).rate or 0) > 0
    assert not any((directory / "stacks").iterdir()), "no rank hung"
    assert not (directory / "errors").exists()


def test_interrupted_and_resumed_equals_uninterrupted(tmp_path: Path, sounds: Path) -> None:
    """One rank receives SIGTERM; in the second start, the other receives SIGUSR1; the third start
    finishes. The last steps have twice the batch."""
    ramped = _on_shards(sounds, batch_ramp=[[0, 2 * BATCH], [8 * 2 * BATCH, 4 * BATCH]])
    changes: dict[str, Any] = {
        "clap": ramped,
        "bf16": {"enabled": True},
        "gradient_accumulation_steps": 2,
    }
    whole = write_training(tmp_path, "whole", **changes)
    parts = write_training(tmp_path, "parts", **changes)
    commands.train(whole)

    for rank, number, state in ((1, signal.SIGTERM, "terminated"), (0, signal.SIGUSR1, "timeout")):
        begun_at = max(commands.losses(parts), default=0)
        ranks = RunningRanks(parts, 2)
        ranks.wait_for_step(begun_at + 4)
        ranks.signal(rank, number)
        assert ranks.wait() == [128 + number] * 2, ranks.outputs
        summary = commands.summaries(parts)[-1]
        assert summary["state"] == state
        assert (
            summary["checkpoints"][-1]["step"]
            == summary["step"]
            == max(commands.losses(parts))
            < STEPS
        )
        assert "the same command without --restart resumes" in ranks.outputs[0]
    output = commands.train(parts)
    assert "resuming from" in output

    found = [
        {row["step"]: (row["loss"], row["lr"]) for row in commands.lines(config)}
        for config in (parts, whole)
    ]
    assert found[0] == found[1]
    assert "warning: settings" not in output
    # The complete history is next to the checkpoints.
    folder = load_run(parts).checkpoint_folder
    history = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    steps = [(row["step"], (row["loss"], row["lr"])) for row in history if row["phase"] == "train"]
    assert steps == list(found[1].items())
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    samples = [row["samples"] for row in commands.lines(whole)]
    assert samples == [*range(8, 72, 8), *range(80, 193, 16)]
    assert [(event.step, event.value) for event in events.Scalars("train/lr")] == [
        (at, pytest.approx(lr)) for at, (_, lr) in zip(samples, found[1].values(), strict=True)
    ]
    assert commands.summaries(parts)[-1]["samples"] == STEPS * BATCH * 2
    # The run is complete: no step is trained again.
    assert "nothing left to train" in commands.train(parts)
    assert commands.losses(parts) == commands.losses(whole)


def test_a_killed_rank_costs_only_what_was_not_saved_and_one_alone_finishes(
    tmp_path: Path, sounds: Path
) -> None:
    """3.2 epochs of 60 clips are the same number of samples as in the other runs. Meanwhile the
    data moves."""
    clap = {**_on_shards(sounds), "train": {"epochs": 3.2}, "checkpoint": {"every_minutes": 1e-3}}
    config = write_training(tmp_path, clap=clap)
    ranks = RunningRanks(config, 2)
    ranks.wait_for_step(7)
    ranks.signal(1, signal.SIGKILL)
    assert ranks.wait()[0] not in (0, 2)
    assert "another rank is gone" in ranks.outputs[0]
    assert "Traceback" not in ranks.outputs[0]
    saved = [line["step"] for line in commands.lines(config, "checkpoint") if line["saved"]]
    commands.run_directories(config)[0].rename(
        tmp_path / "killed"
    )  # its last steps are trained again
    (tmp_path / "moved").symlink_to(sounds)
    write_training(tmp_path, clap={**clap, "data": commands.shard_data(tmp_path / "moved")})
    output = commands.train(config, world_size=1)
    assert "on 1 rank instead of 2" in output
    assert f"'{sounds}/*.tar' there" in output
    summary = commands.summaries(config)[-1]
    samples = STEPS * BATCH * 2
    assert all(
        row["epoch"] == pytest.approx(row["samples"] / 60, abs=1e-6)
        for row in commands.lines(config)
    )
    assert (summary["epoch"], summary["epoch_samples"], summary["samples"]) == (3.2, 60, samples)
    assert summary["resumed_at_step"] >= saved[-1]
    assert (
        summary["step"]
        == summary["resumed_at_step"] + samples // BATCH - summary["resumed_at_step"] * 2
    )


def test_nan_loss_stops_with_the_step_and_saves_nothing(tmp_path: Path) -> None:
    adam = {"type": "AdamW", "params": {"lr": 1e30, "torch_adam": True}}
    clap = {"train": {"max_samples": 400, "log_every_steps": 3}, "checkpoint": {"every_steps": 2}}
    config = write_training(tmp_path, optimizer=adam, scheduler={}, clap=clap)
    ranks = RunningRanks(config, 2)
    assert ranks.wait() == [1, 1]
    assert "NaN or infinite at step 2" in ranks.outputs[0]
    assert "--skip_steps 1-2" in ranks.outputs[0]
    assert "Traceback" not in "".join(ranks.outputs)
    (summary,) = commands.summaries(config)
    assert summary["state"] == "failed"
    assert "step 2" in summary["error"]
    assert not commands.lines(config, "checkpoint")


def test_damaged_checkpoints_are_never_taken_for_none(tmp_path: Path) -> None:
    config = write_training(
        tmp_path, clap={"train": {"max_samples": 6 * BATCH}, "checkpoint": {"every_steps": 3}}
    )
    commands.train(config, world_size=1)
    folder = load_run(config).checkpoint_folder
    for states in folder.glob("*/state.safetensors"):
        states.unlink()
    ranks = RunningRanks(config, 1)
    assert ranks.wait() == [2]
    assert "all 2 checkpoints are damaged" in ranks.outputs[0]
    output = commands.train(config, 1, "--restart", "--skip_steps", "5-6")
    (aside,) = folder.parent.glob("*-aside-*")
    assert f"moved the contents of {folder} to {aside}" in output
    assert [path.name for path in aside.glob("step-*")] == [
        path.name for path in folder.glob("step-*")
    ]
    assert "skipped the batches of steps 5 to 6" in output
    assert [row["step"] for row in commands.lines(config)] == [*range(1, 7)] * 2
    assert "nothing left to train" in commands.train(config, world_size=1)


def test_ends_at_the_evaluation_that_reaches_the_target(tmp_path: Path, sounds: Path) -> None:
    micro_batch = 16
    evaluation = {"every_steps": 3, "zero_shot": {"shards": str(sounds / "*.tar")}}

    def run(name: str, **train: Any) -> tuple[Path, str]:
        clap = {**_on_shards(sounds), "train": train, "evaluation": evaluation}
        clap["checkpoint"] = {"folder": str(tmp_path / "checkpoints")}
        config = write_training(
            tmp_path, name, train_micro_batch_size_per_gpu=micro_batch, clap=clap
        )
        return config, commands.train(config, world_size=1)

    config, output = run(
        "first", max_samples=8 * micro_batch, target_metrics={"zero_shot_top1": 0.0}
    )
    (summary,) = commands.summaries(config)
    assert (summary["state"], summary["step"]) == ("completed", 3)
    assert 0 < summary["time_to_target_s"] <= summary["train_s"]
    _, output = run("second", max_samples=8 * micro_batch, target_metrics={"zero_shot_top1": 0.0})
    assert summary["stop_reason"] in output
    config, output = run(
        "unreached", max_samples=5 * micro_batch, target_metrics={"zero_shot_top1": 1.0}
    )
    (summary,) = commands.summaries(config)
    assert (summary["step"], summary["time_to_target_s"]) == (5, None)
    assert f"  clap-ds evaluate {tmp_path / 'checkpoints'} --config {config}\n" in output
