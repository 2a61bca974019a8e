"""Test the log-mel front end; `test_clap.py` compares it with HF's feature extractor."""

import pytest
import torch

from clap_ds.config.model import load_preset
from clap_ds.model.mel import LogMel
from tests.model.reference_clap import clips


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
