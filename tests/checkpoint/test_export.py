"""`transformers` loads exported folders and computes training's embeddings."""

from pathlib import Path

import numpy as np
import pytest
import torch

import clap_ds
from clap_ds.checkpoint import export
from clap_ds.checkpoint.load_weights import load_weights
from clap_ds.config.model import ClapConfig, ProjectionConfig, load_preset
from clap_ds.model.clap import ClapModel
from clap_ds.weights.hub import load_tokenizer, tokenize, train_tokenizer
from clap_ds.weights.key_mapping import config_to_transformers, laion_names, to_names
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
    """Return two clips of a second: a rising tone and a fading tone."""
    time_s = np.arange(48000, dtype=np.float32) / 48000
    rising = 0.5 * np.sin(2 * np.pi * (200 + 1500 * time_s) * time_s)
    fading = 0.4 * np.exp(-3 * time_s) * np.sin(2 * np.pi * 880 * time_s)
    return [rising, fading]


def assert_loads_whole(folder: Path) -> transformers.ClapModel:
    """Return transformers' model, none of whose weights are missing or left over."""
    model, report = transformers.ClapModel.from_pretrained(folder, output_loading_info=True)
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        assert not report[kind]
    return model


def assert_close(tensor: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    torch.testing.assert_close(tensor, expected, atol=tolerance, rtol=0)


@torch.no_grad()
def test_transformers_computes_same_embeddings(tokenizer: Path, tmp_path: Path) -> None:
    model = random_model()
    # Untrained, so that it must not be used.
    model.logit_scale_text.fill_(3.0)
    checkpoint_of(model, tmp_path / "run", tokenizer=tokenizer)
    export.main([str(tmp_path / "run"), str(tmp_path / "out")])
    sounds = make_sounds()
    ids, mask = tokenize(CAPTIONS, load_tokenizer(str(tokenizer), vocab_size=512), 64)
    audio = model.encode_audio(torch.from_numpy(np.stack(sounds)))
    text = model.encode_text(ids, mask)
    for features in (audio, text):
        assert (features[0] - features[1]).abs().max() > 0.01, "equal features would test nothing"

    processor = transformers.ClapProcessor.from_pretrained(tmp_path / "out")
    padded = processor(text=CAPTIONS, return_tensors="pt", padding="max_length")
    assert torch.equal(padded["input_ids"], ids)
    inputs = processor(
        text=CAPTIONS, audio=sounds, sampling_rate=48000, return_tensors="pt", padding=True
    )
    output = assert_loads_whole(tmp_path / "out")(**inputs)
    # Limited by the front ends' difference.
    assert_close(output.audio_embeds, audio, 1e-4)
    assert_close(output.text_embeds, text, 2e-6)
    scores = model.logit_scale.exp() * audio @ text.T
    assert_close(output.logits_per_audio, scores, 1e-2)
    assert_close(output.logits_per_text, scores.T, 1e-2)
    read_back = load_weights(tmp_path / "out").build().eval()
    assert_close(read_back.encode_text(ids, mask), text, 2e-6)
    # Other users may read the folder if they may read new files.
    (tmp_path / "file").touch()
    modes = {path.stat().st_mode for path in (tmp_path / "out").iterdir()}
    assert modes == {(tmp_path / "file").stat().st_mode}


def test_model_that_transformers_lacks_is_refused_with_every_reason() -> None:
    changes = {
        "num_samples": 48001,
        "projection": ProjectionConfig(hidden_dim=48, bias=True, activation="relu"),
    }
    towers = {
        "audio": MICRO.audio.model_copy(update=changes),
        "text": MICRO.text.model_copy(update={"pooling": "mean"}),
    }
    with pytest.raises(
        ValueError, match=r"pooling 'mean', not .*; its projections aren't .*; its clips aren't"
    ) as refusal:
        config_to_transformers(MICRO.model_copy(update=towers))
    assert "window" not in str(refusal.value)


@pytest.mark.parametrize("library", ["transformers", "open_clip"])
def test_open_clip_model_is_refused_with_its_file(library: str, tmp_path: Path) -> None:
    model = random_model()
    model.config = MICRO.model_copy(update={"name": "open_clip:CLAP-HTSAT-tiny"})
    path = checkpoint_of(model, tmp_path / "run")
    with pytest.raises(
        ValueError, match=r"create_model\('CLAP-HTSAT-tiny', pretrained='.*'\)$"
    ) as refusal:
        export.main([str(tmp_path / "run"), str(tmp_path / "out"), "--format", library])
    assert f"pretrained='{path}/weights.safetensors'" in str(refusal.value)


def test_exported_processor_truncates_at_trained_length(
    tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"clap": {"context_length": 12}}
    run = {"tokenizer": tokenizer, "settings": settings, "best_metric": "zero_shot_top1"}
    best = checkpoint_of(
        random_model(learns_bias=True), tmp_path / "run", 3, metrics={"zero_shot_top1": 0.5}, **run
    )
    checkpoint_of(random_model(), tmp_path / "run", 4, **run)
    export.main([str(tmp_path / "run"), str(tmp_path / "out"), "--best"])
    output = capsys.readouterr().out
    assert f"{best}, step 3, zero_shot_top1 0.5" in output
    assert "truncated to 12 tokens" in output

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
    assert inputs["input_features"].shape == (1, 1, 101, 16)
    # Random crops would differ between calls.
    with pytest.raises(NotImplementedError, match="of longer clips"):
        processor(audio=np.tile(sound, 2), sampling_rate=48000)


def test_processor_of_unknown_length_truncates_like_clap_ds(
    tokenizer: Path, tmp_path: Path
) -> None:
    text = MICRO.text.model_copy(update={"max_positions": 130})
    source = tmp_path / "model.safetensors"
    save_safetensors(random_model(MICRO.model_copy(update={"text": text})), source)
    export.main([str(source), str(tmp_path / "out"), "--tokenizer", str(tokenizer)])
    processor = transformers.ClapProcessor.from_pretrained(tmp_path / "out")
    truncation = {"padding": True, "truncation": True}
    ids = processor(text=[LONG_CAPTION], text_kwargs=truncation, return_tensors="pt")["input_ids"]
    # LAION's length.
    assert ids.shape == (1, 77)
    for path in (source, tmp_path / "out"):
        clap = clap_ds.load(path, tokenizer=str(tokenizer), device="cpu")
        assert torch.equal(tokenize([LONG_CAPTION], clap.tokenizer, clap.context_length)[0], ids)


def test_failed_export_overwrites_nothing_and_leaves_nothing(
    tokenizer: Path, tmp_path: Path
) -> None:
    path = checkpoint_of(random_model(), tmp_path / "run", tokenizer=tokenizer)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("precious")
    # A predictable name of a draft.
    (tmp_path / ".new.partial").symlink_to(tmp_path / "out")
    (tmp_path / "file").write_text("")
    without_tokenizer = tmp_path / "model.safetensors"
    save_safetensors(random_model(), without_tokenizer)
    for source, folder, options, reason in (
        (path, "out", [], "expected a new folder"),
        (path, "file/out", [], "can't be written"),
        (path, "new", ["--tokenizer", str(tmp_path / "out")], "holds no tokenizer"),
        (without_tokenizer, "new", [], "--tokenizer"),
    ):
        with pytest.raises(ValueError, match=reason):
            export.main([str(source), str(tmp_path / folder), *options])
    assert not (tmp_path / "new").exists()
    assert [path.name for path in tmp_path.glob(".*.partial")] == [".new.partial"]
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]


def test_laion_file_is_exported(tokenizer: Path, tmp_path: Path) -> None:
    laion = tmp_path / "clap.pt"
    torch.save({"state_dict": to_names(random_model().state_dict(), laion_names)}, laion)
    export.main([str(laion), str(tmp_path / "out"), "--tokenizer", str(tokenizer)])
    assert_loads_whole(tmp_path / "out")
