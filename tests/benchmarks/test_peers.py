"""Peers at a small size: the same function on all sides, SpecAugment as the field runs it, honest ratios."""

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
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import peers, sides
from clap_ds.config.errors import UserError
from clap_ds.config.model import load_preset

SMALL = ["--micro_batch", "3", "--text_tokens", "12", "--rounds", "1"]


@pytest.fixture(autouse=True)
def on_cpu() -> Iterator[None]:
    """The commands join a group of one rank; nothing stays of it."""
    with mock.patch.dict(os.environ, DS_ACCELERATOR="cpu"), mock.patch.dict(vars(groups), _WORLD_GROUP=None):
        yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
        deepspeed.comm.comm.cdb = None


def compared(folder: Path, *options: str) -> list[dict[str, Any]]:
    path = folder / "peers.md"
    assert peers.main([*SMALL, *options, "--output", str(path)]) == 0
    found: list[dict[str, Any]] = json.loads(path.with_suffix(".json").read_text())
    words = ["with" if row["spec_augment"] else "without" for row in found]
    assert re.findall(r"## .* (\w+) SpecAugment", path.read_text()) == words
    return found


def test_loops_have_the_benchmarks_heads_and_are_timed_with_spec_augment_and_without(tmp_path: Path) -> None:
    sizes = load_preset("micro").model_dump(exclude={"name"})
    sizes["text"] |= {"pooling": "mean", "projection": {"hidden_dim": 24, "activation": "gelu", "bias": False}}
    sizes["audio"]["projection"]["activation"] = "gelu"
    preset = tmp_path / "mean.json"
    preset.write_text(json.dumps(sizes))
    found = compared(tmp_path, "--preset", str(preset), "--caption_lengths", "3", "9", "--against", "loops")
    kinds = [(row["precision"], row["spec_augment"]) for row in found]
    assert kinds == [("bf16", True), ("bf16", False), ("fp32", True), ("fp32", False)]
    masked, plain = (row["first_loss"] for row in found[2:])
    assert plain.keys() == {"ours", "open_clip's loop", "LAION-CLAP's loop"}
    assert list(plain.values()) == pytest.approx([plain["ours"]] * 3, rel=1e-5)
    assert all(abs(masked[side] - loss) > 1e-4 for side, loss in plain.items())
    with pytest.raises(UserError, match="pooling or heads"):
        peers.main(["--preset", str(preset), "--against", "transformers"])


def test_transformers_model_computes_the_same_loss(tmp_path: Path) -> None:
    found = compared(
        tmp_path, "--preset", "micro", "--text", "packed", "--caption_lengths", "3", "9", "--against", "transformers"
    )
    assert [len(row["first_loss"]) for row in found] == [3, 2]
    assert found[1]["loss_difference"] < 1e-5


def test_a_peer_with_other_weights_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = sides.to_transformers
    monkeypatch.setattr(sides, "to_transformers", lambda state: {k: v * 1.5 for k, v in honest(state).items()})
    assert peers.main([*SMALL, "--preset", "micro", "--precision", "fp32", "--against", "transformers"]) == 1


class Copies(TorchDispatchMode):
    """Counts copies of so many bytes."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__()
        self.num_bytes, self.count = num_bytes, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_copy = func in (torch.ops.aten.copy_.default, torch.ops.aten.clone.default)
        self.count += is_copy and args[0].nbytes >= self.num_bytes
        return func(*args, **(kwargs or {}))


def test_the_loop_masks_stripes_and_copies_the_batchs_gradient_for_each() -> None:
    batch, frames, bins = 4, 101, 16
    norm = torch.nn.BatchNorm2d(bins)
    mel = torch.randn(batch, bins, frames, 1)
    torch.manual_seed(3)
    masked = sides.mask_in_a_loop(norm(mel))
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
    with Copies(mel.nbytes) as copies:
        masked.square().sum().backward()
    assert copies.count == 4 * batch + 1


def test_ratios_are_the_peers_time_over_ours_round_by_round() -> None:
    ours = [{"front_end": 0.0, "forward": 1.0, "step": step} for step in (1.0, 2.0, 4.0)]
    peer = [{"front_end": 1.0, "forward": 2.0, "step": step} for step in (2.0, 4.0, 6.0)]
    assert peers.ratios(ours, peer, peers.COMPARED["step"]).median == 2.0
    assert peers.ratios(ours, peer, peers.COMPARED["forward"]).median == 3.0
