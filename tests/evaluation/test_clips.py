"""Clips of a tar: what is found in it, what can't be used and why, and the audio itself."""

from pathlib import Path

import numpy as np

from clap_ds.config.model import load_preset
from clap_ds.evaluation.clips import list_clips, load_audio
from tests.data.tars import write_tar
from tests.evaluation.conftest import clip_members, npy

AUDIO = load_preset("micro").audio.model_copy(update={"num_samples": 4800})


def test_long_audio_and_features_are_cropped_in_their_middle(tmp_path: Path) -> None:
    ramp = np.linspace(-0.9, 0.9, 14401, dtype=np.float32)
    clips, _ = list_clips([str(write_tar(tmp_path / "a.tar", clip_members(0, {}, ramp)))])
    (waveform,) = load_audio(clips, AUDIO, num_workers=1)
    np.testing.assert_allclose(waveform, ramp[4800:9600], atol=1e-6)
    frames, bins = AUDIO.feature_shape
    ramp = np.arange(3 * frames * bins, dtype=np.float16).reshape(-1, bins)
    items = {"0": ramp[:frames], "1": ramp[: 3 * frames - 2], "2": ramp[:, 1:]}
    tar = write_tar(tmp_path / "b.tar", [(f"{name}.npy", npy(item)) for name, item in items.items()])
    exact, cropped, reason = load_audio(list_clips([str(tar)], "mel")[0], AUDIO, num_workers=0, kind="mel")
    np.testing.assert_array_equal(exact, ramp[:frames])
    np.testing.assert_array_equal(cropped, ramp[frames - 1 : 2 * frames - 1])
    assert "expected float16, at least 11 frames of 16 mel bins" in str(reason)
