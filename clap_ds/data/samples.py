"""Choose the clip among an item's members and read it into a row of a batch."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from clap_ds.config.model import AudioConfig
from clap_ds.data.broken import BrokenItemError
from clap_ds.data.decoding import AUDIO_FORMATS, Encoded, decode_audio
from clap_ds.data.feature_fusion import read_fused
from clap_ds.data.features import FEATURES, read_mel
from clap_ds.data.front_end import Kind

CLIP_FORMATS = (*AUDIO_FORMATS, FEATURES)


def choose_clip(members: Mapping[str, Any], kind: Kind) -> Any:
    """Return the first of a kind's formats in `members` (extension → content). Raises BrokenItemError for none."""
    formats = (FEATURES,) if kind == "mel" else AUDIO_FORMATS
    for extension in formats:
        if extension in members:
            return members[extension]
    found = sorted(name for name in members if not name.startswith("__"))
    raise BrokenItemError(f"no audio ({', '.join(formats)}) among its files: {', '.join(found) or 'none'}")


def read_clip(encoded: Encoded, row: Tensor, *, audio: AudioConfig, rng: random.Random) -> None:
    """Read a clip with `decode_audio`, `read_mel` or `read_fused` if `row` has 1, 2 or 3 dimensions. Raises BrokenItemError."""
    if row.ndim == 2:
        assert isinstance(encoded, bytes)
        read_mel(encoded, row, rng=rng)
    elif row.ndim == 3:
        read_fused(encoded, row, audio=audio, rng=rng)
    else:
        decode_audio(encoded, row, sample_rate=audio.sample_rate, rng=rng)
