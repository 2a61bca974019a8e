"""Files of any length as transformers' feature extractor hears them, its draws aside."""

import random
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from clap_ds.config.model import AudioConfig, load_preset
from clap_ds.config.sections import ShardData
from clap_ds.data import fused
from clap_ds.data.batch import BatchSpec, join
from clap_ds.data.shards import ShardPieces
from clap_ds.evaluation.clips import Middle, list_clips, load_audio
from clap_ds.model.patch_embed import longer_rows
from clap_ds.weights.hf_config import feature_extractor
from tests.data.tars import wav, write_tar

MICRO = load_preset("micro")
SIZES = load_preset("clap_htsat_tiny_roberta_base_fused").audio
AUDIO = SIZES.model_copy(update={"num_samples": 48000})
"""Of a second. The extractor fuses 64 mel bins alone."""


def noise(num_samples: int, seed: int = 0) -> np.ndarray:
    return (0.2 * np.random.default_rng(seed).standard_normal(num_samples)).astype(np.float32)


def read(samples: np.ndarray, rng: random.Random, audio: AudioConfig = AUDIO) -> torch.Tensor:
    row = torch.empty(audio.clip_shape)
    fused.read_fused(wav(samples), row, audio=audio, rng=rng)
    return row


@pytest.mark.parametrize("num_samples", [20_000, 48_000, 48_300, 48_480, 48_960, 170_000])
def test_equals_the_extractor_of_transformers(num_samples: int) -> None:
    samples, extractor = noise(num_samples), feature_extractor(AUDIO)
    with mock.patch.object(np.random, "choice", lambda places: (int(places[0]) + int(places[-1])) // 2):
        (expected,), _ = extractor([samples], sampling_rate=48000).values()
    found = read(samples, Middle())
    torch.testing.assert_close(
        found, torch.tensor(np.asarray(expected)).float(), rtol=0, atol=2e-3
    )  # dB, of fp32's FFT
    assert bool(longer_rows(found[None])) == (num_samples >= 48_480)


def test_parts_are_drawn_from_each_third_and_of_long_files_some_is_heard() -> None:
    whole = fused._front_end(AUDIO.model_dump_json()).of_any_length(torch.from_numpy(noise(190_000))[None])[0]
    starts = []
    for seed in range(40):
        row = read(noise(190_000), random.Random(seed))
        starts.append([next(n for n in range(296) if torch.equal(whole[n : n + 101], part)) for part in row[1:]])
    low, high = np.array(starts).min(axis=0), np.array(starts).max(axis=0)
    assert (low >= [0, 99, 198]).all()
    assert (high < [99, 198, 296]).all()
    assert (high - low > 60).all()
    longest = noise(600_000)
    assert torch.equal(
        read(longest, Middle()), read(longest[60_000:540_000], Middle())
    )  # ten clips' length of its middle


def test_a_steady_tone_is_told_from_a_short_one() -> None:
    tone = np.tile(0.2 * np.sin(np.arange(48) * 2 * np.pi / 48).astype(np.float32), 9000)
    for row in (read(tone, Middle()), read(tone, Middle()).half()):
        assert longer_rows(row[None])
    assert not longer_rows(read(tone[:9000], Middle())[None])


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
    for waveforms, dtype in (("int16", torch.float16), ("float32", torch.float32)):
        data = ShardData(source="shards", shards=tar, waveforms=waveforms, **options)
        pieces = ShardPieces(data, BatchSpec(model, 12, 4, 0, 1, 0, torch.device("cpu")))
        (piece,) = next(pieces)
        assert (piece.audio.dtype, tuple(piece.audio.shape)) == (dtype, (4, 4, 101, 16))
        audio = join([piece], torch.device("cpu")).audio
        assert longer_rows(audio).tolist() == [False, True] * 2
        torch.testing.assert_close(audio[0], rows[0], rtol=0, atol=2**-5)  # half of float16's step up to 128 dB
        pieces.close()
