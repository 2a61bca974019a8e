"""Log-mel features that were prepared are read to what the model takes."""

from __future__ import annotations

import functools
import io
import math
import random
import tokenize
from typing import Any

import numpy as np
from torch import Tensor

from clap_ds.data.broken import BrokenItemError

FEATURES = "npy"


def read_mel(encoded: bytes, row: Tensor, *, rng: random.Random) -> None:
    """Write a clip's features to `row`, (num_frames, mel_bins) float16, from a NumPy file of at least as many frames, cropped
    at a place drawn from `rng`. BrokenItemError where it is of another dtype or shape, or holds NaN or infinite features."""
    num_frames, mel_bins = row.shape
    size = 10 + int.from_bytes(encoded[8:10], "little")  # of version 1.0, which has every array of few dimensions
    shape, dtype, in_columns = _numpy_header(encoded[:size])
    if dtype != np.float16 or in_columns or len(shape) != 2 or shape[1] != mel_bins or shape[0] < num_frames:
        wanted = f"float16, at least {num_frames} frames of {mel_bins} mel bins, by rows"
        raise BrokenItemError(f"features are {dtype} of shape {shape}, expected {wanted}")
    if len(encoded) < size + 2 * math.prod(shape):
        raise BrokenItemError(f"features break off: {len(encoded)} of {size + 2 * math.prod(shape)} bytes are there")
    start = rng.randint(0, shape[0] - num_frames)
    target = row.numpy()
    target[:] = np.frombuffer(encoded, np.float16, target.size, size + 2 * start * mel_bins).reshape(target.shape)
    # As integers, which compare sooner: the largest exponent, without and with a sign, is beyond everything finite.
    if target.view(np.int16).max() >= 0x7C00 or target.view(np.uint16).max() >= 0xFC00:
        raise BrokenItemError("features hold NaN or infinite values")


@functools.lru_cache(maxsize=16)  # a set's files have the same few
def _numpy_header(header: bytes) -> tuple[tuple[int, ...], np.dtype[Any], bool]:
    """Read shape, dtype and whether it is in Fortran's order."""
    stream = io.BytesIO(header)
    try:
        np.lib.format.read_magic(stream)
        shape, in_columns, dtype = np.lib.format.read_array_header_1_0(stream)
    except (ValueError, TypeError, SyntaxError, tokenize.TokenError):  # what NumPy's parser makes of damage
        raise BrokenItemError("features aren't a NumPy file of version 1.0") from None
    return shape, dtype, in_columns
