"""Pauses add time where they say and change no number."""

import pytest
import torch

from benchmarks import paced_bench
from clap_ds.config.model import load_preset
from clap_ds.model.clap import ClapModel


def test_pauses_are_shared_out_and_change_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(paced_bench.time, "sleep", slept.append)
    config = load_preset("micro")
    torch.manual_seed(0)
    model = ClapModel(config, drop_path=0, text_dropout=0, spec_augment=False)
    batch = torch.rand(2, config.audio.num_samples), torch.randint(3, config.text.vocab_size, (2, 5)), None

    def gradients() -> dict[str, torch.Tensor]:
        model.zero_grad()
        audio, text, scale = model(*batch)
        (scale * (audio @ text.T).square().sum()).backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    expected = gradients()
    assert slept == []
    paced_bench.pace(model, 3.0)
    audio, text, _ = model(*batch)
    # A third of the pause, half in each tower, evenly over its blocks.
    audio_blocks, text_blocks = sum(config.audio.depths), config.text.num_layers
    assert slept == pytest.approx([0.5 / audio_blocks] * audio_blocks + [0.5 / text_blocks] * text_blocks)
    slept.clear()
    (audio * text).sum().backward()
    assert sum(slept) == pytest.approx(2.0)
    assert len(slept) == audio_blocks + text_blocks
    found = gradients()
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=0)
