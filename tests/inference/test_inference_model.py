"""Test `clap_ds.load`: results equal evaluation's bitwise for every weight format; mistakes give
one-line errors."""

import doctest
import io
import json
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import clap_ds
from clap_ds.config.schema import EvaluationSettings
from clap_ds.evaluation.clips import list_clips
from clap_ds.evaluation.embedding import class_features
from clap_ds.evaluation.evaluator import Evaluator
from clap_ds.inference import model as inference_model
from clap_ds.inference.model import Clap
from tests.data.tars import write_tar
from tests.evaluation.conftest import ALONE
from tests.inference.conftest import noise, write_sound

# Seconds, sample rate and channels.
CLIPS = {
    "short": (0.3, 48000, 1),
    "window": (1, 48000, 1),
    "other rate": (0.9, 44100, 2),
    "long": (2.2, 48000, 2),
}
LABELS = ["dog_bark", "rain"]


@pytest.fixture
def shard(tmp_path: Path) -> str:
    """Return a tar of `CLIPS` with classes, beside their files."""
    members = []
    for number, (name, sizes) in enumerate(CLIPS.items()):
        path = write_sound(tmp_path / f"{name}.flac", noise(*sizes) * (1 - 0.1 * number), sizes[1])
        fields = {"kind": LABELS[number % 2], "caption": f"a sound, {name}"}
        members.append((f"{name}.flac", Path(path).read_bytes()))
        members.append((f"{name}.json", json.dumps(fields).encode()))
    return str(write_tar(tmp_path / "clips.tar", members))


def evaluator_of(clap: Clap, shard: str) -> Evaluator:
    """Return evaluation's own code for the same clips."""
    return Evaluator(
        EvaluationSettings(retrieval={"shards": shard}, zero_shot={"shards": shard}),
        model_config=clap.config,
        tokenizer_name=clap._weights.tokenizer_name,
        context_length=clap.context_length,
        micro_batch=32,
        loss_kind="softmax",
        ranks=ALONE,
    )


def test_audio_embeddings_equal_evaluations_bitwise(clap, shard):
    expected = evaluator_of(clap, shard)._embed_clips(clap.model)[0]
    paths = [str(Path(shard).parent / f"{name}.flac") for name in CLIPS]
    for sounds, num_workers in ((paths, 0), (list_clips([shard])[0], 2)):
        vectors = clap.embed_audio(sounds, pooling="center", num_workers=num_workers)
        assert np.array_equal(vectors, expected)
    # Independent of the others in a batch, and of pooling if there is one window.
    assert np.array_equal(clap.embed_audio(paths[2::-1])[::-1], expected[:3])
    # A single input isn't padded to a batch. Roundings of numbers below 1.
    np.testing.assert_allclose(clap.embed_audio(paths[0]), expected[:1], atol=3e-7)


def test_text_embeddings_and_probabilities_equal_evaluations(clap, shard):
    evaluator = evaluator_of(clap, shard)
    plans = evaluator._plans
    text = evaluator._embed_captions(clap.model, plans["retrieval"].captions)
    assert np.array_equal(text, clap.embed_text([f"a sound, {name}" for name in CLIPS]))
    captions = plans["zero_shot"].captions
    features = class_features(captions, evaluator._embed_captions(clap.model, captions))
    classes = clap.class_embeddings(LABELS)
    assert np.array_equal(features, classes)
    clips = list_clips([shard])[0]
    audio = clap.embed_audio(clips).astype(np.float64)
    exponentials = np.exp(np.exp(clap.model.logit_scale.item()) * audio @ classes.T)
    # float32's rounding, with exponents of at most 15.
    np.testing.assert_allclose(
        clap.classify(clips, LABELS),
        exponentials / exponentials.sum(axis=1, keepdims=True),
        rtol=1e-6,
    )


def decoder_of(samples: np.ndarray, sample_rate: int) -> SimpleNamespace:
    """Return what `datasets` yields for audio: torchcodec's decoder."""
    decoded = SimpleNamespace(data=torch.from_numpy(samples), sample_rate=sample_rate)
    return SimpleNamespace(get_all_samples=lambda: decoded)


def test_arrays_and_encoded_files_equal_paths(clap, tmp_path):
    samples = (noise(1.7, 44100, 2) * 32768).astype(np.int16)
    path = write_sound(tmp_path / "stereo.wav", samples, 44100)
    floats = samples / np.float32(32768)
    content = Path(path).read_bytes()
    expected = clap.embed_audio([path])
    assert (expected.shape, expected.dtype) == ((1, clap.dim), np.float32)
    for sound in (
        samples,
        torch.from_numpy(floats),
        floats.astype(np.float64),
        {"array": floats, "sampling_rate": 44100},
        decoder_of(floats, 44100),
        content,
        io.BytesIO(content),
    ):
        assert clap.embed_audio(sound, 44100.0).shape == (1, clap.dim)
        if isinstance(sound, io.BytesIO):
            sound.seek(0)
        assert np.array_equal(clap.embed_audio([sound], 44100), expected)
    single = clap.embed_audio(floats, 44100)
    assert np.array_equal(clap.embed_audio(floats.T, 44100, channels_first=False), single)
    doubled = clap.embed_audio(np.tile(floats, (2, 1)), 44100, channels_first=True)
    np.testing.assert_allclose(doubled, single, atol=1e-6)
    batch = np.stack([noise(0.4), noise(0.4) / 2])  # (N, 1, T)
    assert np.array_equal(clap.embed_audio(batch, 48000), clap.embed_audio([*batch], 48000))
    assert clap.embed_audio([]).shape == clap.embed_text([]).shape == (0, clap.dim)


def test_examples_of_docstring_and_docs_run(clap_folder, tmp_path, monkeypatch, capsys):
    for name, seconds in (("dog.wav", 0.5), ("rain.flac", 1.2), ("storm.mp3", 1.8)):
        write_sound(tmp_path / name, noise(seconds))
    (tmp_path / clap_folder.name).symlink_to(clap_folder)
    (tmp_path / "runs").symlink_to(clap_folder.parent)
    page = Path(__file__).parents[2] / "docs" / "inference.md"
    monkeypatch.chdir(tmp_path)
    exec(page.read_text().split("```python\n")[1].split("```")[0], {})
    assert capsys.readouterr().out.count("storm.mp3 ") == 3
    results = doctest.testmod(inference_model)
    assert (results.failed, results.attempted) == (0, 4)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda c: c.embed_audio(noise(1, channels=3), 48000), "(3, 48000)"),
        (lambda c: c.embed_audio(noise(1, channels=9), 48000, channels_first=True), "at most 8"),
        (lambda c: c.embed_audio(noise(1), 44100.5), "found 44100.5"),
        (lambda c: c.embed_audio(["gone.wav"]), "gone.wav: No such file"),
        (lambda c: c.embed_audio([(noise(1)[0], 48000)]), "audio[0]: expected a path, samples"),
        (lambda c: c.iter_windows(["x"], overlap=1.0), "overlap"),
        (lambda c: c.embed_text(["a", "\n"]), "texts[1]: expected texts, not blank, found str"),
        (lambda c: c.class_embeddings("dog"), "expected a list of distinct texts"),
        (lambda c: c.class_embeddings(["a"], ["sound"]), "templates"),
        (lambda c: clap_ds.load(c.source, tokenizer="/nowhere"), "no tokenizer '/nowhere'"),
    ],
)
def test_mistake_raises_an_error_with_its_cause(clap, call, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        call(clap)
