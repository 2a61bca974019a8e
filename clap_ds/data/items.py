"""One item of a shard: which of its members is its clip, and how that is read to the row of a batch.

Reading tars is left to `tar_items`, dividing and collating their items to `shard_list` and `shard_reader`; members are read by
`decoding`, `features` and `captions`.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from clap_ds.data.broken import BrokenItemError
from clap_ds.data.decoding import AUDIO_FORMATS, Encoded, decode_audio
from clap_ds.data.features import FEATURES, read_mel
from clap_ds.data.front_end import Kind

CLIP_FORMATS = (*AUDIO_FORMATS, FEATURES)


def choose_clip(members: Mapping[str, Any], kind: Kind) -> Any:
    """What an item's members (extension → content) have in the first format of a kind; BrokenItemError where none is there."""
    formats = (FEATURES,) if kind == "mel" else AUDIO_FORMATS
    for extension in formats:
        if extension in members:
            return members[extension]
    found = sorted(name for name in members if not name.startswith("__"))
    raise BrokenItemError(f"no audio ({', '.join(formats)}) among its files: {', '.join(found) or 'none'}")


def read_clip(encoded: Encoded, row: Tensor, *, sample_rate: int, rng: random.Random) -> None:
    """Write a clip to `row`: as `read_mel` does to float16, or else as `decode_audio` does. Raises BrokenItemError."""
    if row.dtype == torch.float16:
        read_mel(encoded, row, rng=rng)
    else:
        decode_audio(encoded, row, sample_rate=sample_rate, rng=rng)
