"""A run ends where `clap.train.stop_at` is reached, and its summary has the time that took."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from clap_ds.analysis.record import read_record
from tests.training import training_commands as commands

pytestmark = pytest.mark.end_to_end


@pytest.mark.parametrize(("wanted", "steps"), [(0.0, 3), (1.0, 6)])
def test_ends_at_the_evaluation_that_reaches_the_target(tmp_path: Path, wanted: float, steps: int) -> None:
    sounds = tmp_path / "sounds"
    commands.make_sounds(sounds, "--clips", "40", "--shards", "1", "--seconds", "1")
    config = commands.write_training(
        tmp_path,
        train_micro_batch_size_per_gpu=4,
        clap={
            "data": {**commands.shard_data(sounds), "num_workers": 0},
            "train": {"samples": 24, "stop_at": {"zero_shot_top1": wanted}},
            "evaluation": {"every_steps": 3, "zero_shot": {"shards": str(sounds / "*.tar")}},
        },
    )
    commands.train(config, world_size=1)
    summary: dict[str, Any]
    (summary,) = commands.summaries(config)
    assert (summary["state"], summary["step"]) == ("completed", steps)
    (directory,) = commands.run_directories(config)
    read = read_record(directory)
    if wanted:
        assert summary["time_to_target_s"] is None
    else:
        assert 0 < summary["time_to_target_s"] < commands.TIMEOUT_S
    assert read.time_to_target_s == summary["time_to_target_s"]
