"""One item of a shard: which of its members is its clip, and how that is read to the row of a batch."""

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
    """Choose an item's member (extension → content) in the first format of a kind; BrokenItemError where none is there."""
    formats = (FEATURES,) if kind == "mel" else AUDIO_FORMATS
    for extension in formats:
        if extension in members:
            return members[extension]
    found = sorted(name for name in members if not name.startswith("__"))
    raise BrokenItemError(f"no audio ({', '.join(formats)}) among its files: {', '.join(found) or 'none'}")


def read_clip(encoded: Encoded, row: Tensor, *, audio: AudioConfig, rng: random.Random) -> None:
    """Write a clip to `row`, by its shape: as `read_mel`, `read_fused` or `decode_audio` does. Raises BrokenItemError."""
    if row.ndim == 2:
        assert isinstance(encoded, bytes)
        read_mel(encoded, row, rng=rng)
    elif row.ndim == 3:
        read_fused(encoded, row, audio=audio, rng=rng)
    else:
        decode_audio(encoded, row, sample_rate=audio.sample_rate, rng=rng)
