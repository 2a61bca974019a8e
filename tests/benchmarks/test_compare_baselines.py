"""Baselines at a small size: the same function on all sides, SpecAugment as published, and
ratios."""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import deepspeed
import pytest
import torch
from deepspeed.utils import groups

from benchmarks import compare_baselines
from clap_ds.config.model import load_preset

SMALL = ["--micro_batch", "3", "--context_length", "12", "--rounds", "1"]


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Clean up the process group that the command creates."""
    monkeypatch.setattr(groups, "_WORLD_GROUP", None)
    # Restores all variables, also those that the process group sets.
    with mock.patch.dict(os.environ, DS_ACCELERATOR="cpu"):
        yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
        deepspeed.comm.comm.cdb = None


def compare(folder: Path, *options: str) -> list[dict[str, Any]]:
    """Run the command and return its JSON."""
    output = folder / "baselines.md"
    assert compare_baselines.main([*SMALL, *options, "--output", str(output)]) == 0
    results: list[dict[str, Any]] = json.loads(output.with_suffix(".json").read_text())
    titles = ["with" if result["spec_augment"] else "without" for result in results]
    assert re.findall(r"## .* (\w+) SpecAugment", output.read_text()) == titles
    return results


def test_loops_have_the_heads_of_the_preset_and_equal_losses_without_masks(tmp_path):
    sizes = load_preset("micro").model_dump(exclude={"name"})
    head = {"hidden_dim": 24, "activation": "gelu", "bias": False}
    sizes["text"] |= {"pooling": "mean", "projection": head}
    sizes["audio"]["projection"]["activation"] = "gelu"
    preset = tmp_path / "mean.json"
    preset.write_text(json.dumps(sizes))
    options = ["--preset", str(preset), "--caption_lengths", "3", "9", "--against", "loops"]
    results = compare(tmp_path, *options)
    kinds = [(result["precision"], result["spec_augment"]) for result in results]
    assert kinds == [("bf16", True), ("bf16", False), ("fp32", True), ("fp32", False)]
    masked, plain = (
        {row["side"]: row["loss"] for row in result["sides"]} for result in results[2:]
    )
    assert plain.keys() == {"ours", "open_clip, none", "LAION-CLAP, none"}
    for side, loss in plain.items():
        assert loss == pytest.approx(plain["ours"], rel=1e-5)
        assert abs(masked[side] - loss) > 1e-4


def test_towers_of_transformers_have_equal_losses_and_ratios_of_their_times(tmp_path):
    options = ["--preset", "micro", "--text", "packed", "--caption_lengths", "3", "9"]
    bf16, fp32 = compare(tmp_path, *options, "--against", "transformers")
    assert (len(bf16["sides"]), len(fp32["sides"])) == (3, 2)
    assert fp32["loss_difference"] < 1e-5
    ours, baseline = fp32["sides"]
    assert baseline["speed"]["median"] == pytest.approx(baseline["step"] / ours["step"])
