import math

import pytest
import torch

from clap_ds.data.resampling import Resampler
from clap_ds.model.torchaudio_compat import torchaudio


@pytest.mark.parametrize(
    ("from_rate", "to_rate"),
    [(44100, 48000), (8000, 48000), (96000, 48000), (999, 1000), (48000, 44100), (1, 500)],
)
def test_the_samples_are_torchaudios(from_rate: int, to_rate: int) -> None:
    torch.manual_seed(0)
    ours, theirs = Resampler.of(from_rate, to_rate), torchaudio.transforms.Resample(from_rate, to_rate)
    for length in (1, 2, 146, 147, 148, 5000):
        waveform = torch.rand(length) * 2 - 1
        torch.testing.assert_close(ours(waveform), theirs(waveform), rtol=0, atol=1e-6)
    channels = torch.rand(2, 3, 100)
    assert ours(channels).shape == (2, 3, math.ceil(100 * to_rate / from_rate))
    torch.testing.assert_close(ours(channels), theirs(channels), rtol=0, atol=1e-6)
