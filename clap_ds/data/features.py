"""Log-mel features that were prepared are read to what the model takes."""

from __future__ import annotations

import io
import random
import tokenize

import numpy as np
from torch import Tensor

from clap_ds.data.broken import BrokenItemError

FEATURES = "npy"


def read_mel(encoded: bytes, row: Tensor, *, rng: random.Random) -> None:
    """Write a clip's features to `row`, (num_frames, mel_bins) float16, from a NumPy file of at least as many frames, cropped
    at a place drawn from `rng`. BrokenItemError where it is of another dtype or shape, or holds NaN or infinite features."""
    num_frames, mel_bins = row.shape
    try:
        features = np.lib.format.read_array(io.BytesIO(encoded))
    except (ValueError, TypeError, SyntaxError, tokenize.TokenError) as error:  # what NumPy's parser makes of damage
        raise BrokenItemError(f"features aren't a NumPy file: {error}") from None
    if (
        features.dtype != np.float16
        or features.ndim != 2
        or features.shape[1] != mel_bins
        or len(features) < num_frames
    ):
        wanted = f"float16, at least {num_frames} frames of {mel_bins} mel bins"
        raise BrokenItemError(f"features are {features.dtype} of shape {features.shape}, expected {wanted}")
    start = rng.randint(0, len(features) - num_frames)
    target = row.numpy()
    target[:] = features[start : start + num_frames]
    # As integers, which compare sooner: the largest exponent, without and with a sign, is beyond everything finite.
    if target.view(np.int16).max() >= 0x7C00 or target.view(np.uint16).max() >= 0xFC00:
        raise BrokenItemError("features hold NaN or infinite values")
