"""Test `clap_ds.load`: results equal evaluation's bitwise for every weight format; mistakes give
one-line errors."""

import doctest
import io
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import soundfile
import torch

import clap_ds
from clap_ds.checkpoint.exporters import export
from clap_ds.checkpoint.load_weights import load_weights
from clap_ds.config.schema import EvaluationSettings
from clap_ds.evaluation.clips import list_clips
from clap_ds.evaluation.embedding import class_features
from clap_ds.evaluation.evaluator import Evaluator
from clap_ds.inference import model as module
from clap_ds.inference.model import Clap
from clap_ds.model.torchaudio_compat import torchaudio
from tests.data.tars import write_tar
from tests.data.test_decoding import KAISER_BEST
from tests.evaluation.conftest import ALONE
from tests.inference.conftest import noise, write_sound
from tests.weights.fake_checkpoints import save_safetensors

import transformers  # isort: skip

LENGTHS = {
    "short": (0.3, 48000, 1),
    "window": (1, 48000, 1),
    "other rate": (0.9, 44100, 2),
    "long": (2.2, 48000, 2),
}


@pytest.fixture
def shard(tmp_path: Path) -> str:
    members = []
    for number, (name, sizes) in enumerate(LENGTHS.items()):
        path = write_sound(tmp_path / f"{name}.flac", noise(*sizes) * (1 - 0.1 * number), sizes[1])
        told = {"kind": ["dog_bark", "rain"][number % 2], "caption": f"a sound, {name}"}
        members += [
            (f"{name}.flac", Path(path).read_bytes()),
            (f"{name}.json", json.dumps(told).encode()),
        ]
    return str(write_tar(tmp_path / "clips.tar", members))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_embeddings_and_scores_are_evaluations_to_the_bit(
    clap: Clap, shard: str, num_workers: int
) -> None:
    settings = EvaluationSettings(retrieval={"shards": shard}, zero_shot={"shards": shard})
    options: Any = {
        "context_length": clap.context_length,
        "micro_batch": 32,
        "loss_kind": "softmax",
        "ranks": ALONE,
    }
    evaluator = Evaluator(
        settings, model_config=clap.config, tokenizer_name=clap._tokenizer_name, **options
    )
    paths = [str(Path(shard).parent / f"{name}.flac") for name in LENGTHS]
    embedded = clap.embed_audio(paths, pooling="center", num_workers=num_workers)
    assert np.array_equal(evaluator._embed_clips(clap.model)[0], embedded)
    clips = list_clips([shard])[0]
    assert np.array_equal(
        clap.embed_audio(clips, pooling="center", num_workers=num_workers), embedded
    )
    assert np.array_equal(
        clap.embed_audio(paths[::-1], pooling="center")[::-1], embedded
    )  # independent of the others
    one_window = [name != "long" for name in LENGTHS]
    assert np.array_equal(clap.embed_audio(paths)[one_window], embedded[one_window])
    np.testing.assert_allclose(
        clap.embed_audio(paths[0]), embedded[:1], atol=3e-7
    )  # roundings of numbers below 1
    plans = evaluator._plans
    text = evaluator._embed_captions(clap.model, plans["retrieval"].captions)
    assert np.array_equal(text, clap.embed_text([f"a sound, {name}" for name in LENGTHS]))
    classes = clap.class_embeddings(["dog_bark", "rain"])
    captions = plans["zero_shot"].captions
    assert np.array_equal(
        class_features(captions, evaluator._embed_captions(clap.model, captions)), classes
    )
    mean = (
        clap.embed_text([text.format("dog bark") for text in module.TEMPLATES])
        .astype(np.float64)
        .mean(axis=0)
    )
    np.testing.assert_allclose(classes[0], mean / np.linalg.norm(mean), atol=3e-7)
    logits = np.exp(clap.model.logit_scale.item()) * embedded.astype(np.float64) @ classes.T
    expected = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    likely = clap.classify(paths, ["dog_bark", "rain"], pooling="center")
    np.testing.assert_allclose(
        likely, expected, rtol=1e-6
    )  # float32's rounding, with exponents of at most 15


def test_arrays_are_as_files(clap: Clap, tmp_path: Path) -> None:
    """As transformers and `datasets` have them, and encoded files in memory."""
    shorts = [(noise(*sizes) * 32768).astype(np.int16) for sizes in ((1.7, 44100, 2), (0.4, 44100))]
    paths = [write_sound(tmp_path / f"{n}.wav", samples, 44100) for n, samples in enumerate(shorts)]
    floats = [samples / np.float32(32768) for samples in shorts]
    embedded = clap.embed_audio(paths)
    assert (embedded.shape, embedded.dtype) == ((2, clap.dim), np.float32)
    decoded = SimpleNamespace(data=torch.from_numpy(floats[1]), sample_rate=44100)
    contents = [Path(path).read_bytes() for path in paths]
    for sounds in (
        [shorts[0], shorts[1][0]],
        [torch.from_numpy(floats[0]), floats[1].astype(np.float64)],
        [
            {"path": None, "array": floats[0], "sampling_rate": 44100},
            SimpleNamespace(get_all_samples=lambda: decoded),
        ],
        [contents[0], io.BytesIO(contents[1])],
    ):
        assert np.array_equal(clap.embed_audio(sounds, 44100), embedded)
        assert clap.embed_audio(sounds[0], 44100.0).shape == (1, clap.dim)
    batch = np.stack([noise(0.4), noise(0.4) / 2])  # (N, 1, T)
    assert np.array_equal(clap.embed_audio(batch, 48000), clap.embed_audio([*batch], 48000))
    assert clap.embed_audio([]).shape == clap.embed_text([]).shape == (0, clap.dim)
    loud = np.tile(noise(0.9)[0] * 3.4, 3)
    assert np.array_equal(clap.embed_audio(loud, 44100), clap.embed_audio(loud.clip(-1, 1), 44100))


@pytest.mark.parametrize("convert", [np.asarray, torch.from_numpy], ids=["NumPy", "torch"])
@pytest.mark.parametrize("rows", [3, 4, 8, 9, 16])
def test_arrays_of_more_rows_than_stereo_are_refused_with_the_ways_to_pass_them(
    clap: Clap, rows: int, convert: Any
) -> None:
    array = convert(noise(0.4, channels=rows))
    for audio, name in ((array, "audio"), ([array[:2], array], "audio[1]")):
        with pytest.raises(ValueError, match=re.escape(f"{name}: expected")) as error:
            clap.embed_audio(audio, 48000)
        assert f"({rows}, 19200)" in str(error.value)
        assert "list(array)" in str(error.value)
        assert "channels_first=True" in str(error.value)


def test_channels_first_reads_an_array_as_one_sound_and_a_list_as_clips(clap: Clap) -> None:
    array = noise(0.4, channels=4)
    mixed = clap.embed_audio(array.mean(axis=0), 48000)
    for convert in (np.asarray, torch.from_numpy):
        np.testing.assert_allclose(
            clap.embed_audio(convert(array), 48000, channels_first=True), mixed, atol=1e-6
        )
        np.testing.assert_allclose(
            clap.embed_audio(convert(array.T), 48000, channels_first=False), mixed, atol=1e-6
        )
    clips = clap.embed_audio([*array], 48000, channels_first=False)
    assert clips.shape == (4, clap.dim)
    assert np.array_equal(clips, clap.embed_audio(array[:, None], 48000))
    likely = clap.classify(array, ["dog", "rain"], sample_rate=48000, channels_first=True)
    assert likely.shape == (1, 2)
    with pytest.raises(ValueError, match="at most 8 channels"):
        clap.embed_audio(noise(0.4, channels=9), 48000, channels_first=True)
    with pytest.raises(ValueError, match="channels_first"):
        clap.embed_audio(array.T, 48000)  # soundfile's order
    # The channels of datasets' entries are known.
    decoded = SimpleNamespace(data=torch.from_numpy(array), sample_rate=48000)
    decoder = SimpleNamespace(get_all_samples=lambda: decoded)
    for entry in ({"array": array, "sampling_rate": 48000}, decoder):
        np.testing.assert_allclose(clap.embed_audio(entry), mixed, atol=1e-6)


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["a", None], "texts[1]: expected texts, not blank, found NoneType"),
        (["a", b"b"], "texts[1]: expected texts, not blank, found bytes"),
        ([["a"], "b"], "texts[0]: expected texts, not blank, found list"),
        ([float("nan")], "texts[0]: expected texts, not blank, found float"),
        (b"x", "found bytes"),
        (5, "found int"),
        (None, "found NoneType"),
        (["a", "b", "\n"], "texts[2]: expected texts, not blank, found str"),
        ("", "found str"),
    ],
)
def test_texts_that_are_none_are_refused_with_their_index_and_type(
    clap: Clap, texts: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        clap.embed_text(texts)


@pytest.mark.parametrize("name", ["labels", "templates"])
def test_labels_and_templates_that_are_no_texts_are_refused_with_their_index_and_type(
    clap: Clap, name: str
) -> None:
    texts: dict[str, Any] = {"labels": ["dog", "rain"], "templates": ["{}", "a {}"]}
    texts[name][1] = None
    with pytest.raises(
        ValueError, match=re.escape(f"{name}[1]: expected texts, not blank, found NoneType")
    ):
        clap.class_embeddings(**texts)


def test_the_same_model_from_wherever_it_lies(
    clap: Clap, clap_folder: Path, tmp_path: Path
) -> None:
    sound = write_sound(tmp_path / "a.wav", noise(1.0))
    save_safetensors(clap.model, tmp_path / "m.safetensors")
    export(load_weights(clap_folder), snapshot := tmp_path / "exported", None)
    for source in (tmp_path / "m.safetensors", snapshot):
        other = clap_ds.load(source)
        assert (other.fingerprint, other.source) == (clap.fingerprint, str(source))
        assert np.array_equal(other.embed_audio(sound), clap.embed_audio(sound))
    assert np.array_equal(other.embed_text(["a loud tone"]), clap.embed_text(["a loud tone"]))
    assert clap_ds.load(clap_folder, best=True).source.endswith("step-00000001")
    theirs: Any = transformers.ClapModel.from_pretrained(snapshot)
    features = transformers.ClapFeatureExtractor.from_pretrained(snapshot)(
        soundfile.read(sound)[0], sampling_rate=48000, return_tensors="pt"
    )
    with torch.no_grad():
        row = theirs.eval().get_audio_features(**features).pooler_output[0].numpy()
    np.testing.assert_allclose(
        row / np.linalg.norm(row), clap.embed_audio(sound)[0], atol=2e-5
    )  # mels of float32


def test_the_examples_of_docstring_and_docs(
    clap_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, seconds in (("dog.wav", 0.5), ("rain.flac", 1.2), ("storm.mp3", 1.8)):
        write_sound(tmp_path / name, noise(seconds))
    (tmp_path / clap_folder.name).symlink_to(clap_folder)
    (tmp_path / "runs").symlink_to(clap_folder.parent)
    page = Path(__file__).parents[2] / "docs" / "inference.md"
    monkeypatch.chdir(tmp_path)
    exec(page.read_text().split("```python\n")[1].split("```")[0], {})
    assert capsys.readouterr().out.count("storm.mp3 ") == 3
    results = doctest.testmod(module)
    assert (results.failed, results.attempted) == (0, 4)
    assert "load" in dir(clap_ds)


def test_the_middle_is_cut_at_the_files_rate_and_resampled_then(clap: Clap) -> None:
    """As in training, and in docs/training.md for `transformers`."""
    samples = noise(2.5)[0] / 2
    length = round(clap.clip_s * clap.sample_rate)
    frames = -(-length * 44100 // 48000)
    cut = torch.from_numpy(samples)[(len(samples) - frames) // 2 :][:frames]
    middle = torchaudio.functional.resample(cut, 44100, 48000, **KAISER_BEST)[:length]
    found = clap.embed_audio(samples, 44100, pooling="center")
    np.testing.assert_allclose(found, clap.embed_audio(middle.numpy(), 48000), atol=1e-5)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda c: c.embed_audio(noise(1) * 32767 / np.abs(noise(1)).max(), 48000), "integers"),
        (lambda c: c.embed_audio(noise(1), 44100.5), "found 44100.5"),
        (lambda c: c.embed_audio(io.StringIO("x")), "found str of shape ()"),
        (lambda c: c.embed_audio(["gone.wav"]), "gone.wav: No such file"),
        (lambda c: c.embed_audio([noise(1)]), "sample_rate"),
        (lambda c: c.embed_audio([(noise(1)[0], 48000)]), "audio[0]: expected a path, samples"),
        (lambda c: c.embed_audio({"samples": noise(1)}), "found NoneType"),
        (lambda c: c.embed_audio(noise(1).astype(int), 48000), "int64"),
        (lambda c: c.iter_windows(["x"], overlap=1.0), "overlap"),
        (lambda c: c.class_embeddings(["a"], ["sound"]), "templates"),
        (lambda c: clap_ds.load("some/where"), "no CLAP 'some/where'"),
        (lambda c: clap_ds.load(c.source, tokenizer="/nowhere"), "no tokenizer '/nowhere'"),
    ],
)
def test_mistakes(clap: Clap, call: Any, says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        call(clap)
