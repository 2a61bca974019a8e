"""Turn an item of a tar into a caption and a row of a batch. Unusable items raise
BrokenItemError."""

import functools
import io
import random
import tokenize
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from clap_ds.config.model import AudioConfig
from clap_ds.config.schema import CAPTION_KEY
from clap_ds.data.decoding import (
    AUDIO_FORMATS,
    BrokenItemError,
    Encoded,
    decode_audio,
    decode_part,
    repeat,
)
from clap_ds.data.shard_io import Kind
from clap_ds.model.mel import LogMel
from clap_ds.model.patch_embed import is_longer_than_clip
from clap_ds.utils.files import parse_json

FEATURES = "npy"
CLIP_FORMATS = (*AUDIO_FORMATS, FEATURES)
CAPTION_FORMATS = ("txt", "json")
MAX_FUSED_CLIPS = 10
"""Files for feature fusion that are longer are first cropped to this many clip lengths."""
# beyond the rounding of float16
_NUDGE_DB = 0.5


# Frozen, because several workers and ranks report the same item, which counts once.
@dataclass(frozen=True, slots=True)
class SkippedSample:
    """The name of an unusable item, or a tar's path, and the reason."""

    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"


def captions_of(members: Mapping[str, Any], key: str = CAPTION_KEY) -> list[str]:
    """Return an item's captions by the first name of `key` that isn't blank: a field of its `json`,
    or its `txt`."""
    values = values_by_name(members, key)
    for name in key.split(";"):
        value = values.get(name)
        texts = value if isinstance(value, list) else [value]
        captions = [text.strip() for text in texts if isinstance(text, str) and text.strip()]
        if captions:
            return captions
    if any(isinstance(value, str) for value in values.values()):
        raise BrokenItemError("empty caption")
    raise BrokenItemError(
        f"no caption: expected text, or a list of texts, in {key.replace(';', ' or ')}, "
        f"among its files: {_list_files(members)}"
    )


def values_by_name(members: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return what an item has of the names of `key` and of the captions' `CAPTION_KEY`, in this
    order."""
    try:
        # A number, which has no fields, if there is no json.
        content = parse_json(members.get("json", b"0"), allow_nan=True)
        fields = content if isinstance(content, dict) else {}
        if "txt" in members:
            fields["txt"] = members["txt"].decode("utf-8-sig")
    except ValueError as error:
        raise BrokenItemError(f"json or txt can't be read: {error}") from None
    return {name: fields[name] for name in f"{key};{CAPTION_KEY}".split(";") if fields.get(name)}


def choose_clip(members: Mapping[str, Any], kind: Kind) -> Any:
    """Return the first of a kind's formats in `members` (extension → content)."""
    formats = (FEATURES,) if kind == "mel" else AUDIO_FORMATS
    for extension in formats:
        if extension in members:
            return members[extension]
    raise BrokenItemError(
        f"no audio ({', '.join(formats)}) among its files: {_list_files(members)}"
    )


def _list_files(members: Mapping[str, Any]) -> str:
    # Names that start with "__" are WebDataset's own.
    names = ", ".join(sorted(name for name in members if not name.startswith("__"))) or "none"
    return f"{names} (WebDataset splits names at the first dot)" if "." in names else names


def read_clip(encoded: Encoded, row: Tensor, *, audio: AudioConfig, rng: random.Random) -> None:
    """Read a clip with `decode_audio`, `read_mel` or `read_fused` if `row` has 1, 2 or 3
    dimensions."""
    if row.ndim == 2:
        assert isinstance(encoded, bytes)
        read_mel(encoded, row, rng=rng)
    elif row.ndim == 3:
        read_fused(encoded, row, audio=audio, rng=rng)
    else:
        decode_audio(encoded, row, sample_rate=audio.sample_rate, rng=rng)


def read_mel(encoded: bytes, row: Tensor, *, rng: random.Random) -> None:
    """Write prepared features from a NumPy file to `row`, (num_frames, mel_bins) float16, cropped
    at random by `rng`."""
    num_frames, mel_bins = row.shape
    try:
        features = np.lib.format.read_array(io.BytesIO(encoded))
    # from NumPy's parser
    except (ValueError, TypeError, SyntaxError, MemoryError, tokenize.TokenError) as error:
        raise BrokenItemError(f"features aren't a NumPy file: {error}") from None
    is_usable = features.dtype == np.float16 and features.ndim == 2
    if not is_usable or len(features) < num_frames or features.shape[1] != mel_bins:
        raise BrokenItemError(
            f"features are {features.dtype} of shape {features.shape}, expected float16, "
            f"at least {num_frames} frames of {mel_bins} mel bins"
        )
    start = rng.randint(0, len(features) - num_frames)
    target = row.numpy()
    target[:] = features[start : start + num_frames]
    # Integers compare faster. Without and with a sign, the largest exponent is above every finite
    # number.
    if target.view(np.int16).max() >= 0x7C00 or target.view(np.uint16).max() >= 0xFC00:
        raise BrokenItemError("features hold NaN or infinite values")


def read_fused(encoded: Encoded, row: Tensor, *, audio: AudioConfig, rng: random.Random) -> None:
    """Write the input of feature-fusion models to `row`, (4, num_frames, mel_bins), like
    `transformers.ClapFeatureExtractor`.

    It is the whole file shrunk to `num_frames`, and a random crop from each third of the possible
    positions. If the file isn't longer than a clip, all four are equal.
    """
    samples = torch.empty(MAX_FUSED_CLIPS * audio.num_samples)
    num_samples = decode_part(encoded, samples, sample_rate=audio.sample_rate, rng=rng)
    if num_samples < audio.num_samples:
        repeat(samples[: audio.num_samples].numpy(), num_samples)
        num_samples = audio.num_samples
    log_mel = _log_mel(audio.model_dump_json())
    log_mel_TF = log_mel.of_any_length(samples[None, :num_samples])[0]
    num_positions = len(log_mel_TF) - audio.num_frames + 1
    if num_positions == 1:
        row[:] = log_mel_TF
        return
    # (1, 1, T, F) → (1, 1, num_frames, F)
    row[0] = F.interpolate(log_mel_TF[None, None], audio.feature_shape, mode="bilinear")[0, 0]
    for crop, positions in zip(row[1:], np.array_split(range(num_positions), 3), strict=True):
        # With fewer than three positions, some thirds have none.
        start = rng.randint(int(positions[0]), int(positions[-1])) if len(positions) else 0
        crop[:] = log_mel_TF[start : start + audio.num_frames]
    # For a steady tone all four are equal, which would mean a short file.
    if not is_longer_than_clip(row[None]):
        row[0, 0, 0] += _NUDGE_DB


@functools.lru_cache(maxsize=2)
def _log_mel(config: str) -> LogMel:
    return LogMel(AudioConfig.model_validate_json(config))
