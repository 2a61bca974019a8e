import random

import pytest
import torch

from clap_ds.config.model import load_preset
from clap_ds.data.broken import BrokenItemError
from clap_ds.data.items import choose_clip, read_clip
from tests.data.test_decoding import SECOND, encode, tone
from tests.data.test_features import FEATURES, npy

MICRO = load_preset("micro").audio


def test_the_kind_decides_what_is_read_of_an_item() -> None:
    sound, features = encode(tone(440, SECOND), SECOND, "WAV"), npy(FEATURES)
    item = {"__key__": "a", "mp3": b"", "wav": sound, "npy": features}
    assert (choose_clip(item, "encoded"), choose_clip(item, "waveform")) == (sound, sound)
    assert choose_clip(item, "mel") == features
    for encoded, row in ((sound, torch.zeros(SECOND)), (features, torch.zeros(10, 4, dtype=torch.float16))):
        read_clip(encoded, row, audio=MICRO, rng=random.Random(0))
        assert row.any()
    with pytest.raises(BrokenItemError, match=r"no audio \(flac, wav, ogg, mp3\) among its files: npy"):
        choose_clip({"__key__": "a", "npy": b""}, "encoded")
    with pytest.raises(BrokenItemError, match=r"no audio \(npy\) among its files: aac, wav"):
        choose_clip({"__key__": "a", "wav": b"", "aac": b""}, "mel")
