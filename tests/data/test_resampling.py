import pytest
import torch

from clap_ds.data.resampling import resample, resampling_ratio
from clap_ds.model.torchaudio_compat import torchaudio


@pytest.mark.parametrize("rates", [(44100, 48000), (96000, 48000), (999, 1000), (1, 500)])
def test_the_samples_are_torchaudios(rates: tuple[int, int]) -> None:
    theirs = torchaudio.transforms.Resample(*rates)
    for length in (1, 2, 146, 147, 148, 5000):
        waveform = torch.rand(length, generator=torch.Generator().manual_seed(0)) * 2 - 1
        torch.testing.assert_close(resample(waveform, resampling_ratio(*rates)), theirs(waveform), rtol=0, atol=1e-6)
