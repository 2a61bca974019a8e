"""Test equality with transformers' feature extractor for files of any length, except for its random crops."""

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
from clap_ds.data.clip import read_fused
from clap_ds.data.webdataset import WebDatasetStream
from clap_ds.evaluation.clips import Middle, list_clips, load_audio
from clap_ds.model.patch_embed import longer_rows
from clap_ds.weights.hf_config import feature_extractor
from tests.data.tars import wav, write_tar

MICRO = load_preset("micro")
SIZES = load_preset("clap_htsat_tiny_roberta_base_fused").audio
AUDIO = SIZES.model_copy(update={"num_samples": 48000})
"""Clips of a second. The extractor only fuses 64 mel bins."""


def noise(num_samples: int, seed: int = 0) -> np.ndarray:
    return (0.2 * np.random.default_rng(seed).standard_normal(num_samples)).astype(np.float32)


def read(samples: np.ndarray, rng: random.Random, audio: AudioConfig = AUDIO) -> torch.Tensor:
    row = torch.empty(audio.clip_shape)
    read_fused(wav(samples), row, audio=audio, rng=rng)
    return row


@pytest.mark.parametrize("num_samples", [20_000, 48_300, 48_480, 170_000])
def test_equals_the_extractor_of_transformers(num_samples: int) -> None:
    samples, extractor = noise(num_samples), feature_extractor(AUDIO)
    with mock.patch.object(np.random, "choice", lambda places: (int(places[0]) + int(places[-1])) // 2):
        (expected,), _ = extractor([samples], sampling_rate=48000).values()
    found = read(samples, Middle())
    torch.testing.assert_close(
        found, torch.tensor(np.asarray(expected)).float(), rtol=0, atol=2e-3
    )  # dB, from fp32's FFT
    assert bool(longer_rows(found[None])) == (num_samples >= 48_480)


def test_evaluation_and_training_read_shards_by_it(tmp_path: Path, tokenizer_dir: str) -> None:
    model = MICRO.model_copy(update={"audio": MICRO.audio.model_copy(update={"fusion": True})})
    clips = [noise(30_000 + 60_000 * (n % 2), n) for n in range(4)]
    members = [
        (f"{n}.{kind}", what) for n, each in enumerate(clips) for kind, what in (("wav", wav(each)), ("txt", b"a"))
    ]
    tar = str(write_tar(tmp_path / "a.tar", members))
    rows = list(load_audio(list_clips([tar])[0], model.audio, num_workers=0))
    for row, samples in zip(rows, clips, strict=True):
        assert torch.equal(row, read(samples, Middle(), model.audio))
    options: dict[str, Any] = {"tokenizer": tokenizer_dir, "num_workers": 0, "shuffle_buffer": 0}
    for audio_dtype, dtype in (("int16", torch.float16), ("float32", torch.float32)):
        data = ShardData(source="webdataset", shards=tar, audio_dtype=audio_dtype, **options)
        pieces = WebDatasetStream(data, BatchSpec(model, 12, 4, 0, 1, 0, torch.device("cpu")))
        (piece,) = next(pieces)
        assert (piece.audio.dtype, tuple(piece.audio.shape)) == (dtype, (4, 4, 101, 16))
        audio = join([piece], torch.device("cpu")).audio
        assert longer_rows(audio).tolist() == [False, True] * 2
        torch.testing.assert_close(audio[0], rows[0], rtol=0, atol=2**-5)  # half of float16's step up to 128 dB
        pieces.close()
