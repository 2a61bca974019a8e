"""FLOPs of a step with checkpointed activations against torch's counter, and of packed captions by their real lengths."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from clap_ds.config.model import load_preset
from clap_ds.flop_count.analytic import TextLengths, forward_flops, recomputed_flops
from clap_ds.model.clap import ClapModel

TEXT_TOKENS = 12


def _step_flops(checkpointed: tuple[str, ...]) -> int:
    """Of one sample's forward and backward pass, as torch's counter sees them."""
    torch.manual_seed(0)
    config = load_preset("micro")
    # On a CPU the counter is blind to fused attention.
    model = ClapModel(config, attention="matmul", text_dropout=0.0, checkpoint_activations=checkpointed).train()
    batch = torch.rand(2, config.audio.num_samples), torch.full((2, TEXT_TOKENS), 5)
    with FlopCounterMode(display=False) as counter:
        audio, text, scale = model(*batch, None)
        (scale * audio * text).sum().backward()
    return counter.get_total_flops() // 2


@pytest.mark.parametrize("checkpointed", [("audio",), ("text",), ("audio", "text")])
def test_recomputed_flops_are_what_checkpointing_adds(checkpointed: tuple[str, ...]) -> None:
    added = _step_flops(checkpointed) - _step_flops(())
    expected = recomputed_flops(load_preset("micro"), TextLengths.fixed(TEXT_TOKENS), checkpointed)
    # torch stops recomputing a block once what its backward pass needs is there: the last product isn't done again.
    assert 0.75 * expected < added <= expected


def test_lengths_of_captions() -> None:
    lengths = TextLengths.of([2, 4, 4, 10])
    assert (lengths.mean, lengths.mean_square) == (5, (4 + 16 + 16 + 100) / 4)
    config = load_preset("micro")
    assert forward_flops(config, lengths, "model") < forward_flops(config, TextLengths.fixed(10), "model")
