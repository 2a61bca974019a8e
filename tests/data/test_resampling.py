import pytest
import torch

from clap_ds.data.resampling import resample, resample_blocks, resampling_ratio
from clap_ds.model.torchaudio_compat import torchaudio


@pytest.mark.parametrize("rates", [(44100, 48000), (96000, 48000), (999, 1000), (1, 500)])
def test_the_samples_are_torchaudios(rates: tuple[int, int]) -> None:
    theirs = torchaudio.transforms.Resample(*rates)
    for length in (1, 2, 146, 147, 148, 5000):
        waveform = torch.rand(length, generator=torch.Generator().manual_seed(0)) * 2 - 1
        torch.testing.assert_close(resample(waveform, resampling_ratio(*rates)), theirs(waveform), rtol=0, atol=1e-6)


@pytest.mark.parametrize("rates", [(44100, 48000), (999, 1000)])
@pytest.mark.parametrize("size", [1, 146, 5000])
def test_blocks_put_together_are_the_whole(rates: tuple[int, int], size: int) -> None:
    waveform, ratio = torch.rand(4321, generator=torch.Generator().manual_seed(0)) * 2 - 1, resampling_ratio(*rates)
    found = torch.cat([*resample_blocks(waveform.split(size), ratio)])
    torch.testing.assert_close(found, resample(waveform, ratio), rtol=0, atol=1e-6)  # sums of the same in another order
