import io
import random

import numpy as np
import pytest
import torch

from clap_ds.data.clip import read_mel
from clap_ds.data.decoding import BrokenItemError


def npy(features: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, features)
    return buffer.getvalue()


def read(encoded: bytes, num_frames: int = 10, seed: int = 0) -> np.ndarray:
    row = torch.empty(num_frames, 4, dtype=torch.float16)
    read_mel(encoded, row, rng=random.Random(seed))
    return row.numpy()


FEATURES = np.random.default_rng(0).normal(-30, 30, (12, 4)).astype(np.float16)
HEADER = npy(FEATURES)[:128]


def test_features_are_cropped_at_frames() -> None:
    starts = set()
    for seed in range(40):
        crop = read(npy(FEATURES), seed=seed)
        (start,) = (start for start in range(3) if np.array_equal(crop, FEATURES[start : start + 10]))
        starts.add(start)
    assert starts == {0, 1, 2}
    assert np.array_equal(read(npy(FEATURES), num_frames=12), FEATURES)
    large = np.full((10, 4), -65504, np.float16)
    assert np.array_equal(read(npy(large)), large)


def put(value: float) -> np.ndarray:
    features = FEATURES.copy()
    features[1:11, 2] = value
    return features


@pytest.mark.parametrize(
    ("encoded", "reason"),
    [
        (b"", "aren't a NumPy file"),
        (HEADER.replace(b"descr", b"[[[[["), "aren't a NumPy file"),
        (npy(FEATURES.astype("f4")), r"are float32 of shape \(12, 4\), expected float16, at least 10 frames"),
        (npy(FEATURES[:9]), r"of shape \(9, 4\)"),
        (npy(FEATURES)[:-1], "aren't a NumPy file"),
        *((npy(put(value)), "NaN or infinite") for value in (np.nan, -np.nan, np.inf, -np.inf)),
    ],
)
def test_unusable_features_are_refused_with_a_reason(encoded: bytes, reason: str) -> None:
    with pytest.raises(BrokenItemError, match=reason):
        read(encoded)
