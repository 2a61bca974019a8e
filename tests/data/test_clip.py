"""Test an item's captions, features, and the input of feature fusion, which equals transformers'
except for random crops."""

import contextlib
import json
import random
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from clap_ds.config.model import AudioConfig, load_preset
from clap_ds.config.schema import ShardData
from clap_ds.data.batch import BatchSpec, join
from clap_ds.data.clip import captions_of, choose_clip, read_fused, read_mel
from clap_ds.data.decoding import BrokenItemError
from clap_ds.data.webdataset import WebDatasetStream
from clap_ds.evaluation.clips import Middle, list_clips, load_audio
from clap_ds.model.patch_embed import is_longer_than_clip
from clap_ds.weights.key_mapping import feature_extractor
from tests.data.tars import wav, write_tar
from tests.evaluation.conftest import npy

MICRO = load_preset("micro")
AUDIO = load_preset("clap_htsat_tiny_roberta_base_fused").audio.model_copy(
    update={"num_samples": 48000}
)
"""Clips of a second. The extractor only fuses 64 mel bins."""


@pytest.mark.parametrize(
    ("members", "captions"),
    [
        ({"txt": b"  a bell\n"}, ["a bell"]),
        ({"txt": "\ufeffein Glöckchen".encode()}, ["ein Glöckchen"]),
        ({"txt": b"no", "json": b'{"caption": "no", "text": "a bell"}'}, ["a bell"]),
        ({"txt": b"no", "json": b'{"caption": "a bell", "text": null}'}, ["a bell"]),
        ({"txt": b"no", "json": b'{"caption": ["a bell"], "text": ""}'}, ["a bell"]),
        ({"txt": b"a bell", "json": b'{"kind": "bell"}'}, ["a bell"]),
        ({"txt": b"no", "json": b'{"caption": "a bell", "text": "  "}'}, ["a bell"]),
        ({"txt": b"a bell", "json": b'{"text": 5}'}, ["a bell"]),
        ({"json": b'{"caption": ["", null, "a bell"]}'}, ["a bell"]),
        ({"json": json.dumps({"text": ["a bell", "", "a gong"]}).encode()}, ["a bell", "a gong"]),
        ({}, "no caption: expected text, or a list of texts, in text or caption or txt"),
        ({"json": b'["a bell"]'}, "no caption"),
        ({"json": b'{"caption": '}, "can't be read: Expecting value"),
        ({"txt": b" \n"}, "empty caption"),
        ({"0 (clean).wav": b"", "0 (clean).txt": b"a bell"}, r"0 \(clean\)\.txt.* first dot"),
    ],
)
def test_captions_are_found_or_refused_with_a_reason(
    members: dict[str, bytes], captions: list[str] | str
) -> None:
    if isinstance(captions, list):
        assert captions_of(members) == captions
    else:
        with pytest.raises(BrokenItemError, match=captions):
            captions_of(members)


@pytest.mark.parametrize(
    ("key", "caption"), [("title;txt", "a bell"), ("title;tags", "loud"), ("tags;txt", "loud")]
)
def test_captions_are_found_by_the_first_name_that_exists(key: str, caption: str) -> None:
    assert captions_of(
        {"txt": b"a bell", "json": b'{"tags": ["loud"], "caption": "no", "title": null}'}, key
    ) == [caption]


def test_an_extension_with_a_dot_is_explained_if_there_is_no_audio() -> None:
    with pytest.raises(BrokenItemError, match=r"0 \(clean\)\.wav.* first dot"):
        choose_clip({"__key__": "Track 2", "0 (clean).wav": b""}, "encoded")
    with pytest.raises(BrokenItemError, match=r"files: txt$"):
        choose_clip({"__key__": "Track 2", "txt": b""}, "encoded")


def read(features: np.ndarray | bytes, num_frames: int = 10, seed: int = 0) -> np.ndarray:
    row = torch.empty(num_frames, 4, dtype=torch.float16)
    read_mel(
        features if isinstance(features, bytes) else npy(features), row, rng=random.Random(seed)
    )
    return row.numpy()


FEATURES = np.random.default_rng(0).normal(-30, 30, (12, 4)).astype(np.float16)


def test_features_are_cropped_at_frames() -> None:
    crops = [read(FEATURES, seed=seed) for seed in range(40)]
    starts = {
        start
        for crop in crops
        for start in range(3)
        if np.array_equal(crop, FEATURES[start : start + 10])
    }
    assert starts == {0, 1, 2}
    for features in (FEATURES, np.full((12, 4), -65504, np.float16)):
        assert np.array_equal(read(features, num_frames=12), features)


def put(value: float) -> np.ndarray:
    features = FEATURES.copy()
    features[1:11, 2] = value
    return features


@pytest.mark.parametrize(
    ("features", "reason"),
    [
        (b"", "aren't a NumPy file"),
        (npy(FEATURES)[:128].replace(b"descr", b"[[[[["), "aren't a NumPy file"),
        (npy(FEATURES)[:-1], "aren't a NumPy file"),
        (
            FEATURES.astype("f4"),
            r"are float32 of shape \(12, 4\), expected float16, at least 10 frames",
        ),
        (FEATURES[:9], r"of shape \(9, 4\)"),
        (FEATURES[0], r"of shape \(4,\)"),
        *((put(value), "NaN or infinite") for value in (np.nan, -np.nan, np.inf, -np.inf)),
    ],
)
def test_unusable_features_are_refused_with_a_reason(
    features: np.ndarray | bytes, reason: str
) -> None:
    with pytest.raises(BrokenItemError, match=reason):
        read(features)


def noise(num_samples: int, seed: int = 0) -> np.ndarray:
    return (0.2 * np.random.default_rng(seed).standard_normal(num_samples)).astype(np.float32)


def fused(samples: np.ndarray, audio: AudioConfig) -> torch.Tensor:
    row = torch.empty(audio.clip_shape)
    read_fused(wav(samples), row, audio=audio, rng=Middle())
    return row


@pytest.mark.parametrize("num_samples", [20_000, 48_300, 48_480, 170_000])
def test_fusion_equals_the_extractor_of_transformers(num_samples: int) -> None:
    samples = noise(num_samples)
    extractor = feature_extractor(AUDIO)
    with mock.patch.object(
        np.random, "choice", lambda places: (int(places[0]) + int(places[-1])) // 2
    ):
        (expected,), _ = extractor([samples], sampling_rate=48000).values()
    found = fused(samples, AUDIO)
    expected = torch.tensor(np.asarray(expected)).float()
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-3)  # dB, from fp32's FFT
    assert bool(is_longer_than_clip(found[None])) == (num_samples >= 48_480)


def test_evaluation_and_training_fuse_shards(tmp_path: Path, tokenizer_dir: str) -> None:
    model = MICRO.model_copy(update={"audio": MICRO.audio.model_copy(update={"fusion": True})})
    clips = [noise(30_000 + 60_000 * (n % 2), n) for n in range(4)]
    members = [
        each
        for n, clip in enumerate(clips)
        for each in ((f"{n}.wav", wav(clip)), (f"{n}.txt", b"a"))
    ]
    tar = str(write_tar(tmp_path / "a.tar", members))
    rows = list(load_audio(list_clips([tar])[0], model.audio, num_workers=0))
    for row, samples in zip(rows, clips, strict=True):
        assert torch.equal(row, fused(samples, model.audio))
    options: dict[str, Any] = {"tokenizer": tokenizer_dir, "num_workers": 0, "shuffle_buffer": 0}
    for audio_dtype, dtype in (("int16", torch.float16), ("float32", torch.float32)):
        data = ShardData(source="webdataset", shards=tar, audio_dtype=audio_dtype, **options)
        with contextlib.closing(WebDatasetStream(data, BatchSpec(model, 12, 4))) as pieces:
            (piece,) = next(pieces)
        assert (piece.audio.dtype, tuple(piece.audio.shape)) == (dtype, (4, 4, 101, 16))
        audio = join([piece], torch.device("cpu")).audio
        assert is_longer_than_clip(audio).tolist() == [False, True] * 2
        torch.testing.assert_close(
            audio[0], rows[0], rtol=0, atol=2**-5
        )  # half of float16's step up to 128 dB
