"""The peers benchmark on the micro preset: the same function on both sides, honest ratios, disagreement noticed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import cost_table, peers
from clap_ds.config.model import load_preset
from tests.kernels import needs_amx

SMALL = ["--preset", "micro", "--micro-batch", "3", "--text-tokens", "12", "--rounds", "2", "--device", "cpu"]


@pytest.mark.parametrize("text", ["padded", "packed"])
def test_both_sides_compute_the_same_loss_for_several_steps(tmp_path: Path, text: str) -> None:
    path = tmp_path / "peers.json"
    arguments = [*SMALL, "--precision", "fp32", "--text", text, "--caption-lengths", "3", "9", "--json", str(path)]
    assert peers.main(arguments) == 0
    (result,) = json.loads(path.read_text())
    assert result["loss_difference"] < 1e-5
    assert set(result["speed_ratio"]) == {"forward", "backward", "optimizer", "step"}
    for ratio in result["speed_ratio"].values():
        assert ratio["low"] <= ratio["median"] <= ratio["high"]


def test_a_peer_with_other_weights_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = peers.to_transformers
    monkeypatch.setattr(
        peers, "to_transformers", lambda state: {name: tensor * 1.5 for name, tensor in honest(state).items()}
    )
    assert peers.main([*SMALL, "--precision", "fp32"]) == 1


def test_ratios_are_the_peers_time_over_ours_round_by_round() -> None:
    config = load_preset("micro")
    state = peers.initial_state(config)
    device = torch.device("cpu")
    ours = peers.our_side("ours", state, config, device, low="none", noise=0.0)
    peer = peers.peer_side("peer", state, config, device, low="none", noise=0.0)
    ours.seconds["step"], peer.seconds["step"] = [1.0, 2.0, 4.0], [2.0, 4.0, 6.0]
    ours.seconds["front_end"], peer.seconds["front_end"] = [0.0] * 3, [1.0] * 3
    ours.seconds["forward"], peer.seconds["forward"] = [1.0] * 3, [2.0] * 3
    assert peers.ratios(ours, peer, "step").median == 2.0
    assert peers.ratios(ours, peer, "forward").median == 3.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "optimizer_class",
    [
        peers.MasterAdamW,
        pytest.param(
            peers.NativeMasterAdamW,
            marks=needs_amx,
        ),
    ],
)
def test_masters_step_as_adamw_in_fp32(optimizer_class: type[peers.MasterAdamW], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    start, gradients = torch.randn(50).to(dtype), torch.randn(5, 50).to(dtype)
    reference = torch.nn.Parameter(start.float())
    adam = torch.optim.AdamW([reference], lr=1e-6)
    ours = torch.nn.Parameter(start.clone())
    optimizer = optimizer_class([ours])
    for gradient in gradients:
        reference.grad, ours.grad = gradient.float(), gradient.clone()
        adam.step()
        optimizer.step()
        assert ours.grad is None
    held = optimizer.masters[0] if dtype == torch.bfloat16 else ours
    torch.testing.assert_close(held, reference, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(ours, held.to(dtype), rtol=0, atol=0)


def test_the_cost_table_accounts_for_the_whole_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "cost.md"
    assert cost_table.main([*SMALL, "--output", str(path)]) == 0
    lines = [line.split("|")[1:-1] for line in path.read_text().splitlines() if line.startswith("| ")][1:]
    shares = {row[0].strip(): row[5].strip() for row in lines}
    assert "audio stage 1" in shares
    assert "text layers" in shares
    assert sum(float(share.rstrip("%")) for part, share in shares.items() if part != "whole step") >= 99.0


def test_matrix_products_of_the_parts_add_up_to_the_models() -> None:
    """Oracle: the analytic count of the same forward pass, three times over for a step."""
    arguments = peers.parse([*SMALL])
    arguments.attention = "auto"
    costs, _ = cost_table.measure_step(arguments, load_preset("micro"), torch.device("cpu"))
    by_part = {cost.part: cost.flops for cost in costs}
    text = load_preset("micro").text
    qkv = 3 * text.hidden_size**2
    rest = text.hidden_size**2 + 2 * text.hidden_size * text.intermediate_size
    # The last layer takes only each caption's first token past its attention.
    linears = 2 * 3 * (12 * text.num_layers * (qkv + rest) - 11 * rest)
    attention = 2 * 3 * text.num_layers * 2 * 12 * 12 * text.hidden_size
    assert by_part["text layers"] == 3 * (linears + attention)
