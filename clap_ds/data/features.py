"""Read prepared log-mel features."""

from __future__ import annotations

import io
import random
import tokenize

import numpy as np
from torch import Tensor

from clap_ds.data.broken import BrokenItemError

FEATURES = "npy"


def read_mel(encoded: bytes, row: Tensor, *, rng: random.Random) -> None:
    """Write a clip's features from a NumPy file to `row`, (num_frames, mel_bins) float16, cropped at random by `rng`.
    Raises BrokenItemError for another dtype or shape, fewer frames, and NaN or infinite values."""
    num_frames, mel_bins = row.shape
    try:
        features = np.lib.format.read_array(io.BytesIO(encoded))
    except (ValueError, TypeError, SyntaxError, tokenize.TokenError) as error:  # from NumPy's parser
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
    # Integers compare faster. Without and with a sign, the largest exponent is above every finite number.
    if target.view(np.int16).max() >= 0x7C00 or target.view(np.uint16).max() >= 0xFC00:
        raise BrokenItemError("features hold NaN or infinite values")
