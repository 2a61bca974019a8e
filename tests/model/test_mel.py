"""The log-mel front end against a spectrogram written out from its definition; `test_clap.py` has HF's feature extractor."""

import numpy as np
import pytest
import torch

from clap_ds.config.model import load_preset
from clap_ds.model.mel import LogMel
from tests.model.reference_clap import clips

CONFIG = load_preset("htsat_tiny_roberta_base").audio


def slaney_hz(mel: np.ndarray) -> np.ndarray:
    """Slaney's mel scale: linear to 1000 Hz at mel 15, then a factor of 6.4 every 27 mels."""
    return np.where(mel < 15, mel * 200 / 3, 1000 * 6.4 ** ((mel - 15) / 27))


def filter_bank() -> np.ndarray:
    """(64, 513) triangles of area 1 (Hz) with corners equally spaced in mel from 50 to 14000 Hz."""
    low, high = 50 * 3 / 200, 15 + 27 * np.log(14) / np.log(6.4)
    corners = slaney_hz(np.linspace(low, high, 66))
    frequencies = np.arange(513) * 48000 / 1024
    left, centre, right = corners[:-2, None], corners[1:-1, None], corners[2:, None]
    triangles = np.minimum((frequencies - left) / (centre - left), (right - frequencies) / (right - centre))
    return np.maximum(triangles, 0) * 2 / (right - left)


def log_mel(waveform: np.ndarray) -> np.ndarray:
    """(frames, 64) dB in float64, from the definition."""
    padded = np.pad(waveform.astype(np.float64), 512, mode="reflect")
    hann = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(1024) / 1024)
    frames = np.lib.stride_tricks.sliding_window_view(padded, 1024)[::480]
    power = np.abs(np.fft.rfft(frames * hann)) ** 2
    return 10 * np.log10(np.maximum(power @ filter_bank().T, 1e-10))


def test_agrees_with_the_definition() -> None:
    waveforms = clips(2, CONFIG.num_samples, seed=3)
    ours = LogMel(CONFIG)(waveforms)
    expected = np.stack([log_mel(waveform) for waveform in waveforms.numpy()])
    assert ours.shape == expected.shape == (2, 1001, 64)
    assert expected.min() == -100, "the clips must reach the floor"
    assert expected.max() - expected.min() > 100
    # fp32: 0.01 dB is 0.2 % of power, of bins 100 dB under the frame's loudest.
    np.testing.assert_allclose(ours.numpy(), expected, atol=1e-2)
    assert np.abs(ours.numpy() - expected).mean() < 1e-4


def test_stays_in_fp32_refuses_other_lengths_and_holds_nothing_that_checkpoints_would_carry() -> None:
    config = load_preset("micro").audio
    front_end, waveforms = LogMel(config), clips(2, config.num_samples, seed=0)
    expected = front_end(waveforms)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(front_end(waveforms), expected)
    assert torch.equal(front_end.to(torch.bfloat16)(waveforms), expected)
    assert (front_end(torch.zeros(1, config.num_samples)) == -100).all()
    with pytest.raises(ValueError, match=r"\(2, 47999\).*48000"):
        front_end(torch.zeros(2, 47999))
    assert front_end.state_dict() == {}
