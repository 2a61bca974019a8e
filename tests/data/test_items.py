import random

import pytest
import torch

from clap_ds.data.broken import BrokenItemError
from clap_ds.data.items import clip_into
from tests.data.test_decoding import SECOND, encode, tone
from tests.data.test_features import FEATURES, npy


def test_what_a_row_holds_decides_what_is_read_of_an_item() -> None:
    sound, features = encode(tone(440, SECOND), SECOND, "WAV"), npy(FEATURES)
    item = {"__key__": "a", "wav": sound, "npy": features}
    rows = [torch.zeros(SECOND), torch.zeros(SECOND, dtype=torch.int16), torch.zeros(10, 4, dtype=torch.float16)]
    sizes = [clip_into(item, row, sample_rate=SECOND, rng=random.Random(0)) for row in rows]
    assert sizes == [len(sound), len(sound), len(features)]
    assert all(row.any() for row in rows)
    for row, formats, there in ((rows[0], "flac, wav, ogg, mp3", "npy"), (rows[2], "npy", "aac, wav")):
        with pytest.raises(BrokenItemError, match=rf"no audio \({formats}\) among its files: {there}"):
            clip_into(
                dict.fromkeys(["__key__", *there.split(", ")], b""), row, sample_rate=SECOND, rng=random.Random(0)
            )
