"""A short version of the demo learns matching sounds and captions."""

import json
from pathlib import Path

import pytest

from examples.synthetic_sounds.kinds import KINDS
from tests.training import training_commands as commands

pytestmark = pytest.mark.end_to_end
LIMIT = 4 / len(KINDS)
"""Clips of a kind mostly get the same name, so chance gives more than four kinds the right one in 4
of 1,000 runs."""
NUM_TRAIN = 30 * len(KINDS)
NUM_HELD_OUT = 10 * len(KINDS)
EPOCHS = 8


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo")
    audio = ["--seconds", "1-3", "--sample_rate", "16000", "--format", "wav"]
    for name, clips, seed in (("train", NUM_TRAIN, 0), ("held_out", NUM_HELD_OUT, 1)):
        options = ["--wordings", name, "--clips", str(clips), "--seed", str(seed)]
        commands.make_sounds(folder / name, *options, *audio)
    return folder


def test_demo_learns_names_of_unseen_sounds(tmp_path, data):
    text = (commands.ROOT / "ds_configs" / "train_demo_cpu.json").read_text()
    content = json.loads(text.replace("runs/train_demo_data", str(data)))
    content["train_micro_batch_size_per_gpu"] = 16
    schedule = content["scheduler"]["params"]
    schedule |= {"total_num_steps": NUM_TRAIN * EPOCHS // 32, "warmup_num_steps": 10}
    # Only the last evaluation, and only of zero-shot classification.
    content["clap"]["evaluation"] |= {"every_steps": None, "retrieval": None}
    content["clap"]["train"] = {"epochs": float(EPOCHS)}
    content["clap"]["output"] = {"dir": str(tmp_path / "runs")}
    config = tmp_path / "demo.json"
    config.write_text(json.dumps(content))
    commands.train(config)
    (summary,) = commands.summaries(config)
    assert (summary["epoch_samples"], summary["samples"]) == (NUM_TRAIN, NUM_TRAIN * EPOCHS)
    assert summary["evaluation"]["zero_shot_top1"] > LIMIT
