"""`transformers` loads exported folders and computes training's embeddings."""

from pathlib import Path

import numpy as np
import pytest
import torch

from clap_ds.checkpoint import export
from clap_ds.checkpoint.load_weights import load_weights
from clap_ds.config.model import ClapConfig, load_preset
from clap_ds.model.clap import ClapModel
from clap_ds.weights.hub import load_tokenizer, tokenize, train_tokenizer
from clap_ds.weights.key_mapping import config_to_transformers
from tests.weights.fake_checkpoints import checkpoint_of, save_safetensors

import transformers  # isort: skip

MICRO = load_preset("micro")
CAPTIONS = [
    "a dog barks twice",
    "the sound of RAIN, on a tin roof; then thunder",
    "ein Hund bellt – 犬",
    "hum",
]
LONG_CAPTION = "rain " * 400


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(CAPTIONS[:2] * 20, folder, vocab_size=300)
    return folder


def random_model(config: ClapConfig = MICRO, *, learns_bias: bool = False) -> ClapModel:
    """Build a model with weights large enough that each affects the result."""
    torch.manual_seed(1)
    model = ClapModel(config, learns_bias=learns_bias).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    model.audio.batch_norm.running_mean.fill_(-20)
    model.audio.batch_norm.running_var.fill_(90)
    return model


def make_sounds() -> list[np.ndarray]:
    """Return two clips of a second: a low and a high tone."""
    phase = 2 * np.pi * np.arange(48000, dtype=np.float32) / 48000
    return [0.5 * np.sin(200 * phase), 0.4 * np.sin(3000 * phase)]


def assert_close(tensor: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    torch.testing.assert_close(tensor, expected, atol=tolerance, rtol=0)


@torch.no_grad()
def test_transformers_computes_same_embeddings(tokenizer, tmp_path):
    model = random_model()
    # Untrained, so that it must not be used.
    model.logit_scale_text.fill_(3.0)
    checkpoint_of(model, tmp_path / "run", tokenizer=tokenizer)
    export.main([str(tmp_path / "run"), str(tmp_path / "out")])
    sounds = make_sounds()
    ids, mask = tokenize(CAPTIONS, load_tokenizer(str(tokenizer), vocab_size=512), 64)
    audio = model.encode_audio(torch.from_numpy(np.stack(sounds)))
    text = model.encode_text(ids, mask)
    assert (audio[0] - audio[1]).abs().max() > 0.01, "equal features would test nothing"
    processor = transformers.ClapProcessor.from_pretrained(tmp_path / "out")
    inputs = processor(
        text=CAPTIONS, audio=sounds, sampling_rate=48000, return_tensors="pt", padding=True
    )
    loaded, report = transformers.ClapModel.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    output = loaded(**inputs)
    # Limited by the front ends' difference.
    assert_close(output.audio_embeds, audio, 1e-4)
    assert_close(output.text_embeds, text, 2e-6)
    scores = model.logit_scale.exp() * audio @ text.T
    assert_close(output.logits_per_audio, scores, 1e-2)
    read_back = load_weights(tmp_path / "out").build().eval()
    assert_close(read_back.encode_text(ids, mask), text, 2e-6)


def test_inexpressible_model_is_refused_with_every_reason():
    audio = MICRO.audio.model_copy(update={"num_samples": 48001})
    text = MICRO.text.model_copy(update={"pooling": "mean"})
    with pytest.raises(ValueError, match=r"pooling 'mean', not .*; its clips aren't"):
        config_to_transformers(MICRO.model_copy(update={"audio": audio, "text": text}))


def test_open_clip_model_is_refused_with_file(tmp_path):
    model = random_model()
    model.config = MICRO.model_copy(update={"name": "open_clip:CLAP-HTSAT-tiny"})
    path = checkpoint_of(model, tmp_path / "run")
    with pytest.raises(ValueError, match=rf"pretrained='{path}/weights\.safetensors'"):
        export.main([str(tmp_path / "run"), str(tmp_path / "out")])


def test_exported_processor_truncates_at_trained_length(tokenizer, tmp_path, capsys):
    settings = {"clap": {"context_length": 12}}
    model = random_model(learns_bias=True)
    checkpoint_of(model, tmp_path / "run", tokenizer=tokenizer, settings=settings)
    export.main([str(tmp_path / "run"), str(tmp_path / "out")])
    assert "truncated to 12 tokens" in capsys.readouterr().out

    processor = transformers.ClapProcessor.from_pretrained(tmp_path / "out")
    sound = make_sounds()[0]
    # As in the note; plain truncation=True would also reach the front end, with another meaning.
    inputs = processor(
        text=[LONG_CAPTION],
        audio=sound,
        text_kwargs={"padding": True, "truncation": True},
        sampling_rate=48000,
        return_tensors="pt",
    )
    ids, _ = tokenize([LONG_CAPTION], load_tokenizer(str(tokenizer), vocab_size=512), 12)
    assert torch.equal(inputs["input_ids"], ids)
    # Random crops would differ between calls.
    with pytest.raises(NotImplementedError, match="of longer clips"):
        processor(audio=np.tile(sound, 2), sampling_rate=48000)


def test_failed_export_overwrites_nothing_and_leaves_nothing(tokenizer, tmp_path):
    path = checkpoint_of(random_model(), tmp_path / "run", tokenizer=tokenizer)
    (tmp_path / "out").mkdir()
    (tmp_path / "file").write_text("")
    without_tokenizer = tmp_path / "model.safetensors"
    save_safetensors(random_model(), without_tokenizer)
    for source, folder, reason in (
        (path, "out", "expected a new folder"),
        (path, "file/out", "can't be written"),
        (without_tokenizer, "new", "--tokenizer"),
    ):
        with pytest.raises(ValueError, match=reason):
            export.main([str(source), str(tmp_path / folder)])
    assert not (tmp_path / "new").exists()
    assert not [*(tmp_path / "out").iterdir()]
