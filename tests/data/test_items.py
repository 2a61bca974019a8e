import random

import pytest
import torch

from clap_ds.data.broken import BrokenItemError
from clap_ds.data.items import choose_clip, clip_into
from tests.data.test_decoding import SECOND, encode, tone
from tests.data.test_features import FEATURES, npy


def test_what_a_row_holds_decides_what_is_read_of_an_item() -> None:
    sound, features = encode(tone(440, SECOND), SECOND, "WAV"), npy(FEATURES)
    item = {"__key__": "a", "wav": sound, "npy": features}
    rows = [torch.zeros(SECOND), torch.zeros(SECOND, dtype=torch.int16), torch.zeros(10, 4, dtype=torch.float16)]
    sizes = [clip_into(item, row, sample_rate=SECOND, rng=random.Random(0)) for row in rows]
    assert sizes == [len(sound), len(sound), len(features)]
    assert all(row.any() for row in rows)
    for row, formats, there in ((rows[0], r"flac, wav, ogg, mp3", "npy"), (rows[2], "npy", "wav")):
        with pytest.raises(BrokenItemError, match=rf"no audio \({formats}\) among its files: {there}"):
            clip_into({"__key__": "a", there: b""}, row, sample_rate=SECOND, rng=random.Random(0))


def test_missing_audio_names_what_is_there() -> None:
    assert choose_clip({"__key__": "a", "txt": b"x", "ogg": b"sound"}, "encoded") == b"sound"
    with pytest.raises(BrokenItemError, match=r"no audio .*: aac, txt"):
        choose_clip({"__key__": "a", "txt": b"x", "aac": b"sound"}, "encoded")
