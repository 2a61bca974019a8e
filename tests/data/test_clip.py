"""Test an item's captions, features, and the input of feature fusion, which equals transformers'
except for random crops."""

import random
from typing import Any

import numpy as np
import pytest
import torch

from clap_ds.config.model import load_preset
from clap_ds.config.schema import ShardData
from clap_ds.data.clip import captions_of, choose_clip, read_fused, read_mel
from clap_ds.data.dataloader import build_batches
from clap_ds.data.decoding import BrokenItemError
from clap_ds.evaluation.clips import CenterCropRng
from clap_ds.model.patch_embed import is_longer_than_clip
from clap_ds.weights.key_mapping import feature_extractor
from tests.data.tars import wav, write_tar
from tests.evaluation.conftest import npy
from tests.inference.conftest import noise

MICRO = load_preset("micro")
# Clips of a second. The extractor only fuses 64 mel bins.
FUSED_AUDIO = load_preset("clap_htsat_tiny_roberta_base_fused").audio
AUDIO = FUSED_AUDIO.model_copy(update={"num_samples": 48000})


@pytest.mark.parametrize(
    ("members", "captions"),
    [
        ({"txt": "\ufeffein Glöckchen".encode()}, ["ein Glöckchen"]),
        ({"txt": b"no", "json": b'{"caption": "no", "text": "a bell"}'}, ["a bell"]),
        ({"txt": b"no", "json": b'{"caption": "a bell", "text": null}'}, ["a bell"]),
        ({"txt": b"a bell", "json": b'{"text": 5}'}, ["a bell"]),
        ({"json": b'{"caption": ["", null, "a bell", "a gong"]}'}, ["a bell", "a gong"]),
    ],
)
def test_captions_are_read_in_order_of_names(members, captions):
    assert captions_of(members) == captions


@pytest.mark.parametrize(
    ("members", "reason"),
    [
        ({}, "no caption: expected text, or a list of texts, in text or caption or txt"),
        ({"json": b'{"caption": '}, "can't be read: Expecting value"),
        ({"txt": b" \n"}, "empty caption"),
        ({"0 (clean).wav": b"", "0 (clean).txt": b"a bell"}, r"0 \(clean\)\.txt.* first dot"),
    ],
)
def test_missing_captions_are_refused_with_reason(members, reason):
    with pytest.raises(BrokenItemError, match=reason):
        captions_of(members)


def test_missing_audio_is_refused_with_names_of_files():
    with pytest.raises(BrokenItemError, match=r"0 \(clean\)\.wav.* first dot"):
        choose_clip({"__key__": "Track 2", "0 (clean).wav": b""}, "encoded")


FEATURES = np.random.default_rng(0).normal(-30, 30, (12, 4)).astype(np.float16)


def read(encoded: bytes, seed: int = 0) -> np.ndarray:
    row = torch.empty(10, 4, dtype=torch.float16)
    read_mel(encoded, row, rng=random.Random(seed))
    return row.numpy()


def test_features_are_cropped_at_frames():
    crops = {read(npy(FEATURES), seed).tobytes() for seed in range(40)}
    assert crops == {FEATURES[start : start + 10].tobytes() for start in range(3)}


def with_value(value: float) -> bytes:
    features = FEATURES.copy()
    features[1:11, 2] = value
    return npy(features)


@pytest.mark.parametrize(
    ("encoded", "reason"),
    [
        (b"", "aren't a NumPy file"),
        (npy(FEATURES)[:128].replace(b"descr", b"[[[[["), "aren't a NumPy file"),
        (npy(FEATURES.astype("f4")), r"float32 of shape \(12, 4\), expected float16, at least 10"),
        (npy(FEATURES[:9]), r"of shape \(9, 4\)"),
        (with_value(np.nan), "NaN or infinite"),
        (with_value(-np.inf), "NaN or infinite"),
    ],
)
def test_unusable_features_are_refused_with_reason(encoded, reason):
    with pytest.raises(BrokenItemError, match=reason):
        read(encoded)


@pytest.mark.parametrize("num_samples", [20_000, 48_480, 170_000])
def test_fusion_equals_extractor_of_transformers(num_samples, monkeypatch):
    samples = noise(num_samples / 48000)[0]
    # The middle position, as in evaluation.
    monkeypatch.setattr(np.random, "choice", lambda positions: positions[(len(positions) - 1) // 2])
    (features,), _ = feature_extractor(AUDIO)([samples], sampling_rate=48000).values()
    expected = torch.tensor(np.asarray(features)).float()
    row = torch.empty(AUDIO.clip_shape)
    read_fused(wav(samples), row, audio=AUDIO, rng=CenterCropRng())
    # dB, from fp32's FFT
    torch.testing.assert_close(row, expected, rtol=0, atol=2e-3)
    assert bool(is_longer_than_clip(row[None])) == (num_samples >= 48_480)


FUSED = MICRO.model_copy(update={"audio": MICRO.audio.model_copy(update={"fusion": True})})


def test_shards_are_fused_for_training(tmp_path, tokenizer_dir):
    """Clips shorter and longer than a second."""
    members = []
    for name, seconds in (("short", 0.6), ("long", 1.9)):
        members += [(f"{name}.wav", wav(noise(seconds)[0])), (f"{name}.txt", b"a")]
    tar = write_tar(tmp_path / "a.tar", members)
    options: dict[str, Any] = {"tokenizer": tokenizer_dir, "num_workers": 0, "shuffle_buffer": 0}
    data = ShardData(source="webdataset", shards=str(tar), **options)
    with build_batches(data, model=FUSED, micro_batch=2) as source:
        audio = next(source).audio
    assert (audio.dtype, *audio.shape) == (torch.float32, 2, *FUSED.audio.clip_shape)
    assert is_longer_than_clip(audio).tolist() == [False, True]
