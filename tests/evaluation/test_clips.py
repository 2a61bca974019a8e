"""Test the audio of clips."""

from pathlib import Path

import numpy as np

from clap_ds.config.model import load_preset
from clap_ds.evaluation.clips import list_clips, load_audio
from tests.data.tars import write_tar
from tests.evaluation.conftest import clip_members

AUDIO = load_preset("micro").audio.model_copy(update={"num_samples": 4800})


def test_long_audio_is_cropped_in_its_middle(tmp_path: Path) -> None:
    ramp = np.linspace(-0.9, 0.9, 14401, dtype=np.float32)
    clips, _ = list_clips([str(write_tar(tmp_path / "a.tar", clip_members(0, {}, ramp)))])
    (waveform,) = load_audio(clips, AUDIO, num_workers=1)
    np.testing.assert_allclose(waveform, ramp[4800:9600], atol=1e-6)
