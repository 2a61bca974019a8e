"""Test that `transformers` loads exported folders and computes training's embeddings."""

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


def sounds() -> list[np.ndarray]:
    """Return two clips of a second: a rising tone and a fading tone."""
    time = np.arange(48000, dtype=np.float32) / 48000
    rising = 0.5 * np.sin(2 * np.pi * (200 + 1500 * time) * time)
    return [rising, 0.4 * np.exp(-3 * time) * np.sin(2 * np.pi * 880 * time)]


def test_transformers_gives_the_same_embeddings(tokenizer: Path, tmp_path: Path) -> None:
    model = random_model()
    model.logit_scale_text.fill_(3.0)  # untrained
    checkpoint_of(model, tmp_path / "run", tokenizer=tokenizer)
    export.main([str(tmp_path / "run"), str(tmp_path / "out")])
    theirs, report = transformers.ClapModel.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    processor = transformers.ClapProcessor.from_pretrained(tmp_path / "out")
    inputs = processor(
        text=CAPTIONS, audio=sounds(), sampling_rate=48000, return_tensors="pt", padding=True
    )
    ids, mask = tokenize(CAPTIONS, load_tokenizer(str(tokenizer), vocab_size=512), 64)
    assert torch.equal(
        processor(text=CAPTIONS, return_tensors="pt", padding="max_length")["input_ids"], ids
    )
    near = torch.testing.assert_close
    with torch.no_grad():
        output = theirs(**inputs)
        audio = model.encode_audio(torch.from_numpy(np.stack(sounds())))
        text = model.encode_text(ids, mask)
        read_back = load_weights(tmp_path / "out").build().eval().encode_text(ids, mask)
    scores = model.logit_scale.exp().detach() * audio @ text.T
    near(output.audio_embeds, audio, atol=1e-4, rtol=0)  # limited by the front ends' difference
    for found in (output.text_embeds, read_back):
        near(found, text, atol=2e-6, rtol=0)
    assert (
        min(float((each[0] - each[1]).abs().max()) for each in (audio, text)) > 0.01
    )  # else it would be weak
    near(output.logits_per_audio, scores, atol=1e-2, rtol=0)
    near(output.logits_per_text, scores.T, atol=1e-2, rtol=0)
    (tmp_path / "file").touch()
    assert {path.stat().st_mode for path in (tmp_path / "out").iterdir()} == {
        (tmp_path / "file").stat().st_mode
    }


def test_what_transformers_cannot_express_is_refused_with_every_reason() -> None:
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
    ) as told:
        config_to_transformers(MICRO.model_copy(update=towers))
    assert "window" not in str(told.value)


@pytest.mark.parametrize("form", ["transformers", "open_clip"])
def test_a_run_of_an_open_clip_model_is_refused_with_the_file_that_open_clip_loads(
    form: str, tmp_path: Path
) -> None:
    model = random_model()
    model.config = MICRO.model_copy(update={"name": "open_clip:CLAP-HTSAT-tiny"})
    path = checkpoint_of(model, tmp_path / "run")
    with pytest.raises(
        ValueError, match=r"create_model\('CLAP-HTSAT-tiny', pretrained='.*'\)$"
    ) as refusal:
        export.main([str(tmp_path / "run"), str(tmp_path / "out"), "--format", form])
    assert f"pretrained='{path}/weights.safetensors'" in str(refusal.value)
    assert "projection" not in str(refusal.value)


def test_captions_are_cut_at_the_trained_length(
    tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = {
        "settings": {"clap": {"context_length": 12}},
        "best_metric": "zero_shot_top1",
        "metrics": {"zero_shot_top1": 0.5},
    }
    path = checkpoint_of(
        random_model(learns_bias=True), tmp_path / "run", 3, tokenizer=tokenizer, **told
    )
    checkpoint_of(
        random_model(), tmp_path / "run", 4, tokenizer=tokenizer, **told | {"metrics": {}}
    )
    export.main([str(tmp_path / "run"), str(tmp_path / "out"), "--best"])
    said = capsys.readouterr().out
    for part in (f"{path}, step 3, zero_shot_top1 0.5", "truncated to 12 tokens"):
        assert part in said
    processor = transformers.ClapProcessor.from_pretrained(tmp_path / "out")
    # As in the note; plain truncation=True would also reach the front end, with another meaning.
    asked = {
        "text_kwargs": {"padding": True, "truncation": True},
        "sampling_rate": 48000,
        "return_tensors": "pt",
    }
    inputs = processor(text=["rain " * 400], audio=sounds()[0], **asked)
    expected = tokenize(["rain " * 400], load_tokenizer(str(tokenizer), vocab_size=512), 12)[0]
    assert torch.equal(inputs["input_ids"], expected)
    assert inputs["input_features"].shape == (1, 1, 101, 16)
    long = np.tile(sounds()[0], 2)  # random crops would differ between calls
    with pytest.raises(NotImplementedError, match="of longer clips"):
        processor(audio=long, sampling_rate=48000)
    asked = {"truncation": "rand_trunc", "sampling_rate": 48000, "return_tensors": "pt"}
    assert processor.feature_extractor(long, **asked)["input_features"].shape == (1, 1, 101, 16)


def test_captions_of_unknown_length_are_cut_alike_by_the_exported_processor_and_clap_ds(
    tokenizer: Path, tmp_path: Path
) -> None:
    longer = MICRO.text.model_copy(update={"max_positions": 130})
    save_safetensors(
        random_model(MICRO.model_copy(update={"text": longer})),
        source := tmp_path / "m.safetensors",
    )
    export.main([str(source), str(tmp_path / "out"), "--tokenizer", str(tokenizer)])
    processor = transformers.ClapProcessor.from_pretrained(tmp_path / "out")
    cut = {"padding": True, "truncation": True}
    ids = processor(text=["rain " * 400], text_kwargs=cut, return_tensors="pt")["input_ids"]
    assert ids.shape == (1, 77)  # LAION's
    for path in (source, tmp_path / "out"):
        clap = clap_ds.load(path, tokenizer=str(tokenizer), device="cpu")
        assert torch.equal(tokenize(["rain " * 400], clap.tokenizer, clap.context_length)[0], ids)


def test_nothing_is_overwritten_and_nothing_half_written_stays(
    tokenizer: Path, tmp_path: Path
) -> None:
    path = checkpoint_of(random_model(), tmp_path / "run", tokenizer=tokenizer)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("precious")
    (tmp_path / ".new.partial").symlink_to(tmp_path / "out")  # a predictable name
    (tmp_path / "file").write_text("")
    save_safetensors(random_model(), bare := tmp_path / "model.safetensors")
    for source, folder, options, reason in (
        (path, "out", [], "expected a new folder"),
        (path, "file/out", [], "can't be written"),
        (path, "new", ["--tokenizer", str(tmp_path / "out")], "holds no tokenizer"),
        (bare, "new", [], "--tokenizer"),
    ):
        with pytest.raises(ValueError, match=reason):
            export.main([str(source), str(tmp_path / folder), *options])
    assert not (tmp_path / "new").exists()
    assert [path.name for path in tmp_path.glob(".*.partial")] == [".new.partial"]
    laion = tmp_path / "clap.pt"
    torch.save({"state_dict": to_names(random_model().state_dict(), laion_names)}, laion)
    export.main([str(laion), str(tmp_path / "new"), "--tokenizer", str(tokenizer)])
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]
    _, report = transformers.ClapModel.from_pretrained(tmp_path / "new", output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys"))
