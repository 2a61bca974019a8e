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

from benchmarks import baselines, compare_baselines
from clap_ds.config.model import load_preset
from clap_ds.data.batch import Batch
from clap_ds.model.clap import ClapModel

SMALL = ["--micro_batch", "3", "--context_length", "12", "--rounds", "1"]


@pytest.fixture(autouse=True)
def on_cpu() -> Iterator[None]:
    """Clean up the process group that the command creates."""
    with (
        mock.patch.dict(os.environ, DS_ACCELERATOR="cpu"),
        mock.patch.dict(vars(groups), _WORLD_GROUP=None),
    ):
        yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
        deepspeed.comm.comm.cdb = None


def compared(folder: Path, *options: str) -> list[dict[str, Any]]:
    path = folder / "peers.md"
    assert compare_baselines.main([*SMALL, *options, "--output", str(path)]) == 0
    found: list[dict[str, Any]] = json.loads(path.with_suffix(".json").read_text())
    words = ["with" if row["spec_augment"] else "without" for row in found]
    assert re.findall(r"## .* (\w+) SpecAugment", path.read_text()) == words
    return found


def test_loops_have_the_benchmarks_heads_and_are_timed_with_spec_augment_and_without(
    tmp_path: Path,
) -> None:
    sizes = load_preset("micro").model_dump(exclude={"name"})
    sizes["text"] |= {
        "pooling": "mean",
        "projection": {"hidden_dim": 24, "activation": "gelu", "bias": False},
    }
    sizes["audio"]["projection"]["activation"] = "gelu"
    preset = tmp_path / "mean.json"
    preset.write_text(json.dumps(sizes))
    found = compared(
        tmp_path, "--preset", str(preset), "--caption_lengths", "3", "9", "--against", "loops"
    )
    kinds = [(row["precision"], row["spec_augment"]) for row in found]
    assert kinds == [("bf16", True), ("bf16", False), ("fp32", True), ("fp32", False)]
    masked, plain = ({side["side"]: side["loss"] for side in row["sides"]} for row in found[2:])
    assert plain.keys() == {"ours", "open_clip, none", "LAION-CLAP, none"}
    assert list(plain.values()) == pytest.approx([plain["ours"]] * 3, rel=1e-5)
    assert all(abs(masked[side] - loss) > 1e-4 for side, loss in plain.items())


def test_transformers_towers_compute_the_same_loss(tmp_path: Path) -> None:
    found = compared(
        tmp_path,
        "--preset",
        "micro",
        "--text",
        "packed",
        "--caption_lengths",
        "3",
        "9",
        "--against",
        "transformers",
    )
    assert [len(row["sides"]) for row in found] == [3, 2]
    assert found[1]["loss_difference"] < 1e-5
    ours, peer = found[1]["sides"]
    assert peer["speed"]["median"] == pytest.approx(peer["step"] / ours["step"])


def test_a_peer_with_other_weights_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = baselines.to_transformers
    monkeypatch.setattr(
        baselines, "to_transformers", lambda state: {k: v * 1.5 for k, v in honest(state).items()}
    )
    assert (
        compare_baselines.main(
            [*SMALL, "--preset", "micro", "--precision", "fp32", "--against", "transformers"]
        )
        == 1
    )


def test_the_loop_masks_the_stripes_that_it_draws() -> None:
    batch = 4
    frames = 101
    bins = 16
    norm = torch.nn.BatchNorm2d(bins)
    mel = torch.randn(batch, bins, frames, 1)
    torch.manual_seed(3)
    masked = baselines.mask_in_a_loop(norm(mel))
    torch.manual_seed(3)
    kept = torch.ones(batch, bins, frames, 1)
    for dim, size, limit in ((2, frames, 64), (1, bins, 8)):
        for number in range(batch):
            for _ in range(2):
                width = int(torch.randint(limit, (1,)))
                start = int(torch.randint(size - width, (1,)))
                kept[number].narrow(dim - 1, start, width).zero_()
    torch.testing.assert_close(masked, norm(mel) * kept, rtol=0, atol=0)
    assert 0 < kept.mean() < 1


@pytest.mark.parametrize(("kind", "padded_length"), [("transformers", 7), ("open_clip", 12)])
def test_shorter_captions_are_padded_as_the_program_pads_them(
    kind: str, padded_length: int
) -> None:
    config = load_preset("micro")
    weights = baselines.to_transformers(ClapModel(config).state_dict())
    side = baselines.Side(config, weights, kind, "none", torch.device("cpu"), spec_augment=False)
    lengths = torch.tensor([4, 7, 5])
    mask = (torch.arange(12) < lengths[:, None]).long()
    ids = torch.where(mask.bool(), 7, config.text.pad_token_id)
    batch = Batch(torch.zeros(3, *config.audio.clip_shape, dtype=torch.int16), ids, mask)
    with mock.patch.object(side.model, "forward", wraps=side.model.forward) as forward:
        side.step(batch)
    _, seen_ids, seen_mask = forward.call_args.args
    assert seen_ids.shape == seen_mask.shape == (3, padded_length)
    assert seen_mask.sum(dim=1).tolist() == [4, 7, 5]
