"""Compute the input of feature-fusion models from files of any length, like `transformers.ClapFeatureExtractor`."""

from __future__ import annotations

import functools
import random

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from clap_ds.config.model import AudioConfig
from clap_ds.data.decoding import Encoded, decode_part, repeat
from clap_ds.model.mel import LogMel
from clap_ds.model.patch_embed import longer_rows

MOST_CLIPS = 10
"""Longer files are first cropped to this many clip lengths."""
_NUDGE_DB = 0.5  # beyond the rounding of float16


def read_fused(encoded: Encoded, row: Tensor, *, audio: AudioConfig, rng: random.Random) -> None:
    """Write a file's features to `row`, (4, num_frames, mel_bins): the whole file shrunk to `num_frames`, and a random
    crop from each third of the possible positions. If the file isn't longer than a clip, all four are equal.
    Raises BrokenItemError like `decode_audio`."""
    samples = torch.empty(MOST_CLIPS * audio.num_samples)
    found = decode_part(encoded, samples, sample_rate=audio.sample_rate, rng=rng)
    if found < audio.num_samples:
        repeat(samples[: audio.num_samples].numpy(), found)
    log_mel_TF = _front_end(audio.model_dump_json()).of_any_length(samples[None, : max(found, audio.num_samples)])[0]
    num_places = len(log_mel_TF) - audio.num_frames + 1
    if num_places == 1:
        row[:] = log_mel_TF
        return
    row[0] = F.interpolate(log_mel_TF[None, None], audio.feature_shape, mode="bilinear")[0, 0]
    for part, places in zip(row[1:], np.array_split(range(num_places), 3), strict=True):
        start = rng.randint(int(places[0]), int(places[-1])) if len(places) else 0
        part[:] = log_mel_TF[start : start + audio.num_frames]
    if not longer_rows(row[None]):  # for a steady tone, all four are equal
        row[0, 0, 0] += _NUDGE_DB


@functools.lru_cache(maxsize=2)
def _front_end(sizes: str) -> LogMel:
    return LogMel(AudioConfig.model_validate_json(sizes))
