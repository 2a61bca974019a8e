"""Compare the spectrograms that GPUs and CPUs compute with different operations."""

import pytest
import torch
from torch import Tensor

from clap_ds.config.model import load_preset
from clap_ds.model.mel import ALIGNED, LogMel


@pytest.mark.parametrize("preset", ["micro", "clap_htsat_tiny_roberta_base_fused"])
@pytest.mark.parametrize("dtype", [torch.int16, torch.float64])
def test_operations_of_gpus_compute_the_same(monkeypatch, preset, dtype):
    """Check in fp64, as a product over fewer frequencies rounds differently, with noise, which has
    power up to fmax."""
    config = load_preset(preset).audio
    mel = LogMel(config).double()
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(2, config.num_samples, generator=generator, dtype=torch.float64)
    noise = noise.clamp(-4, 4) / 4
    waveforms = (noise * 32767).to(dtype) if dtype == torch.int16 else noise
    expected = mel(waveforms)
    monkeypatch.setattr(Tensor, "is_cuda", True)
    torch.testing.assert_close(mel(waveforms), expected, rtol=0, atol=1e-9)
    mel.num_used -= 2 * ALIGNED
    assert (mel(waveforms) - expected).abs().max() > 1, "frequencies with filters are left out"
