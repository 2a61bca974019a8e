"""Peers on the micro preset: the same function on both sides, honest ratios."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import deepspeed
import pytest
import torch

from benchmarks import peers, sides
from clap_ds.config.model import load_preset
from clap_ds.flop_count.published_model import ConvolutionMel
from clap_ds.model.mel import LogMel

SMALL = ["--preset", "micro", "--micro_batch", "3", "--text_tokens", "12", "--rounds", "2"]


@pytest.fixture(autouse=True)
def on_cpu() -> Iterator[None]:
    """The commands join a group of one rank; nothing stays of it."""
    with mock.patch.dict(os.environ, DS_ACCELERATOR="cpu"):
        yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
        deepspeed.comm.comm.cdb = None


def test_both_sides_compute_the_same_loss(tmp_path: Path) -> None:
    path = tmp_path / "peers.md"
    options = ["--precision", "fp32", "--text", "packed", "--caption_lengths", "3", "9", "--output", str(path)]
    assert peers.main([*SMALL, *options]) == 0
    (result,) = json.loads(path.with_suffix(".json").read_text())
    assert result["loss_difference"] < 1e-5
    assert set(result["speed_ratio"]) == {"forward", "backward", "optimizer", "step"}
    assert "| ours, none |" in " ".join(path.read_text().split())


def test_every_way_of_training_in_bf16_computes_the_same_loss(tmp_path: Path) -> None:
    path = tmp_path / "peers.md"
    assert peers.main([*SMALL, "--rounds", "1", "--precision", "bf16", "--output", str(path)]) == 0
    (result,) = json.loads(path.with_suffix(".json").read_text())
    losses = result["first_loss"]
    assert {"ours, engine", "ours, autocast", "open_clip's loop", "LAION-CLAP's loop"} <= losses.keys()
    assert max(losses.values()) - min(losses.values()) < 0.02 * min(losses.values())


def test_laions_front_end_gives_the_same_features() -> None:
    config = load_preset("micro").audio
    waveforms = torch.randn(2, config.num_samples) * 0.1
    torch.testing.assert_close(ConvolutionMel(config)(waveforms), LogMel(config)(waveforms), rtol=1e-3, atol=1e-3)


def test_a_peer_with_other_weights_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = sides.to_transformers
    monkeypatch.setattr(sides, "to_transformers", lambda state: {k: v * 1.5 for k, v in honest(state).items()})
    assert peers.main([*SMALL, "--precision", "fp32"]) == 1


def test_ratios_are_the_peers_time_over_ours_round_by_round() -> None:
    ours = [{"front_end": 0.0, "forward": 1.0, "step": step} for step in (1.0, 2.0, 4.0)]
    peer = [{"front_end": 1.0, "forward": 2.0, "step": step} for step in (2.0, 4.0, 6.0)]
    assert peers.ratios(ours, peer, peers.COMPARED["step"]).median == 2.0
    assert peers.ratios(ours, peer, peers.COMPARED["forward"]).median == 3.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_masters_step_as_adamw_in_fp32(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    start, gradients = torch.randn(50).to(dtype), torch.randn(5, 50).to(dtype)
    reference, ours = torch.nn.Parameter(start.float()), torch.nn.Parameter(start.clone())
    adam, optimizer = torch.optim.AdamW([reference], lr=1e-6), sides.MasterAdamW([ours])
    for gradient in gradients:
        reference.grad, ours.grad = gradient.float(), gradient.clone()
        adam.step()
        optimizer.step()
        assert ours.grad is None
    held = optimizer.masters[0] if dtype == torch.bfloat16 else ours
    torch.testing.assert_close(held, reference, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(ours, held.to(dtype), rtol=0, atol=0)
