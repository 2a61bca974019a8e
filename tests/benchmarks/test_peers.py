"""Peers and the cost table on the micro preset: the same function on both sides, honest ratios, every FLOP accounted for."""

import json
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import deepspeed
import pytest
import torch

from benchmarks import cost_table, peers, products, sides
from clap_ds.config.model import load_preset
from clap_ds.model.mel import LogMel
from tests.kernels import needs_kernels

SMALL = ["--preset", "micro", "--micro_batch", "3", "--text_tokens", "12", "--rounds", "2"]


@pytest.fixture(autouse=True)
def on_cpu() -> Iterator[None]:
    """The commands join a group of one rank; nothing stays of it."""
    with mock.patch.dict(os.environ, DS_ACCELERATOR="cpu"):
        yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
        deepspeed.comm.comm.cdb = None


@pytest.mark.parametrize("text", ["padded", "packed"])
def test_both_sides_compute_the_same_loss(tmp_path: Path, text: str) -> None:
    path = tmp_path / "peers.md"
    options = ["--precision", "fp32", "--text", text, "--caption_lengths", "3", "9", "--output", str(path)]
    assert peers.main([*SMALL, *options]) == 0
    (result,) = json.loads(path.with_suffix(".json").read_text())
    assert result["loss_difference"] < 1e-5
    assert set(result["speed_ratio"]) == {"forward", "backward", "optimizer", "step"}
    assert "| ours, none |" in " ".join(path.read_text().split())


def test_every_way_of_training_in_bf16_computes_the_same_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "limit_s", partial(products.limit_s, seconds_each=0.0))
    monkeypatch.setattr(products, "memory_rate", partial(products.memory_rate, 2**16))
    path = tmp_path / "peers.md"
    assert peers.main([*SMALL, "--rounds", "1", "--precision", "bf16", "--output", str(path)]) == 0
    (result,) = json.loads(path.with_suffix(".json").read_text())
    losses = result["first_loss"]
    assert {"ours, engine", "ours, bare", "open_clip's loop", "LAION-CLAP's loop"} <= losses.keys()
    assert max(losses.values()) - min(losses.values()) < 0.02 * min(losses.values())
    limit = result["limit"]
    assert limit["limit_s"] == limit["products_s"] + limit["adamw_s"]
    assert f"Reached: {result['ours']} " in path.read_text()


def test_laions_front_end_gives_the_same_features() -> None:
    config = load_preset("micro").audio
    waveforms = torch.randn(2, config.num_samples) * 0.1
    torch.testing.assert_close(sides.ConvolutionMel(config)(waveforms), LogMel(config)(waveforms), rtol=1e-3, atol=1e-3)


def test_products_are_all_of_a_step(tmp_path: Path) -> None:
    path = tmp_path / "products.md"
    small = ["--preset", "micro", "--text_tokens", "12", "--micro_batches", "2", "--seconds", "0"]
    products.main([*small, "--output", str(path)])
    (rows,) = json.loads(path.with_suffix(".json").read_text()).values()
    config = load_preset("micro")
    of_blocks = 4 * sum(config.audio.depths)  # qkv, output, and two of the MLP
    of_merging = config.audio.num_stages - 1
    of_text = 6 * config.text.num_layers
    assert sum(row["count"] for row in rows) >= of_blocks + of_merging + of_text
    assert all(row["output_onednn"] > 0 for row in rows)


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
@pytest.mark.parametrize("natively", [False, pytest.param(True, marks=needs_kernels)])
def test_masters_step_as_adamw_in_fp32(natively: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    start, gradients = torch.randn(50).to(dtype), torch.randn(5, 50).to(dtype)
    reference, ours = torch.nn.Parameter(start.float()), torch.nn.Parameter(start.clone())
    adam, optimizer = torch.optim.AdamW([reference], lr=1e-6), sides.MasterAdamW([ours], natively=natively)
    for gradient in gradients:
        reference.grad, ours.grad = gradient.float(), gradient.clone()
        adam.step()
        optimizer.step()
        assert ours.grad is None
    held = optimizer.masters[0] if dtype == torch.bfloat16 else ours
    torch.testing.assert_close(held, reference, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(ours, held.to(dtype), rtol=0, atol=0)


def test_the_cost_table_accounts_for_the_whole_step(tmp_path: Path) -> None:
    """Oracle of the text layers' FLOPs: the analytic count of their matrix products, three times over for a step."""
    path = tmp_path / "cost.md"
    cost_table.main([*SMALL, "--output", str(path)])
    assert "audio stage 1" in path.read_text()
    rows: dict[str, Any] = {row["part"]: row for row in json.loads(path.with_suffix(".json").read_text())}
    whole = rows.pop("whole step")
    assert sum(row["share"] for row in rows.values()) >= 0.99
    assert sum(row["gflops"] for row in rows.values()) == pytest.approx(whole["gflops"])
    text = load_preset("micro").text
    qkv = 3 * text.hidden_size**2
    rest = text.hidden_size**2 + 2 * text.hidden_size * text.intermediate_size
    # The last layer takes only each caption's first token past its attention.
    linears = 2 * 3 * (12 * text.num_layers * (qkv + rest) - 11 * rest)
    attention = 2 * 3 * text.num_layers * 2 * 12 * 12 * text.hidden_size
    assert rows["text layers"]["gflops"] == pytest.approx(3 * (linears + attention) / 1e9, rel=1e-9)
